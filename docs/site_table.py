"""Write ``docs/en/device_sites.md`` and ``docs/zh_cn/device_sites.md`` from what the tests found.

The tests in ``tests/sites`` write one JSON file for each kind of device; see the text below for
the commands.
"""

import sys
from pathlib import Path
from typing import Any, Dict, List

from measured import COLUMNS, load, versions
from tables import table

DOCS = Path(__file__).parent
RESULTS = DOCS / 'sites'

COMMANDS = """```bash
MMDEVPLUG_RESULTS=docs/sites python -m pytest tests/sites -m "not cuda and not xla and not tpu"
MMDEVPLUG_RESULTS=docs/sites PJRT_DEVICE=CPU python -m pytest tests/sites -m xla
python docs/site_table.py
```"""

LANGUAGES: Dict[str, Dict[str, Any]] = dict(
    en=dict(
        suffix='',
        heading="# MMEngine's assumptions about devices",
        intro="""\
Every place where MMEngine 0.10.7 assumes a kind of device: what it does by itself where the
assumption does not hold, and what it does with mmdevplug. MMEngine is not edited. For each row and
each kind of device a test runs MMEngine alone first and then ours, in 2 ranks over gloo, or over
the card's own backend in the last column. *Works*: MMEngine does what the third column says, and
ours what the fourth says. *As MMEngine*: MMEngine is right there already. The other cells are
explained below the table.""",
        titles=('#', 'in mmengine', 'MMEngine by itself', 'with mmdevplug'),
        works='works',
        failed='**fails**',
        served='as MMEngine',
        none='none',
        named='—',
        notes="""\
- *works*: MMEngine by itself does what the third column says, and with mmdevplug what the fourth
  says.
- *as MMEngine*: MMEngine is right there already. In the last column, whose card and backend
  MMEngine knows by name, tests look at MMEngine by itself and at ours.
- *none*: there is nothing of the kind. The CPU and lazy devices have no cache to empty; PJRT's CPU
  client reports no memory, and the published interface of the T20's package has no functions
  for memory, for seeds or for profiles (`ProfilerHook` warns); `CPU_NUM_DEVICES` is no list of
  devices.
- *—*: is about devices that MMEngine names, or about a vendor's backend. In the column of the
  PrivateUse1 card those rows were run on a card named `npu` with a backend that MMEngine does not
  know.
- The stand-ins are described in [tests/standins](../../tests/standins/README.md). torch_xla runs
  on PJRT's CPU client. No Ascend card was at hand: `torch_npu` and `hccl` are stand-ins, too. Row
  26 is not about a device's name, but costs executions.""",
        how="""\
## How

Most of it needs no change of MMEngine: a runner, wrappers and hooks of ours take the places of
MMEngine's (`CheckpointHook`, `EmptyCacheHook`, `IterTimerHook`, `ProfilerHook`, `LogProcessor`),
and your config keeps its names. What other packages import by name is patched when a job starts,
never at import, and `restore_mmengine()` restores it: the value that `get_device` returns, the
index types of `InstanceData`, the device in names of log files, `load_state_dict`, `autocast`, and
on lazy devices the accuracy of heads of mmseg; loaders of checkpoints are registered anew.
`torch.load` is patched while a checkpoint is loaded or `init_weights` of a model runs, for the
calling thread alone. Collectives are not patched: where gloo refuses the tensors of the device,
the process group is one of [our backend `staged`](staged.md), which takes them.
[The list of all patches](patches.md) has the reason for each and how long it is active.

For MMEngine without a runner, for inference for example, call it yourself:

```python
import mmdevplug
from mmdet.apis import DetInferencer

mmdevplug.patch_mmengine('xla')  # or nothing: what is present
DetInferencer('rtmdet-tiny')  # computes there, and runs no code from the checkpoint
```

## Configs of packages

MMEngine finds `_base_ = 'mmdet::...'` with pkg_resources, which setuptools has no longer since
release 81. `mmdevplug train mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py` does without it, also in
the `_base_` of a config and for `read_base()`. With another script, `_base_` can hold
`__import__('mmdevplug').base_config('gcu')`, which asks nobody, and the path of a file.""",
        evidence='## What MMEngine said by itself',
        said='said or did',
        measured='Measured with {}.',
        again='## To measure again',
    ),
    zh_cn=dict(
        suffix='_zh',
        heading='# MMEngine 对设备的假设',
        intro="""\
MMEngine 0.10.7 中所有假设设备种类之处：假设不成立时它自身的行为，以及使用 mmdevplug 后的行为。
不修改 MMEngine。对每一行与每种设备，测试先单独运行 MMEngine，再运行我们的实现（2 个 rank，gloo；
最后一列使用该卡自己的后端）。*可用*：MMEngine 如第三列所述，我们如第四列所述。
*同 MMEngine*：MMEngine 在此处本来就正确。其余单元格在表后说明。""",
        titles=('#', 'mmengine 中的位置', 'MMEngine 自身', '使用 mmdevplug'),
        works='可用',
        failed='**失败**',
        served='同 MMEngine',
        none='无',
        named='—',
        notes="""\
- *可用*：MMEngine 自身的行为如第三列所述，使用 mmdevplug 后如第四列所述。
- *同 MMEngine*：MMEngine 在此已经正确。最后一列的卡与后端是 MMEngine 指名的，测试既检查 MMEngine
  自身，也检查我们的实现。
- *无*：不存在此类功能。CPU 与惰性设备没有可清空的缓存；PJRT 的 CPU 客户端不提供内存信息，T20 的包
  公开的接口没有内存、种子或性能分析函数（`ProfilerHook` 会警告）；`CPU_NUM_DEVICES` 不是设备列表。
- *—*：涉及 MMEngine 指名的设备或原生后端。在 PrivateUse1 卡一列中，这些行在名为 `npu` 的卡与
  MMEngine 不认识的后端上运行。
- 替身的说明见 [tests/standins](../../tests/standins/README.md)。torch_xla 运行在 PJRT 的 CPU
  客户端上。手头没有昇腾卡：`torch_npu` 与 `hccl` 同样是替身。
  第 26 行与设备名称无关，但会增加执行次数。""",
        how="""\
## 实现方式

大部分无需改动 MMEngine：我们的 runner、封装器与钩子代替 MMEngine 的（`CheckpointHook`、
`EmptyCacheHook`、`IterTimerHook`、`ProfilerHook`、`LogProcessor`），配置中的名称不变。其他包按名称
导入的函数在作业启动时（绝不在导入时）打补丁，`restore_mmengine()` 可恢复：`get_device`
的返回值、`InstanceData` 的索引类型、日志文件名中的设备、`load_state_dict`、
`autocast`，以及惰性设备上 mmseg 解码头的准确率函数；检查点的加载器则重新注册。
`torch.load` 仅在加载检查点或模型的 `init_weights` 运行期间有补丁，且只影响调用它的线程。
集合通信函数没有补丁：gloo 不接收设备张量时，进程组使用[我们的后端 `staged`](staged.md)，由它接收。
[全部补丁的列表](patches.md)写明每个补丁的原因和有效期。

不使用 runner 时（例如推理），请自行调用：

```python
import mmdevplug
from mmdet.apis import DetInferencer

mmdevplug.patch_mmengine('xla')  # 或不带参数：使用现有设备
DetInferencer('rtmdet-tiny')  # 在该设备上计算，且不执行检查点中的代码
```

## 包中的配置

MMEngine 用 pkg_resources 查找 `_base_ = 'mmdet::...'`，而 setuptools 自 81 版起不再提供它。
`mmdevplug train mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py` 不需要它，配置的 `_base_` 与
`read_base()` 也一样。使用其他脚本时，`_base_` 可写文件路径，以及不查找任何包的
`__import__('mmdevplug').base_config('gcu')`。""",
        evidence='## MMEngine 自身的输出',
        said='输出或行为',
        measured='测量环境：{}。',
        again='## 重新测量',
    ),
)


def render(
    columns: Dict[str, Dict[str, Any]], rows: Dict[int, Any], language: str, texts: Dict[str, Any]
) -> str:
    """The page in one language."""
    titles = COLUMNS[language]
    shown = [name for name in titles if name in columns]
    lines = []
    for number, row in rows.items():
        texts_of_row = [getattr(row, f'{who}{texts["suffix"]}') for who in ('stock', 'ours')]
        cells = [texts[_status(columns[name]['rows'][str(number)])] for name in shown]
        lines.append([str(number), row.where, *texts_of_row, *cells])
    return '\n\n'.join(
        [
            texts['heading'],
            texts['intro'],
            table([*texts['titles'], *(titles[name] for name in shown)], lines),
            texts['measured'].format(versions(columns, titles)),
            texts['notes'],
            texts['how'],
            texts['evidence'],
            table(['#', '', texts['said']], _evidence(columns, shown, rows, titles)),
            texts['again'],
            COMMANDS,
        ]
    )


def _status(cell: Dict[str, Any]) -> str:
    """A row where MMEngine does not do what the page says fails as well."""
    return cell['status'] if cell.get('stock_as_expected', True) else 'failed'


def _evidence(
    columns: Dict[str, Dict[str, Any]],
    shown: List[str],
    rows: Dict[int, Any],
    titles: Dict[str, str],
) -> List[List[str]]:
    """What a test saw of each row, on the last of the devices where MMEngine is not right."""
    lines = []
    for number in rows:
        wrong = [n for n in shown if columns[n]['rows'][str(number)]['status'] == 'works']
        name = next(n for n in reversed(wrong) if 'stock' in columns[n]['rows'][str(number)])
        said = _plain(columns[name]['rows'][str(number)]['stock'])
        lines.append([str(number), titles[name], f'`{said}`'])
    return lines


def _plain(said: Any) -> str:
    if isinstance(said, dict):
        return '; '.join(f'{key}: {_plain(value)}' for key, value in said.items())
    return (
        str(said).replace('|', '/').replace('`', "'").replace('\x1b[0m', '').replace('\x1b[1m', '')
    )


def main() -> None:
    """Write both pages."""
    sys.path.insert(0, str(DOCS.parent))
    from tests.sites.rows import ROWS

    columns = load(RESULTS)
    for language, texts in LANGUAGES.items():
        path = DOCS / language / 'device_sites.md'
        path.write_text(render(columns, ROWS, language, texts) + '\n')
        print(f'wrote {path}')


if __name__ == '__main__':
    main()

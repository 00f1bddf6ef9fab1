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
#: Characters that the page shows of an output.
SHOWN = 100

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
Read this page to see which parts of MMEngine 0.10.7 fail on your kind of device, and how
mmdevplug replaces them. For each row and device a test runs MMEngine alone and then with
mmdevplug, in 2 ranks over gloo (last column: over the card's own backend).""",
        titles=('#', 'in mmengine', 'MMEngine by itself', 'with mmdevplug'),
        works='works',
        failed='**fails**',
        served='as MMEngine',
        none='none',
        named='—',
        notes="""\
- *works*: the third column holds for MMEngine, and the fourth with mmdevplug.
- *as MMEngine*: MMEngine is right on this device.
- *none*: the device has no such function. Lazy devices have no cache to empty, PJRT's CPU client
  reports no memory, and the T20's package has no functions for memory, seeds or profiles.
- *—*: the row is about another device or a vendor's backend. In the column of the PrivateUse1 card
  the card of these rows is named `npu`.
- [standins](../../standins/README.md) describes the stand-ins; `torch_npu` and `hccl` are among
  them. torch_xla runs on PJRT's CPU client.""",
        how="""\
## How

Our runner, wrappers and hooks take the places of MMEngine's, and your config keeps its names. The
rest are patches, from the start of a job to `restore_mmengine()`: see
[the list of all patches](patches.md). Where gloo refuses tensors of the device, the process group
is [our backend `staged`](staged.md). Without a runner, for example in inference, patch yourself:

```python
import mmdevplug
from mmdet.apis import DetInferencer

mmdevplug.patch_mmengine('xla')  # or nothing: what is present
DetInferencer('rtmdet-tiny')  # computes there, and runs no code from the checkpoint
```

## Configs of packages

MMEngine needs pkg_resources for `_base_ = 'mmdet::...'`, which setuptools 81 removed.
`mmdevplug train mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py` works without it, also in `_base_`
and `read_base()`. In another script, write `__import__('mmdevplug').base_config('gcu')`
or the path of a file.""",
        evidence='## Outputs of MMEngine by itself',
        chosen='Each row is from the last device whose cell above says *works*.',
        said='output or state',
        measured='Measured with {}.',
        again='## To measure again',
    ),
    zh_cn=dict(
        suffix='_zh',
        heading='# MMEngine 对设备的假设',
        intro="""\
若想知道 MMEngine 0.10.7 的哪些部分在您的设备上失败，以及 mmdevplug 的做法，请阅读本页。对每一行与
每种设备，测试先单独运行 MMEngine，再与 mmdevplug 一起运行（2 个 rank，gloo；最后一列使用该卡自己的
后端）。""",
        titles=('#', 'mmengine 中的位置', 'MMEngine 自身', '使用 mmdevplug'),
        works='可用',
        failed='**失败**',
        served='同 MMEngine',
        none='无',
        named='—',
        notes="""\
- *可用*：MMEngine 自身的行为如第三列所述，使用 mmdevplug 后如第四列所述。
- *同 MMEngine*：MMEngine 在此设备上正确。
- *无*：设备没有此类功能。惰性设备没有可清空的缓存，PJRT 的 CPU 客户端不提供内存信息，T20 的包没有
  内存、种子或性能分析函数。
- *—*：该行涉及另一种设备或厂商后端。在 PrivateUse1 卡一列中，这些行的卡名为 `npu`。
- 替身的说明见 [standins](../../standins/README.md)；`torch_npu` 与 `hccl` 同样是替身。
  torch_xla 运行在 PJRT 的 CPU 客户端上。""",
        how="""\
## 实现方式

我们的 runner、封装器与钩子代替 MMEngine 的，配置中的名称不变。其余是补丁，从作业启动到
`restore_mmengine()` 有效：见[全部补丁的列表](patches.md)。gloo 不接收设备张量时，进程组使用
[我们的后端 `staged`](staged.md)。不使用 runner 时（例如推理），请自行打补丁：

```python
import mmdevplug
from mmdet.apis import DetInferencer

mmdevplug.patch_mmengine('xla')  # 或不带参数：使用现有设备
DetInferencer('rtmdet-tiny')  # 在该设备上计算，且不执行检查点中的代码
```

## 包中的配置

MMEngine 用 pkg_resources 处理 `_base_ = 'mmdet::...'`，而 setuptools 81 已将其移除。
`mmdevplug train mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py` 不需要它，`_base_` 与
`read_base()` 中也一样。使用其他脚本时，请写 `__import__('mmdevplug').base_config('gcu')`
或文件路径。""",
        evidence='## MMEngine 自身的输出',
        chosen='每一行取自上表中为*可用*的最后一种设备。',
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
            texts['chosen'],
            table(['#', texts['said']], _evidence(columns, shown, rows)),
            texts['again'],
            COMMANDS,
        ]
    )


def _status(cell: Dict[str, Any]) -> str:
    """A row where MMEngine does not do what the page says fails as well."""
    return cell['status'] if cell.get('stock_as_expected', True) else 'failed'


def _evidence(
    columns: Dict[str, Dict[str, Any]], shown: List[str], rows: Dict[int, Any]
) -> List[List[str]]:
    """What a test saw of each row, on the last of the devices where MMEngine is not right."""
    lines = []
    for number in rows:
        wrong = [n for n in shown if columns[n]['rows'][str(number)]['status'] == 'works']
        name = next(n for n in reversed(wrong) if 'stock' in columns[n]['rows'][str(number)])
        said = _plain(columns[name]['rows'][str(number)]['stock'])
        if len(said) > SHOWN:
            said = f'{said[:SHOWN].rstrip()}…'
        lines.append([str(number), f'`{said}`'])
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
    from docs.sites.rows import ROWS

    columns = load(RESULTS)
    for language, texts in LANGUAGES.items():
        path = DOCS / language / 'device_sites.md'
        path.write_text(render(columns, ROWS, language, texts) + '\n')
        print(f'wrote {path}')


if __name__ == '__main__':
    main()

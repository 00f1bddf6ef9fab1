"""Write ``docs/en/features.md`` and ``docs/zh_cn/features.md`` from what the tests measured.

The tests in ``tests/features`` write one JSON file for each kind of device; see the text below for
the command.
"""

from pathlib import Path
from typing import Any, Dict

from measured import COLUMNS, load, versions
from tables import table

DOCS = Path(__file__).parent
RESULTS = DOCS / 'features'

COMMANDS = """```bash
make docs-features
```"""

LANGUAGES: Dict[str, Dict[str, Any]] = dict(
    en=dict(
        title='title',
        heading='# Features on every device',
        intro="""\
Each cell is the largest difference of any weight after 20 iterations from the same training in
one process on the CPU, with the same PyTorch and the same global batch of 64. The job has 2 ranks
and gloo; on the last card it has a backend of the vendor's own, `hccl`, which takes tensors of
that card alone, as nccl does with GPUs. Averaged weights (EMA), buffers and the figures of
validations count as weights. A test fails where the difference is above the tolerance.""",
        feature='feature',
        tolerance='tolerance',
        refused='refused',
        absent='no',
        failed='**fails**',
        notes="""\
- *refused*: the runner stops on all ranks and says why. `ZeroRedundancyOptimizer` broadcasts
  parameters one by one, each of which runs a graph of a lazy device.
- *no*: `torch.compile` is for devices that its compiler knows; it was tried on the CPU alone. The
  row has the backend `aot_eager`; a test of its own has `inductor`.
- The stand-ins are described in [tests/standins](../../tests/standins/README.md). torch_xla runs
  on PJRT's CPU client. No Ascend card was at hand: the last column is a stand-in that refuses what
  HCCL refuses, and MMEngine takes it for an NPU.
- A T20 has two stand-ins: on torch_xla graphs are really lazy; on PyTorch 1.10, which a T20 runs,
  operations compute at once and are counted.
- Mixed precision: from float32, the CPU's own bfloat16 weights are 2e-2 away, too.
- Compression: the reference sends nothing, so the difference is what compression loses.
- torch_xla: what a checkpointed segment computes again is kept apart from what it computed first
  by an optimization barrier, else the compiler would merge the two and save no memory. PJRT's CPU
  compiler removes the barrier and saves none.""",
        measured='Measured with {}.',
        again='To measure again',
    ),
    zh_cn=dict(
        title='title_zh',
        heading='# 各设备上的功能',
        intro="""\
每格是训练 20 次迭代后，任一权重与“CPU 单进程、相同 PyTorch、相同全局批大小（64）”训练结果的最大
差值。作业为 2 个 rank，使用 gloo；最后一种卡使用厂商自己的后端 `hccl`，它只接受该卡的张量，如同
nccl 之于 GPU。平均权重（EMA）、缓冲区和验证指标同样计入。差值超过容差时测试失败。""",
        feature='功能',
        tolerance='容差',
        refused='拒绝',
        absent='无',
        failed='**失败**',
        notes="""\
- *拒绝*：runner 在所有 rank 上停止并说明原因。`ZeroRedundancyOptimizer` 逐个广播参数，
  在惰性设备上每次都要运行一次计算图。
- *无*：`torch.compile` 只用于其编译器支持的设备，仅在 CPU 上试过。该行使用后端 `aot_eager`；另有
  单独的测试使用 `inductor`。
- 替身的说明见 [tests/standins](../../tests/standins/README.md)。torch_xla 运行在 PJRT 的 CPU
  客户端上。手头没有昇腾卡：最后一列是替身，它拒绝 HCCL 所拒绝的，MMEngine 将其视为 NPU。
- T20 有两个替身：在 torch_xla 上，计算图是真正惰性的；在 T20 所用的 PyTorch 1.10 上，运算立即执行
  并被计数。
- 混合精度：CPU 自身的 bfloat16 权重与 float32 也相差 2e-2。
- 压缩：参考训练不发送任何数据，因此差值就是压缩的损失。
- torch_xla：检查点段的重新计算与首次计算之间有一道优化屏障，否则编译器会合并两者而不节省内存。
  PJRT 的 CPU 编译器会去掉这道屏障，因此不节省内存。""",
        measured='测量环境：{}。',
        again='重新测量',
    ),
)


def render(columns: Dict[str, Dict[str, Any]], titles: Dict[str, str], texts: Dict) -> str:
    """The page in one language."""
    shown = [name for name in titles if name in columns]
    lines = []
    for row in columns[shown[0]]['rows']:
        cells = [columns[name]['rows'][row] for name in shown]
        found = [_cell(cell, texts) for cell in cells]
        lines.append([cells[0][texts['title']], *found, f'{cells[0]["tolerance"]:.0e}'])
    headings = [texts['feature'], *(titles[name] for name in shown), texts['tolerance']]
    return '\n\n'.join(
        [
            texts['heading'],
            texts['intro'],
            table(headings, lines),
            texts['measured'].format(versions(columns, titles)),
            texts['notes'],
            f'## {texts["again"]}',
            COMMANDS,
        ]
    )


def _cell(cell: Dict[str, Any], texts: Dict[str, Any]) -> str:
    if cell['status'] == 'trained':
        within = cell['difference'] <= cell['tolerance']
        figure = f'{cell["difference"]:.0e}' if cell['difference'] else '0'
        return figure if within else f'**{figure}**'
    return texts[cell['status']]


def main() -> None:
    """Write both pages."""
    columns = load(RESULTS)
    for language, texts in LANGUAGES.items():
        path = DOCS / language / 'features.md'
        path.write_text(render(columns, COLUMNS[language], texts) + '\n')
        print(f'wrote {path}')


if __name__ == '__main__':
    main()

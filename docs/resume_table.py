"""Write ``docs/en/resuming.md`` and ``docs/zh_cn/resuming.md`` from what was measured.

``docs/resume/measure.py`` writes the figures; see the text below for the commands.
"""

import json
from typing import Any, Dict, List

from tables import DOCS, table, write_pages

RESULTS = DOCS / 'resume' / 'cpu.json'

COMMANDS = """```bash
python -m docs.resume.measure docs/resume
python docs/resume_table.py
```"""

LANGUAGES: Dict[str, Dict[str, Any]] = dict(
    en=dict(
        heading='# Resuming: schedules and optimizers',
        links='English | [简体中文](../zh_cn/resuming.md)',
        intro="""\
Read this page to see which schedules and optimizers resume exactly. Each cell is a training of
20 iterations, 5 to an epoch, with dropout, batch normalization, averaged weights (EMA), clipping
and validation. It stops twice: after iteration 8, in the middle of an epoch, as after SIGTERM,
and after iteration 17 as after a crash. A new runner resumes it each time.

*exact* means equal, bit for bit, to a training that never stopped. The comparison covers samples,
rates and losses of every iteration. It also covers the last checkpoint: weights, averaged
weights, optimizer, schedulers, random states and log buffers.

Each row schedules the learning rate. It also schedules the momentum and the weight decay if the
optimizer has them (`MultiStepLR`, `MultiStepMomentum`, `MultiStepParamScheduler`).""",
        schedule='schedule',
        exact='exact',
        differs='**differs**',
        counting=dict(
            epochs='epochs', iterations='iterations', converted='epochs, `convert_to_iter_based`'
        ),
        notes="""\
- {} trainings, {} exact. The superscript is the unit of a schedule's step: {}.
- The table leaves out two optimizers. LBFGS needs a closure, which MMEngine's wrappers do
  not pass. SparseAdam needs sparse gradients.
- `tests/checkpoint/resume_cases.py` has a case for every other stateful part of MMEngine:
  optimizer wrappers, averaged weights, samplers, workers, hooks, contents of the message hub. The
  cases also run on 2 ranks and after `load_from`.
- [Checkpoints](checkpoints.md#what-is-not-exact) lists what is not exact.""",
        measured='Measured with torch {}, on the CPU.',
        again='## To measure again',
    ),
    zh_cn=dict(
        heading='# 恢复训练：调度器与优化器',
        links='[English](../en/resuming.md) | 简体中文',
        intro="""\
本页说明哪些调度器和优化器能精确恢复。每格是一次 20 次迭代的训练（5 次迭代为一个 epoch），
包括 dropout、批归一化、平均权重（EMA）、梯度裁剪和验证。训练停止两次：第 8 次迭代后
（epoch 中间）如同收到 SIGTERM，第 17 次迭代后如同崩溃。每次都由新的 runner 恢复。

*精确* 表示与从未停止的训练逐位相同。比较包括每次迭代的样本、学习率和损失，以及最后的检查点：
权重、平均权重、优化器、调度器、随机状态和日志缓冲区。

每行调度学习率；优化器有动量和权重衰减时，也调度它们（`MultiStepLR`、`MultiStepMomentum`、
`MultiStepParamScheduler`）。""",
        schedule='调度器',
        exact='精确',
        differs='**不同**',
        counting=dict(
            epochs='epoch', iterations='迭代', converted='epoch，使用 `convert_to_iter_based`'
        ),
        notes="""\
- 共 {} 次训练，其中 {} 次精确。上标是调度器一步的单位：{}。
- 表中没有两种优化器。LBFGS 需要闭包，而 MMEngine 的优化器封装不传递闭包。SparseAdam
  需要稀疏梯度。
- `tests/checkpoint/resume_cases.py` 对 MMEngine 中其他每个带状态的部分各有一例：优化器封装、
  平均权重、采样器、worker 进程、钩子、message hub 的内容。这些例子也在 2 个 rank 上以及
  `load_from` 之后运行。
- [检查点](checkpoints.md#不精确之处)列出不精确之处。""",
        measured='测量环境：torch {}，CPU。',
        again='## 重新测量',
    ),
)
_MARKS = dict(epochs='ᵉ', iterations='ⁱ', converted='ᶜ')


def render(texts: Dict[str, Any]) -> List[str]:
    """The parts of the page in one language."""
    found = json.loads(RESULTS.read_text(encoding='utf-8'))
    rows = found['rows']
    optimizers = list(next(iter(rows.values())))
    lines = [
        [f'`{kind}`', *(_cell(row[name], texts) for name in optimizers)]
        for kind, row in rows.items()
    ]
    cells = [cell for row in rows.values() for cell in row.values()]
    exact = sum(cell['differs'] is None for cell in cells)
    marks = ', '.join(f'{mark} {texts["counting"][way]}' for way, mark in _MARKS.items())
    if texts is LANGUAGES['zh_cn']:
        marks = marks.replace(', ', '；')
    return [
        texts['heading'],
        texts['links'],
        texts['intro'],
        table([texts['schedule'], *optimizers], lines),
        texts['measured'].format(found['torch']),
        texts['notes'].format(len(cells), exact, marks),
        texts['again'],
        COMMANDS,
    ]


def _cell(cell: Dict[str, Any], texts: Dict[str, Any]) -> str:
    return texts['exact' if cell['differs'] is None else 'differs'] + _MARKS[cell['counting']]


if __name__ == '__main__':
    write_pages('resuming.md', LANGUAGES, render)

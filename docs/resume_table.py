"""Write ``docs/en/resuming.md`` and ``docs/zh_cn/resuming.md`` from what was measured.

``tests/checkpoint/resume_table.py`` writes the figures; see the text below for the commands.
"""

import json
from typing import Any, Dict, List

from tables import DOCS, table, write_pages

RESULTS = DOCS / 'resume' / 'cpu.json'

COMMANDS = """```bash
python -m tests.checkpoint.resume_table docs/resume
python docs/resume_table.py
```"""

LANGUAGES: Dict[str, Dict[str, Any]] = dict(
    en=dict(
        heading='# Resuming: schedules and optimizers',
        links='English | [简体中文](../zh_cn/resuming.md)',
        intro="""\
Each cell is a training of 20 iterations, 5 to an epoch, with dropout, batch normalization,
averaged weights (EMA), clipping and validation. It is stopped twice, as by SIGTERM after
iteration 8 in the middle of an epoch, and as by a crash after iteration 17, and resumed in a
runner of its own. Its samples, rates and losses of every iteration and its last checkpoint
(weights, averaged weights, optimizer, schedulers, random states, log buffers) are compared with
those of a training that was never stopped: *exact* means that they are equal, bit for bit.

A row has the schedule of the learning rate and, where the optimizer knows them, of the
momentum and of the weight decay (`MultiStepLR`, `MultiStepMomentum`,
`MultiStepParamScheduler`).""",
        schedule='schedule',
        exact='exact',
        differs='**differs**',
        counting=dict(
            epochs='epochs', iterations='iterations', converted='epochs, `convert_to_iter_based`'
        ),
        notes="""\
- {} trainings, {} exact. A superscript says what a step of the schedule is: {}.
- LBFGS needs a closure, which MMEngine's optimizer wrappers do not pass; SparseAdam needs sparse
  gradients.
- Everything else of MMEngine's that has a state is in `tests/checkpoint/resume_cases.py`, one
  case each: optimizer wrappers, averaged weights, samplers, workers, hooks, contents of the
  message hub, also on 2 ranks and after `load_from`.
- What is not exact: see [checkpoints](checkpoints.md#what-is-not-exact).""",
        measured='Measured with torch {}, on the CPU.',
        again='## To measure again',
    ),
    zh_cn=dict(
        heading='# 恢复训练：调度器与优化器',
        links='[English](../en/resuming.md) | 简体中文',
        intro="""\
每格是一次 20 次迭代的训练（5 次迭代为一个 epoch），包括 dropout、批归一化、平均权重（EMA）、
梯度裁剪和验证。训练中断两次：第 8 次迭代后（epoch 中间）如同收到 SIGTERM，第 17
次迭代后如同崩溃；每次都在新的 runner 中恢复。每次迭代的样本、学习率和损失，
以及最后的检查点（权重、平均权重、优化器、调度器、随机状态、日志缓冲区）与从未中断的训练比较：
*精确* 表示逐位相同。

每行包括学习率的调度器，以及优化器支持时动量和权重衰减的调度器（`MultiStepLR`、
`MultiStepMomentum`、`MultiStepParamScheduler`）。""",
        schedule='调度器',
        exact='精确',
        differs='**不同**',
        counting=dict(
            epochs='epoch', iterations='迭代', converted='epoch，使用 `convert_to_iter_based`'
        ),
        notes="""\
- 共 {} 次训练，其中 {} 次精确。上标表示调度器的一步：{}。
- LBFGS 需要闭包，而 MMEngine 的优化器封装不传递闭包；SparseAdam 需要稀疏梯度。
- MMEngine 中其他带状态的部分见 `tests/checkpoint/resume_cases.py`，各有一例：优化器封装、
  平均权重、采样器、worker 进程、hook、message hub 的内容，也包括 2 个 rank 和使用 `load_from`
  之后。
- 不精确之处见[检查点](checkpoints.md#不精确之处)。""",
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

"""The tables and the picture of what ``placement.py`` found, in both languages."""

from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

COUNTS = (2, 3, 4, 8)

WORDS = {
    'en': {},
    'zh_cn': {
        'model': '模型',
        'devices': '个设备',
        'number of devices': '设备数',
        'equal': '相等',
        'memory': '内存',
        'search, ms': '搜索，毫秒',
        'whole plan, ms': '整个计划，毫秒',
        'accelerate, ms': 'accelerate，毫秒',
        'split': '划分',
        'components': '组件数',
        'imbalance in components': '组件不均衡系数',
        'balance score': '均衡性分数',
        'GB': 'GB',
        'imbalance in bytes': '字节不均衡系数',
        'guide, auto': '指南，auto',
        'guide, balanced': '指南，balanced',
    },
}


def tables(found: Dict[str, Any], language: str) -> Dict[str, str]:
    """The tables as Markdown."""

    def word(text: str) -> str:
        return WORDS[language].get(text, text)

    def figure(value: Optional[float]) -> str:
        return '—' if value is None else f'{max(value, 0.0):.3f}'

    def memory(row: Dict[str, Any]) -> str:
        return word('equal') if row['equal'] else '2:1:…'

    def cell(row: Dict[str, Any]) -> str:
        theirs, ours, best = (figure(row[key]) for key in ('accelerate', 'ours', 'best'))
        better = [best] if best != ours else []
        if row['accelerate'] is not None and theirs != ours:
            first = row['accelerate'] < row['ours']
            theirs, ours = (f'**{theirs}**', ours) if first else (theirs, f'**{ours}**')
        return ' / '.join([theirs, ours, *better])

    lines: Dict[Any, List[str]] = {}
    for row in found['rows']:
        line = lines.setdefault((row['model'], row['equal']), [row['model'], memory(row)])
        line.append(cell(row))
    head = ['model', 'memory', *(f'{count} {word("devices")}' for count in COUNTS)]
    timed = [
        [row['devices'], memory(row)]
        + [f'{row[key]:.1f}' for key in ('search', 'plan', 'accelerate')]
        for row in found['times']
    ]
    timed_head = ['number of devices', 'memory', 'search, ms', 'whole plan, ms', 'accelerate, ms']
    shown = [
        [
            word(row['name']),
            '/'.join(map(str, row['counts'])),
            f'{row["by_count"]:.3f}',
            f'{row["score"]:.3f}',
            ' / '.join(f'{load:.2f}' for load in row['loads']),
            f'{row["by_bytes"]:.3f}',
        ]
        for row in found['example']
    ]
    shown_head = [
        'split',
        'components',
        'imbalance in components',
        'balance score',
        'GB',
        'imbalance in bytes',
    ]
    return dict(
        comparison=_markdown([word(title) for title in head], list(lines.values())),
        times=_markdown([word(title) for title in timed_head], timed),
        example=_markdown([word(title) for title in shown_head], shown),
    )


def _markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join('| ' + ' | '.join(map(str, line)) + ' |' for line in lines)


def draw(found: Dict[str, Any], path: Path) -> None:
    """Bars for each model, a panel for each number of equal devices."""
    import numpy as np
    from matplotlib.figure import Figure

    rows = [row for row in found['rows'] if row['equal']]
    counts = sorted({row['devices'] for row in rows})
    figure = Figure(figsize=(8, 6.6))
    for place, (axes, count) in enumerate(
        zip(figure.subplots(2, -(-len(counts) // 2), sharey=True).flat, counts)
    ):
        here = [row for row in rows if row['devices'] == count]
        at = np.arange(len(here))
        for offset, key, colour in ((-0.2, 'accelerate', '#f6b26b'), (0.2, 'ours', '#3d85c6')):
            heights = [max(row[key] or 0.0, 0.0) for row in here]
            axes.barh(at + offset, heights, 0.38, label=key, color=colour)
        best = [max(row['best'], 0.0) for row in here]
        axes.scatter(best, at + 0.2, marker='|', s=60, color='black', label='best', zorder=3)
        axes.set_yticks(at)
        axes.set_yticklabels([row['model'] for row in here])
        axes.set_title(f'{count} devices', fontsize='medium')
        axes.set_xlabel('largest load / ideal − 1')
        for side in ('top', 'right'):
            axes.spines[side].set_visible(False)
        if place == 0:
            axes.invert_yaxis()
            figure.legend(loc='lower center', ncol=3, frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=110)

"""Write ``docs/en/compatibility.md`` and ``docs/zh_cn/compatibility.md`` from runs of the tests.

``tools/compat.sh`` appends a line of JSON for each run to a file in ``docs/compat``. Of several
runs with the same tests the last one counts; a failure counts until a later run has none there.
"""

import json
import re
from collections import Counter
from typing import Any, Dict, List, Tuple

from tables import DOCS, table, write_pages

RESULTS = DOCS / 'compat'
#: What the code is written for and `tools/compat.sh` would run: torch, MMEngine.
WANTED = (
    ('1.10.0', '0.10.7'),
    ('1.13.1', '0.10.7'),
    ('2.1.2', '0.10.7'),
    ('2.4.1', '0.10.7'),
    ('2.6.0', '0.10.7'),
    ('2.9.0', '0.10.7'),
    ('2.13.0', '0.10.7'),
    ('2.14.1', '0.10.7'),
    ('2.1.2', '0.10.0'),
    ('2.13.0', '0.11.0rc0'),
    ('2.13.0', 'onedl-0.10.12'),
)
OTHERS = ('numpy', 'mmcv', 'mmcv-lite', 'accelerate', 'transformers', 'peft')

COMMANDS = """```bash
tools/compat.sh                                     # all tests on all of them: hours
TESTS="tests/gradients tests/model" tools/compat.sh 2.6.0
python docs/compat_table.py
```"""

LANGUAGES: Dict[str, Dict[str, Any]] = dict(
    en=dict(
        heading='# Releases of PyTorch and MMEngine',
        other='English | [简体中文](../zh_cn/compatibility.md)',
        intro="""\
The tests for the CPU, run on each release in an environment of its own. They include jobs of
several processes over gloo and, from PyTorch {card} on, the stand-in for a card that PyTorch knows
only as PrivateUse1. *Ran* names the tests that were run, `tests` being all of them; what is not
named there is untested on that release. Tests marked `long` and those of torch_xla and CUDA are
not among them. The code may have changed between two runs: a failure is listed until a later run
that finished has the test without it, so read [what still fails](#what-fails) with the numbers.
[More libraries of OpenMMLab](openmmlab.md) were tried on one release.""",
        without_mmcv="""\
**Not shown for {}**:
mmcv with its compiled operations was not installed there, so every test of
mmcv's operators and of mmdet, mmseg and other model libraries was skipped. These have run with the
other releases of the table alone.""",
        headings=('torch', 'Python', 'MMEngine', 'ran', 'passed', 'failed', 'skipped'),
        untested='untested',
        stopped='{} (stopped before its end)',
        failing='## What fails',
        nothing="""\
Nothing: every test that failed in the table above passed when its file ran again on that release,
after a correction ([the runs](#single-files-that-ran-again-later)).""",
        skipped='## What a release lacks, by cause',
        skipped_intro="""\
Each row is a cause for which tests were skipped, and the number of tests on each release. A number
is small or large by how many tests touch it, not by how much it matters.""",
        causes=dict(
            release='### What PyTorch or MMEngine of that release cannot do',
            card='### What the stand-in of a card is too new for',
            installed='### What was not installed',
            other='### What is not meant for that device',
        ),
        rerun='## Single files that ran again later',
        reasons=('cause', 'torch: tests'),
        installed='## What else was installed',
        release='torch, MMEngine',
        again='## To run it again',
    ),
    zh_cn=dict(
        heading='# PyTorch 与 MMEngine 的版本',
        other='[English](../en/compatibility.md) | 简体中文',
        intro="""\
在各版本的独立环境中运行 CPU 测试，其中包括基于 gloo 的多进程作业；自 PyTorch {card} 起还包括
PrivateUse1 卡的替身。*运行范围* 列出实际运行的测试，`tests` 表示全部；未列出的部分在该版本上
未经测试。标记为 `long` 的测试以及 torch_xla、CUDA 的测试不在其中。两次运行之间代码可能有改动：
失败的测试一直列出，直到之后完成的运行中不再失败，因此请与
[仍然失败的测试](#失败的测试)一起阅读这些数字。
[OpenMMLab 的其他库](openmmlab.md)只在一个版本上尝试过。""",
        without_mmcv="""\
**{} 未经验证的部分**：
这些环境没有安装带编译算子的 mmcv，因此 mmcv 算子以及 mmdet、mmseg 等模型库
的测试全部跳过。它们只在表中其余版本上运行过。""",
        headings=('torch', 'Python', 'MMEngine', '运行范围', '通过', '失败', '跳过'),
        untested='未测试',
        stopped='{}（中途停止）',
        failing='## 失败的测试',
        nothing="""\
没有：上表中失败的每个测试，修正之后在该版本上重新运行其文件时都通过了（[这些运行](#之后重新运行的单个文件)）。""",
        skipped='## 各版本缺少什么（按原因）',
        skipped_intro="""\
每行是跳过测试的一个原因，以及各版本上的测试数。数目大小取决于有多少测试涉及它，不代表它的重要程度。""",
        causes=dict(
            release='### 该版本的 PyTorch 或 MMEngine 不能做的',
            card='### 卡的替身不支持的旧版本',
            installed='### 没有安装的',
            other='### 不适用于该设备的',
        ),
        rerun='## 之后重新运行的单个文件',
        reasons=('原因', 'torch：测试数'),
        installed='## 同时安装的包',
        release='torch、MMEngine',
        again='## 重新运行',
    ),
)
#: The cause of a skipped test, by words of its reason; the first that fits, else the release.
CAUSES = (
    ('installed', r'^needs (mmcv|peft)'),
    ('card', r'stand-in card|PrivateUse1 devices with names'),
    ('other', r' is not for | works on '),
)
#: The first release that the stand-in card is built with.
CARD = '2.4'


def load() -> Dict[Tuple[str, str], List[Dict[str, Any]]]:
    """The last run of each choice of tests, by releases of torch and MMEngine."""
    runs: Dict[Tuple[str, str], Dict[str, Dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob('*.jsonl')):
        for text in path.read_text(encoding='utf-8').splitlines():
            run = json.loads(text)
            release = run['torch'].split('+')[0], run['mmengine']
            chosen = runs.setdefault(release, {})
            chosen.pop(' '.join(run['ran']), None)
            chosen[' '.join(run['ran'])] = run
    return {release: list(chosen.values()) for release, chosen in runs.items()}


def render(texts: Dict[str, Any]) -> List[str]:
    """The parts of the page in one language."""
    runs = load()
    releases = sorted({*WANTED, *runs}, key=_by_number)
    rows = [row for release in releases for row in _rows(release, runs.get(release, []), texts)]
    # A run of all tests, or the only one of a release; then those of single files.
    whole = [row for row in rows if row[3] in ('`tests`', texts['untested']) or _only(row, rows)]
    reasons: Dict[str, List[str]] = {}
    failing, installed, without_mmcv = [], [], []
    for release in sorted(runs, key=_by_number):
        name = _name(release)
        counts: Counter = Counter()
        for run in runs[release]:
            counts.update(run['reasons'])
        failing += [f'- {name}: `{test}`' for test in _still_failing(runs[release])]
        for reason, count in counts.items():
            reasons.setdefault(reason.replace('|', r'\|'), []).append(f'{name}: {count}')
        if not any(run['mmcv'] for run in runs[release]):
            without_mmcv.append(name)
        last = runs[release][-1]
        installed.append([name, *(last[package] or '-' for package in OTHERS)])
    return [
        texts['heading'],
        texts['other'],
        texts['intro'].format(card=CARD),
        table(texts['headings'], whole),
        *([texts['without_mmcv'].format(', '.join(without_mmcv))] if without_mmcv else []),
        texts['failing'],
        '\n'.join(failing) or texts['nothing'],
        texts['skipped'],
        texts['skipped_intro'],
        *_by_cause(reasons, texts),
        texts['rerun'],
        table(texts['headings'], [row for row in rows if row not in whole]),
        texts['installed'],
        table([texts['release'], *OTHERS], installed),
        texts['again'],
        COMMANDS,
    ]


def _only(row: List[str], rows: List[List[str]]) -> bool:
    return [(one[0], one[2]) for one in rows].count((row[0], row[2])) == 1


def _by_cause(reasons: Dict[str, List[str]], texts: Dict[str, Any]) -> List[str]:
    parts = []
    for cause, heading in texts['causes'].items():
        mine = [reason for reason in sorted(reasons) if _cause(reason) == cause]
        if mine:
            rows = [[reason, '; '.join(reasons[reason])] for reason in mine]
            parts += [heading, table(texts['reasons'], rows)]
    return parts


def _cause(reason: str) -> str:
    return next((cause for cause, words in CAUSES if re.search(words, reason)), 'release')


def _still_failing(runs: List[Dict[str, Any]]) -> List[str]:
    found: List[str] = []
    for run in runs:
        if run['finished']:
            found = [test for test in found if not test.startswith(tuple(run['ran']))]
        found += [test for test in run['failing'] if test not in found]
    return found


def _rows(
    release: Tuple[str, str], runs: List[Dict[str, Any]], texts: Dict[str, Any]
) -> List[List[str]]:
    torch, mmengine = release
    if not runs:
        return [[torch, '', mmengine, texts['untested'], '', '', '']]
    rows = []
    for run in runs:
        ran = ' '.join(f'`{part}`' for part in run['ran'])
        counts = [str(run[kind]) for kind in ('passed', 'failed', 'skipped')]
        ran = ran if run['finished'] else texts['stopped'].format(ran)
        rows.append([torch, run['python'], mmengine, ran, *counts])
    return rows


def _name(release: Tuple[str, str]) -> str:
    return release[0] if release[1] == '0.10.7' else ' + MMEngine '.join(release)


def _by_number(release: Tuple[str, str]) -> List[int]:
    return [int(number) for number in re.findall(r'\d+', ' '.join(release))]


if __name__ == '__main__':
    write_pages('compatibility.md', LANGUAGES, render)

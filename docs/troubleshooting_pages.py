"""Write ``docs/*/troubleshooting.md`` from the entries in ``docs/troubleshooting``.

Each entry has the fixed parts of one or more messages, with … for what differs, and in each
language why they come and what to do. The entries with ``likely`` come first, in that order.
A test compares them with what the source can say.
"""

from pathlib import Path
from typing import Any, Dict, List

import yaml

DOCS = Path(__file__).parent
ENTRIES = DOCS / 'troubleshooting'

TEXTS = dict(
    en=dict(
        heading='# Troubleshooting by message',
        intro="""\
Look for a part of the message that you have; … stands for values, names and numbers. Every message
of ours also says by itself what was found, what is expected, and what to do next. Where several
ranks print one, the first that names a rank is the one to read.

`mmdevplug doctor --config CONFIG --nproc N` finds many of these before a job starts.""",
        likely='The twenty most likely',
        catalogue='After these, all others by topic.',
        why='Why',
        do='What to do',
    ),
    zh_cn=dict(
        heading='# 按报错信息排查',
        intro="""\
请查找报错中的一段文字；… 代表具体的值、名称和数字。我们的每条报错本身也说明发现了什么、
期望什么以及下一步怎么做。若多个 rank 都有输出，先看指出 rank 的那一条。

`mmdevplug doctor --config CONFIG --nproc N` 能在作业开始前发现其中许多问题。""",
        likely='最可能遇到的二十条',
        catalogue='其后按主题列出其余全部。',
        why='原因',
        do='办法',
    ),
)


def load() -> List[Dict[str, Any]]:
    """The topics, each with its entries."""
    return [yaml.safe_load(path.read_text(encoding='utf-8')) for path in sorted(ENTRIES.iterdir())]


def is_in(says: str, text: str) -> bool:
    """Whether the parts that an entry gives of a message come in a text, in their order."""
    place = 0
    for part in filter(None, (part.strip() for part in says.split('…'))):
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def render(topics: List[Dict[str, Any]], language: str) -> str:
    """The page in one language."""
    texts = TEXTS[language]
    blocks = [texts['heading'], texts['intro'], f'## {texts["likely"]}', texts['catalogue']]
    entries = [entry for topic in topics for entry in topic['entries']]
    for entry in sorted((one for one in entries if 'likely' in one), key=_likely):
        blocks += _entry(entry, language)
    for topic in topics:
        blocks.append(f'## {topic["title"][language]}')
        if 'intro' in topic:
            blocks.append(topic['intro'][language])
        for entry in topic['entries']:
            blocks += [] if 'likely' in entry else _entry(entry, language)
    return '\n\n'.join(blocks) + '\n'


def _likely(entry: Dict[str, Any]) -> int:
    return entry['likely']


def _entry(entry: Dict[str, Any], language: str) -> List[str]:
    texts, (why, what) = TEXTS[language], entry[language]
    colon = '：' if language == 'zh_cn' else ': '
    return [
        '\n'.join(['```text', *entry['says'], '```']),
        f'- **{texts["why"]}**{colon}{why}\n- **{texts["do"]}**{colon}{what}',
    ]


def main() -> None:
    """Write both pages."""
    topics = load()
    for language in TEXTS:
        path = DOCS / language / 'troubleshooting.md'
        path.write_text(render(topics, language), encoding='utf-8')
        print(f'wrote {path}')


if __name__ == '__main__':
    main()

"""Check that built pages have the text of every link to a file of the repository."""

import html
import re
import sys
from pathlib import Path
from typing import Iterator

DOCS = Path(__file__).parent
#: A link out of the folder of a language: its text, without marks, and its target.
LINK = re.compile(r'\[([^\]\[]+)\]\((\.\./\.\./[^)#]+\.md)[^)]*\)')


def plain(text: str) -> str:
    """Text of Markdown or HTML without marks, with single spaces."""
    text = html.unescape(re.sub(r'<[^>]+>', '', text))
    return ' '.join(re.sub(r'[`*]', '', text).split())


def missing(language: str) -> Iterator[str]:
    """Name the links whose text is not in the built page."""
    for page in sorted((DOCS / language).glob('*.md')):
        built = plain((DOCS / '_build' / language / f'{page.stem}.html').read_text('utf-8'))
        source = page.read_text('utf-8')
        for link in LINK.finditer(source):
            # With what stands before it, unless that is no plain text.
            before = source[max(0, link.start() - 12) : link.start()]
            before = '' if set(before) & set('|()[]#-') else before
            if plain(before + link[1]) not in built:
                named = plain(before + link[1])
                yield f'{page.relative_to(DOCS)}: {named!r}, the text of a link to {link[2]}'


if __name__ == '__main__':
    found = [each for language in ('en', 'zh_cn') for each in missing(language)]
    print('\n'.join([*found, f'{len(found)} texts of links are missing in built pages']))
    sys.exit(bool(found))

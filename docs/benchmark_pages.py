"""Fill the tables of figures on the pages from ``docs/benchmarks``.

    python docs/benchmark_pages.py

A table stands between ``<!-- measured: NAME -->`` and ``<!-- end -->``, with the line that names
its commit. One whose files are missing stays as it is, and its line says that it is older; the
block ``older`` of ``benchmarks.md`` lists these. A test fails if two files are of different
commits, or if a page is not what this script makes of the files.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any, Dict, List, Optional

from benchmark_tables import BLOCKS, Block, Files, Say, draw_placement
from tables import DOCS, table

LANGUAGES = ('en', 'zh_cn')
PAGES = sorted({block.page for block in BLOCKS.values()})
MARKED = re.compile(r'<!-- measured: (\w+) -->\n(.*?)\n<!-- end -->', re.DOTALL)
#: The last line of a block, in both languages.
MEASURED = dict(en='Measured at commit ', zh_cn='测量于提交 ')
OLDER = dict(en='**Older table**: commit ', zh_cn='**较早的表**：提交 ')


def read_files(folder: Path) -> Files:
    """The files of figures, by name."""
    return {
        path.stem: json.loads(path.read_text(encoding='utf-8'))
        for path in sorted(folder.glob('*.json'))
    }


def commits_of(files: Files) -> List[str]:
    """The commits that files were measured on."""
    return sorted({file['commit'] for file in files.values()})


def sayer(language: str) -> Say:
    """What chooses a language."""
    return lambda english, chinese: english if language == 'en' else chinese


def origin(used: Files, language: str) -> str:
    """The line that says where figures are from."""
    say = sayer(language)
    torches = say(' and ', ' 与 ').join(sorted({file['torch'] for file in used.values()}))
    cores = max(file['cores'] for file in used.values())
    commits = say(', ', '、').join(commits_of(used))
    return say(
        f'{MEASURED["en"]}{commits} (torch {torches}, {cores} cores).',
        f'{MEASURED["zh_cn"]}{commits}（torch {torches}，{cores} 核）。',
    )


def files_of(block: Block, files: Files) -> Optional[Files]:
    """The files of a block, if all of them are there."""
    if not block.files or any(name not in files for name in block.files):
        return None
    return {name: files[name] for name in block.files}


def marked(name: str, text: str) -> str:
    """A block as it stands on a page."""
    return f'<!-- measured: {name} -->\n{text}\n<!-- end -->'


def fill(text: str, files: Files, language: str) -> str:
    """A page with the tables that the files give."""

    def filled(match: Any) -> str:
        name = match.group(1)
        if name == 'older':
            return match.group(0)
        used = files_of(BLOCKS[name], files)
        if used is None:
            return match.group(0)
        render = BLOCKS[name].render
        assert render is not None, name
        made = f'{render(used, sayer(language))}\n\n{origin(used, language)}'
        return marked(name, made)

    return MARKED.sub(filled, text)


def older(pages: Dict[str, str], language: str) -> str:
    """The list of older tables: those whose line says so."""
    say, rows = sayer(language), []
    for name, block in BLOCKS.items():
        last = blocks_in(pages[block.page])[name].splitlines()[-1]
        if last.startswith(OLDER[language]):
            commits = dict.fromkeys(re.findall(r'\b[0-9a-f]{7,8}\b\+?', last))
            reason = say(*block.reason) or say('measured before this command', '测量早于该命令')
            title = f'[{say(*block.title)}]({block.page}.md)'
            files = ' '.join(f'`{name}`' for name in block.files)
            rows.append([title, say(', ', '、').join(commits), reason, files])
    heads = say('table|commit|reason|`TABLES`', '表|提交|原因|`TABLES`').split('|')
    return table(heads, rows) if rows else say('None.', '无。')


def blocks_in(text: str) -> Dict[str, str]:
    """The blocks of a page, by name."""
    return dict(MARKED.findall(text))


def make_pages(folder: Path, files: Files) -> Dict[Path, str]:
    """The pages that files give, by where they lie below a folder such as ``docs``."""
    made: Dict[Path, str] = {}
    for language in LANGUAGES:
        pages = {}
        for page in PAGES:
            text = (folder / language / f'{page}.md').read_text(encoding='utf-8')
            pages[page] = fill(text, files, language)
        listed = blocks_in(pages['benchmarks'])['older']
        pages['benchmarks'] = pages['benchmarks'].replace(
            marked('older', listed), marked('older', older(pages, language))
        )
        made.update({folder / language / f'{page}.md': text for page, text in pages.items()})
    return made


def main() -> None:
    """Write the pages, and the picture of the plans."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--files', type=Path, default=DOCS / 'benchmarks', help='of figures')
    parser.add_argument('--docs', type=Path, default=DOCS, help='the folder of the pages to fill')
    args = parser.parse_args()
    files = read_files(args.files)
    for path, text in make_pages(args.docs, files).items():
        path.write_text(text, encoding='utf-8')
        print(f'wrote {path}')
    if 'placement' in files:
        draw_placement(files['placement'], args.docs / 'images' / 'placement.png')
    if len(commits_of(files)) > 1:
        raise SystemExit(
            f'{args.files} has figures of several commits, {", ".join(commits_of(files))}: run '
            f'make benchmark-all until one commit has all.'
        )


if __name__ == '__main__':
    main()

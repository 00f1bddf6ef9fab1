"""What the scripts that write pages of tables share."""

from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

DOCS = Path(__file__).parent


def line(cells: Sequence[str]) -> str:
    """A row of a table in Markdown."""
    return f'| {" | ".join(cells)} |'


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return '\n'.join([line(headings), line(['---'] * len(headings)), *map(line, rows)])


def write_pages(
    name: str, languages: Dict[str, Dict[str, Any]], render: Callable[[Dict[str, Any]], List[str]]
) -> None:
    """Write a page in each language.

    Args:
        name (str): The file's name, e.g. ``'compatibility.md'``.
        languages (dict): Texts by language.
        render (callable): Makes the parts of a page of its texts.
    """
    for language, texts in languages.items():
        path = DOCS / language / name
        path.write_text('\n\n'.join(render(texts)) + '\n', encoding='utf-8')
        print(f'wrote {path}')

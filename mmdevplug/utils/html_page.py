"""Export what rich prints as one HTML file that loads nothing from anywhere."""

import io
from html import escape
from typing import Callable, Sequence, Tuple

from rich.console import Console

#: Also forbids whatever a hostile text might bring.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
#: In columns of letters.
WIDTH = 140


def make_page(
    title: str, write: Callable[[Console], None], pictures: Sequence[Tuple[str, str]] = ()
) -> str:
    """Make a page of what would be printed on a terminal.

    Args:
        title (str): Of the page.
        write (callable): Prints to the console that it is given; strings are no markup there.
        pictures (Sequence[Tuple[str, str]]): PNGs below it: a text, and the data as base64.

    Returns:
        str: HTML.
    """
    console = Console(record=True, width=WIDTH, file=io.StringIO(), markup=False, highlight=False)
    write(console)
    images = ''.join(
        f'<p><img alt="{escape(text)}" src="data:image/png;base64,{png}"></p>'
        for text, png in pictures
    )
    form = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<title>{escape(title)}</title>'
        '<style>{stylesheet} body {{ color: {foreground}; background: {background}; }} '
        'pre {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; line-height: 1.3; }} '
        '</style></head>\n<body><pre><code>{code}</code></pre>'
    )
    return f'{console.export_html(code_format=form)}{images}</body></html>\n'

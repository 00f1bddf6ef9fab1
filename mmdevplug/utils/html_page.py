"""Export what rich prints as one HTML file without external resources."""

import io
from html import escape
from typing import Callable, Sequence, Tuple

from rich.console import Console

#: Also stops scripts that a hostile text might contain.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
#: In characters.
WIDTH = 140


def make_page(
    title: str, write: Callable[[Console], None], pictures: Sequence[Tuple[str, str]] = ()
) -> str:
    """Make an HTML page of what ``write`` prints to a console, and of pictures below.

    Each picture is its text and a PNG as base64.
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

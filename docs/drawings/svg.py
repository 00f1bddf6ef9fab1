"""The few shapes that the drawings consist of, as SVG text."""

from typing import List
from xml.sax.saxutils import escape

INK, PALE = '#24303f', '#8593a5'
#: Fill and border of a box, by what it stands for.
COLORS = dict(
    device=('#fff1d6', '#d08a00'),
    host=('#dcebff', '#2f6fd0'),
    ours=('#dff3e4', '#2c8a4b'),
    theirs=('#f0f2f5', '#8593a5'),
    bad=('#fde0de', '#c8372d'),
)
FONT = (
    "'Helvetica Neue', Arial, 'Noto Sans CJK SC', 'WenQuanYi Zen Hei', 'Microsoft YaHei', "
    'sans-serif'
)


class Drawing:
    """A drawing to which shapes are added; coordinates in pixels from the upper left.

    Args:
        width (int): Width.
        height (int): Height.
    """

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._parts: List[str] = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 14,
        color: str = INK,
        anchor: str = 'middle',
        bold: bool = False,
    ) -> None:
        """Write lines, the first with its middle at ``y``."""
        weight = ' font-weight="bold"' if bold else ''
        for number, line in enumerate(words.split('\n')):
            self._parts.append(
                f'<text x="{x:g}" y="{y + size * (0.35 + 1.3 * number):g}" font-size="{size}" '
                f'fill="{color}" text-anchor="{anchor}"{weight}>{escape(line)}</text>'
            )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        kind: str,
        title: str = '',
        words: str = '',
        size: int = 14,
    ) -> None:
        """Draw a box with a title and smaller words below it, both in its middle."""
        fill, border = COLORS[kind]
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
            f'fill="{fill}" stroke="{border}" stroke-width="1.5"/>'
        )
        titles = title.split('\n') if title else []
        lines = words.split('\n') if words else []
        small = size - 2
        tall = len(titles) * size * 1.3 + len(lines) * small * 1.3
        top = y + (height - tall) / 2 + size * 0.65
        if titles:
            self.text(x + width / 2, top, title, size, bold=True)
            top += len(titles) * size * 1.3 - (size - small) * 0.65
        if lines:
            self.text(x + width / 2, top, words, small)

    def frame(self, x: float, y: float, width: float, height: float, title: str) -> None:
        """Draw a dashed frame with a title in its upper left corner."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" '
            f'fill="none" stroke="{PALE}" stroke-width="1.2" stroke-dasharray="5 4"/>'
        )
        self.text(x + 10, y + 15, title, 13, PALE, 'start')

    def arrow(
        self,
        x: float,
        y: float,
        to_x: float,
        to_y: float,
        words: str = '',
        color: str = INK,
        place: str = 'right',
        right: float = 8,
    ) -> None:
        """Draw an arrow; ``words`` stand ``right`` pixels from its middle, or above."""
        self._parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{color}" '
            f'stroke-width="1.6" marker-end="url(#head)"/>'
        )
        if words and place == 'above':
            up = 10 + 15.6 * words.count('\n')
            self.text((x + to_x) / 2, (y + to_y) / 2 - up, words, 12, color)
        elif words:
            middle = (y + to_y) / 2 - 7.8 * words.count('\n')
            self.text((x + to_x) / 2 + right, middle, words, 12, color, 'start')

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draw a thin dashed line."""
        self._parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{PALE}" '
            f'stroke-dasharray="3 4"/>'
        )

    def render(self) -> str:
        """The SVG file."""
        return '\n'.join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" '
                f'height="{self.height}" viewBox="0 0 {self.width} {self.height}" '
                f'font-family="{FONT}">',
                '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
                f'markerHeight="7" orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" '
                f'fill="{INK}"/></marker></defs>',
                f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>',
                *self._parts,
                '</svg>',
                '',
            ]
        )

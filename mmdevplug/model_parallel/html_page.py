"""Write a plan as one HTML file that loads nothing from anywhere."""

from typing import Iterator

from rich.console import Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from mmdevplug.utils.atomic_files import PathLike, write_text
from mmdevplug.utils.byte_sizes import format_bytes
from mmdevplug.utils.html_page import make_page

from .device_plan import DevicePlan
from .plot import NARROW, colours_of, short_name

#: Letters of the longest bar.
_BAR = 100


def render(plan: DevicePlan) -> str:
    """Make the page: a bar for each device, the figures, and a table of all blocks."""
    table = Table('block', 'class', 'holds', 'device')
    for block in plan.blocks:
        row = (block.name or 'all', block.kind, format_bytes(block.bytes), block.device)
        table.add_row(*map(Text, row))
    page = Group(*_bars(plan), _legend(plan), plan, table)
    return make_page(f'Device plan: {plan.model}', lambda console: console.print(page))


def save_html(plan: DevicePlan, path: PathLike) -> None:
    """Write the page."""
    write_text(render(plan), path)


def _bars(plan: DevicePlan) -> Iterator[Text]:
    colours, longest = colours_of(plan), max(plan.loads.values()) or 1
    for device in plan.devices:
        bar, filled = Text(f'{device:8}'), 0.0
        for block in (b for b in plan.blocks if b.device == device and b.bytes):
            start, filled = round(filled * _BAR), filled + block.bytes / longest
            width = round(filled * _BAR) - start
            name = short_name(block.name) if block.bytes / longest >= NARROW else ''
            bar.append(
                name[:width].ljust(width), Style(color='black', bgcolor=colours[block.kind])
            )
        yield bar


def _legend(plan: DevicePlan) -> Text:
    legend = Text('\n')
    for kind, colour in colours_of(plan).items():
        legend.append('  ', Style(bgcolor=colour)).append(f' {kind}   ')
    return legend.append('\n')

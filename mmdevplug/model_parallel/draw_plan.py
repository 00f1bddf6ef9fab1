"""Draw a plan as a picture: a bar for each device, blocks coloured by class."""

from typing import Any, Dict, List

from mmdevplug.errors import PlacementError, first_line
from mmdevplug.utils.atomic_files import PathLike, replacing

from .device_plan import DevicePlan

#: Light enough for black letters.
COLOURS = [
    '#8fb8de', '#f6b26b', '#93c47d', '#d5a6bd', '#ffe599', '#76c1b7', '#b4a7d6', '#ea9999',
    '#c9d4e0', '#cfa97e', '#b6d7a8', '#f4cccc',
]  # fmt: skip
#: The part of the longest bar below which a block has no name.
NARROW = 0.08


def colours_of(plan: DevicePlan) -> Dict[str, str]:
    """A colour for each class of block; the largest classes get colours of their own."""
    totals: Dict[str, int] = {}
    for block in plan.blocks:
        totals[block.kind] = totals.get(block.kind, 0) + block.bytes
    kinds = sorted(totals, key=lambda kind: -totals[kind])
    last = len(COLOURS) - 1
    return {kind: COLOURS[min(place, last)] for place, kind in enumerate(kinds)}


def short_name(name: str) -> str:
    """The end of a name that distinguishes blocks: ``'layers.3'`` of ``'model.layers.3'``."""
    parts = name.split('.')
    return '.'.join(parts[-2:] if parts[-1].isdigit() else parts[-1:]) or 'all'


def draw(plan: DevicePlan) -> Any:
    """Draw the plan as a figure of matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlacementError(
            f'a picture needs matplotlib ({first_line(error)}): pip install matplotlib.'
        ) from error
    figure = Figure(figsize=(8, 1.6 + 0.55 * len(plan.devices)))
    axes = figure.subplots()
    colours = colours_of(plan)
    longest = max(plan.loads.values()) or 1
    scale, unit = (1e9, 'GB') if longest >= 1e9 else (1e6, 'MB')
    for row, device in enumerate(plan.devices):
        left = 0.0
        for block in (b for b in plan.blocks if b.device == device and b.bytes):
            width = block.bytes / scale
            colour = colours[block.kind]
            axes.barh(row, width, left=left, color=colour, edgecolor='white', linewidth=0.6)
            if block.bytes >= NARROW * longest:
                place = (left + width / 2, row)
                axes.text(*place, short_name(block.name), ha='center', va='center', fontsize=8)
            left += width
    _mark(axes, plan, scale)
    axes.set_yticks(range(len(plan.devices)))
    axes.set_yticklabels(plan.devices)
    axes.invert_yaxis()
    axes.set_xlabel(f'{unit}; imbalance {plan.imbalance:.3f}')
    axes.set_title(f'{plan.model}, {plan.strategy}', loc='left', fontsize='medium')
    for side in ('top', 'right'):
        axes.spines[side].set_visible(False)
    _legend(axes, colours)
    figure.tight_layout()
    return figure


def _mark(axes: Any, plan: DevicePlan, scale: float) -> None:
    """Where each bar would end if all were even, and where it must end."""
    for name, ideal in plan.ideals.items():
        row = plan.devices.index(name)
        axes.vlines(ideal / scale, row - 0.45, row + 0.45, 'black', 'dashed', linewidth=1)
    longest = 1.3 * max(plan.loads.values())
    for name, limit in (plan.capacities or {}).items():
        if limit <= longest:
            row = plan.devices.index(name)
            axes.vlines(limit / scale, row - 0.45, row + 0.45, 'firebrick', linewidth=2)


def _legend(axes: Any, colours: Dict[str, str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    own = list(colours.items())[: len(COLOURS) - 1]
    shown: List[Any] = [Patch(color=colour, label=kind) for kind, colour in own]
    shown.append(Line2D([], [], color='black', linestyle='dashed', label='ideal'))
    place = dict(loc='center left', bbox_to_anchor=(1, 0.5))
    axes.legend(handles=shown, fontsize='small', frameon=False, **place)


def save_png(plan: DevicePlan, path: PathLike) -> None:
    """Write the picture."""
    figure = draw(plan)
    with replacing(path) as unfinished:
        figure.savefig(unfinished, format='png', dpi=110)

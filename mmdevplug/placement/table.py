"""A plan in the terminal."""

import io
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from .devices import describe_bytes

if TYPE_CHECKING:
    from .plan import DevicePlan


def as_table(plan: 'DevicePlan') -> Any:
    """The plan for rich: a row for each device, then what was tried."""
    parts = ', '.join(f'{name} {describe_bytes(s)}' for name, s in plan.parts.items() if s)
    table = Table(title=f'{plan.model}, {plan.strategy}: {parts}', title_justify='left')
    for name in ('device', 'load', 'of ideal', 'may hold', 'blocks', 'from', 'to'):
        right = name not in ('device', 'from', 'to')
        table.add_column(name, justify='right' if right else 'left', overflow='fold')
    weights = plan.weights
    total = sum(plan.loads[name] for name in weights)
    share = sum(weights.values())
    for name in plan.devices:
        ideal = total * weights.get(name, 0) / share if share else 0
        here = [block.name for block in plan.blocks if block.device == name]
        limit = (plan.capacities or {}).get(name)
        table.add_row(
            name,
            describe_bytes(plan.loads[name]),
            f'{plan.loads[name] / ideal:.1%}' if ideal else '',
            '' if limit is None else describe_bytes(limit),
            str(len(here)),
            here[0] or 'all' if here else '',
            here[-1] or 'all' if here else '',
        )
    figures = (
        f'imbalance {plan.imbalance:.3f} in bytes; balance score {plan.balance_score:.3f} in '
        f'blocks, {plan.byte_balance_score:.3f} in bytes'
    )
    return Group(table, Text(figures), *[Text(f'- {step}') for step in plan.steps])


def as_text(plan: 'DevicePlan') -> str:
    """The same as plain text, for logs."""
    out = io.StringIO()
    Console(file=out, width=110, no_color=True).print(as_table(plan))
    return '\n'.join(line.rstrip() for line in out.getvalue().splitlines())

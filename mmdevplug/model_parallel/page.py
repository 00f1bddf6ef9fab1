"""Write a plan as one HTML file that loads nothing from anywhere."""

from html import escape
from typing import List

from mmdevplug.utils.files import PathLike, write_text

from .devices import describe_bytes
from .drawing import NARROW, colours_of, short_name
from .plan import DevicePlan

#: Also forbids whatever a hostile name might bring.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_STYLE = """
:root { --ink: #1c2330; --soft: #5b6577; --line: #dfe4ec; --paper: #fff; --back: #f4f6fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf2; --soft: #9aa6ba; --line: #313a4a;
  --paper: #1b212c; --back: #12161e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 22px; margin: 0; } h2 { font-size: 17px; margin: 32px 0 8px; }
.sub { color: var(--soft); margin: 4px 0 20px; overflow-wrap: anywhere; }
.device { margin: 14px 0; } .told { display: flex; justify-content: space-between; gap: 12px; }
.bar { display: flex; height: 38px; position: relative; background: var(--paper);
  border: 1px solid var(--line); border-radius: 4px; overflow: hidden; }
.bar i { display: block; height: 100%; min-width: 1px; border-right: 1px solid #fff; color: #111;
  font: 11px/36px system-ui, sans-serif; text-align: center; overflow: hidden;
  white-space: nowrap; }
.bar b { position: absolute; top: 0; bottom: 0; border-left: 2px dashed #111; }
.key { display: inline-block; margin: 0 16px 6px 0; } .key i { display: inline-block; width: 12px;
  height: 12px; margin-right: 6px; border-radius: 3px; }
table { border-collapse: collapse; width: 100%; background: var(--paper); font-size: 13px; }
th, td { border: 1px solid var(--line); padding: 4px 9px; text-align: left;
  overflow-wrap: anywhere; } td:nth-child(3) { text-align: right;
  font-variant-numeric: tabular-nums; }
"""


def render(plan: DevicePlan) -> str:
    """Make the page.

    Args:
        plan (DevicePlan): Any.

    Returns:
        str: HTML.
    """
    parts = ', '.join(f'{name} {describe_bytes(s)}' for name, s in plan.parts.items() if s)
    figures = (
        f'imbalance {plan.imbalance:.3f} in bytes, balance score {plan.balance_score:.3f} in '
        f'blocks and {plan.byte_balance_score:.3f} in bytes'
    )
    title = escape(f'{plan.model} on {len(plan.devices)} devices, {plan.strategy}')
    steps = ''.join(f'<li>{escape(step)}</li>' for step in plan.steps)
    body = [
        f'<h1>{title}</h1>',
        f'<p class="sub">{escape(parts)}<br>{escape(figures)}</p>',
        *_bars(plan),
        *_keys(plan),
        f'<h2>How it came about</h2><ul>{steps}</ul>',
        '<h2>Blocks, in order of execution</h2>',
        *_rows(plan),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{title}</title><style>{_STYLE}</style></head>\n<body><main>\n'
        + '\n'.join(body)
        + '\n</main></body></html>\n'
    )


def _bars(plan: DevicePlan) -> List[str]:
    colours = colours_of(plan)
    longest = max(plan.loads.values()) or 1
    weights = plan.weights
    total, share = sum(plan.loads[name] for name in weights), sum(weights.values())
    rows = []
    for device in plan.devices:
        blocks = []
        for block in (b for b in plan.blocks if b.device == device and b.bytes):
            part = block.bytes / longest
            told = f'{block.name or "all"} ({block.kind}), {describe_bytes(block.bytes)}'
            name = escape(short_name(block.name)) if part >= NARROW else ''
            look = f'width:{100 * part:.4f}%;background:{colours[block.kind]}'
            blocks.append(f'<i style="{look}" title="{escape(told)}">{name}</i>')
        ideal = total * weights.get(device, 0) / share / longest if share else 0
        mark = f'<b style="left:{100 * ideal:.3f}%" title="ideal"></b>' if 0 < ideal < 1 else ''
        limit = (plan.capacities or {}).get(device)
        of = '' if limit is None else f' of {describe_bytes(limit)}'
        rows.append(
            f'<div class="device"><div class="told"><b>{escape(device)}</b><span>'
            f'{describe_bytes(plan.loads[device])}{of}, {plan.counts[device]} blocks</span></div>'
            f'<div class="bar">{"".join(blocks)}{mark}</div></div>'
        )
    return rows


def _keys(plan: DevicePlan) -> List[str]:
    return [
        f'<span class="key"><i style="background:{colour}"></i>{escape(kind)}</span>'
        for kind, colour in colours_of(plan).items()
    ]


def _rows(plan: DevicePlan) -> List[str]:
    cells = ''.join(
        f'<tr><td>{escape(b.name or "all")}</td><td>{escape(b.kind)}</td>'
        f'<td>{describe_bytes(b.bytes)}</td><td>{escape(b.device)}</td></tr>'
        for b in plan.blocks
    )
    head = '<tr><th>block</th><th>class</th><th>holds</th><th>device</th></tr>'
    return [f'<table>{head}{cells}</table>']


def save_html(plan: DevicePlan, path: PathLike) -> None:
    """Write the page.

    Args:
        plan (DevicePlan): The plan.
        path (str or Path): The file.
    """
    write_text(render(plan), path)

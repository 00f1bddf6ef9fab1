"""The report as one HTML file, which loads nothing from anywhere."""

from html import escape
from typing import Any, List, Sequence

from .findings import Finding, by_level, count_levels, summary
from .plots import plot_collectives, plot_memory
from .report import UNITS, cells_of, collective_results, headings, sizes_of

#: Also forbids whatever a hostile text might bring.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_STYLE = """
:root { --ink: #1c2330; --soft: #5b6577; --line: #dfe4ec; --paper: #fff; --back: #f4f6fa;
  --error: #c22f3d; --warning: #a86400; --note: #2868b8; --ok: #24794a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf2; --soft: #9aa6ba; --line: #313a4a;
  --paper: #1b212c; --back: #12161e; --error: #ff7a85; --warning: #e9b04c; --note: #78b2ff;
  --ok: #63cf94; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 36px 0 10px; }
.sub { color: var(--soft); margin: 4px 0 20px; overflow-wrap: anywhere; }
.counts { display: flex; gap: 12px; flex-wrap: wrap; }
.count { background: var(--paper); border: 1px solid var(--line); border-radius: 10px;
  padding: 10px 18px; min-width: 110px; }
.count b { display: block; font-size: 26px; line-height: 1.1; }
.card { background: var(--paper); border: 1px solid var(--line); border-left-width: 5px;
  border-radius: 8px; padding: 12px 16px; margin: 10px 0; overflow-wrap: anywhere; }
.card p { margin: 4px 0; } .why { color: var(--soft); }
.tag { font-size: 12px; letter-spacing: .04em; text-transform: uppercase; font-weight: 600; }
.section { color: var(--soft); font-size: 12px; margin-left: 8px; }
.error { border-left-color: var(--error); } .warning { border-left-color: var(--warning); }
.note { border-left-color: var(--note); } .ok { border-left-color: var(--ok); }
.error .tag, .count.error b { color: var(--error); }
.warning .tag, .count.warning b { color: var(--warning); }
.note .tag, .count.note b { color: var(--note); } .ok .tag, .count.ok b { color: var(--ok); }
pre { background: var(--back); border: 1px solid var(--line); border-radius: 6px;
  margin: 8px 0 2px; padding: 9px 12px; overflow-x: auto; white-space: pre-wrap; }
code { font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  user-select: all; }
table { border-collapse: collapse; width: 100%; background: var(--paper); font-size: 13px; }
th, td { border: 1px solid var(--line); padding: 5px 9px; text-align: right;
  font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; } figure { margin: 14px 0; background: #fff; border-radius: 8px;
  border: 1px solid var(--line); padding: 10px; } img { max-width: 100%; display: block; }
"""


def render(findings: Sequence[Finding], subtitle: str) -> str:
    """Make the page.

    Args:
        findings (Sequence[Finding]): In any order.
        subtitle (str): What was looked at, e.g. the command line.

    Returns:
        str: HTML.
    """
    counts = ''.join(
        f'<div class="count {level}"><b>{number}</b>{level}</div>'
        for level, number in count_levels(findings).items()
    )
    body = [
        '<h1>mmdevplug doctor</h1>',
        f'<p class="sub">{escape(subtitle)}</p>',
        f'<div class="counts" title="{escape(summary(findings))}">{counts}</div>',
        '<h2>Findings</h2>',
        *[_card(finding) for finding in by_level(findings)],
        *_collectives(findings),
        *_memory(findings),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>mmdevplug doctor</title><style>{_STYLE}</style></head>\n<body><main>\n'
        + '\n'.join(body)
        + '\n</main></body></html>\n'
    )


def _card(finding: Finding) -> str:
    why = f'<p class="why">{escape(finding.why)}</p>' if finding.why else ''
    # One click selects all of it.
    remedy = f'<pre><code>{escape(finding.remedy)}</code></pre>' if finding.remedy else ''
    return (
        f'<section class="card {finding.level}"><span class="tag">{finding.level}</span>'
        f'<span class="section">{escape(finding.section)}</span>'
        f'<p>{escape(finding.found)}</p>{why}{remedy}</section>'
    )


def _collectives(findings: Sequence[Finding]) -> List[str]:
    results = collective_results(findings)
    if results is None:
        return []
    sizes = sizes_of(results)
    head = ''.join(f'<th>{escape(name)}</th>' for name in headings(sizes))
    rows = ''.join(_row(check, sizes) for check in results['checks'])
    picture = plot_collectives(results)
    return [
        f'<h2>Collectives of {results["world_size"]} ranks over {escape(results["backend"])}</h2>',
        f'<p class="sub">Medians of the slowest rank: {escape(UNITS)}.</p>',
        f'<div class="wide"><table><tr><th></th><th></th>{head}</tr>{rows}</table></div>',
        '' if picture is None else _picture(picture, 'Time and bandwidth over size'),
    ]


def _row(check: Any, sizes: Sequence[int]) -> str:
    cells = ''.join(f'<td>{escape(cell)}</td>' for cell in cells_of(check, sizes))
    return f'<tr><td>{escape(check["name"])}</td><td>{escape(check["status"])}</td>{cells}</tr>'


def _memory(findings: Sequence[Finding]) -> List[str]:
    for finding in findings:
        if finding.data is not None and 'memory_parts' in finding.data:
            data = finding.data
            picture = plot_memory(data['memory_parts'], data['memory_total'])
            return ['<h2>Memory of the model</h2>', _picture(picture, 'Memory on each device')]
    return []


def _picture(png: str, text: str) -> str:
    return f'<figure><img alt="{escape(text)}" src="data:image/png;base64,{png}"></figure>'

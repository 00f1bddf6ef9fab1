"""What ``cost_model.py`` says: tables for the terminal and for ``docs/*/cost_model.md``.

A page has blocks between ``<!-- measured: name -->`` and ``<!-- end -->``, which are written anew;
all else in it is left as it is.
"""

import re
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Sequence

import numpy
from cost_fit import Cluster, Model, Point, connections_of_all, connections_of_rank, ring_messages

DOCS = Path(__file__).parents[1] / 'docs'
PICTURE = DOCS / 'images' / 'cost_model.png'
HOSTS = (2, 8, 32, 128, 512, 1000)
#: Millions of parameters, four bytes each.
PARAMETERS = (25, 100, 350)
BF16 = 0.5

Rows = Sequence[Sequence[str]]

WORDS: Dict[str, Dict[str, str]] = {
    'en': {},
    'zh_cn': {
        'link': '链路',
        'loopback': '回环',
        'ranks': '进程数',
        'hosts': '主机数',
        'core': '核',
        'of the rate': '的标称速率',
        'a byte as Gbit/s': '折合 Gbit/s',
        'sent by a host': '主机发出',
        'all points': '全部数据点',
        '64 KB and 4 MB held out': '留出 64 KB 与 4 MB',
        '8 ranks held out': '留出 8 进程',
        'textbook': '教科书模型',
        'T, ms': 'T，毫秒',
        'T / 2(N−1), µs': 'T / 2(N−1)，微秒',
        'the same / k, µs': '再除以 k，微秒',
        'connections of a rank': '每进程连接数',
        'connections in all': '连接总数',
        'store values of a rank': '每进程读写的键值数',
        'bytes of them': '其字节数',
        'start, ms': '启动，毫秒',
        'full mesh': '全连接',
        'when first used': '首次使用时连接',
        'through the store, GB': '经过 store 的数据，GB',
        'of it at 10 Gbit/s, s': '按 10 Gbit/s 传完，秒',
        'a bucket waits, flat, ms': '每个桶的延迟（单环），毫秒',
        'a bucket waits, hierarchical, ms': '每个桶的延迟（分层），毫秒',
        'flat': '单环',
        'hierarchical': '分层',
        'hierarchical, bf16': '分层，bf16',
        'gradients': '梯度',
        'latency outweighs bytes from': '延迟超过传输的起点',
        'hosts (flat)': '台主机（单环）',
        'hosts (hierarchical)': '台主机（分层）',
        'beyond 1,000': '超过 1,000',
        'cores': '核',
    },
}


class Analysis(NamedTuple):
    """What the measurements amount to.

    Attributes:
        points (List[Point]): What was measured.
        model (Model): The fit to all of them.
        errors (Dict[str, Dict[str, Dict[str, float]]]): For each check and each link the median
            and the largest relative error.
        efficiency (Dict[str, float]): The share of its rate that each limited link reaches.
        latency (float): The a of predictions, in seconds.
        sent_to_ring (float): Bytes that a host sent over those of a ring.
    """

    points: List[Point]
    model: Model
    errors: Dict[str, Dict[str, Dict[str, float]]]
    efficiency: Dict[str, float]
    latency: float
    sent_to_ring: float


def table(heads: Sequence[str], rows: Rows) -> str:
    """A table of Markdown."""
    lines = [heads, ['---'] * len(heads), *rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def make_blocks(
    found: Dict[str, Any],
    analysis: Analysis,
    clusters: Dict[str, Cluster],
    language: str,
) -> Dict[str, str]:
    """Every block by its name."""

    def say(words: str) -> str:
        return WORDS[language].get(words, words)

    blocks = dict(
        machine=_machine(found, analysis, say),
        terms=_terms(analysis, say),
        errors=_errors(analysis, say),
        points=_points(analysis, say),
        small=_small(found, say),
        start=_start(found, say),
        scale=_scale(found, clusters['10gbit'], say),
        limits=_limits(clusters, say),
    )
    blocks.update({f'predicted-{rate}': _predicted(c, say) for rate, c in clusters.items()})
    return blocks


def _machine(found: Dict[str, Any], analysis: Analysis, say: Callable) -> str:
    return (
        f'torch {found["torch"]}, {found["cores"]} {say("cores")}; {say("sent by a host")}: '
        f'{analysis.sent_to_ring:.3f} × 2·S·(N−1)/N'
    )


def _terms(analysis: Analysis, say: Callable) -> str:
    model = analysis.model
    rows = [
        [say('core'), 'a', f'{model.latency * 1e6:.0f} µs', '–'],
        [say('core'), 'b', f'{model.byte * 1e9:.2f} ns', _gbit(model.byte)],
        [say('core'), 'c', f'{model.constant * 1e6:.0f} µs', '–'],
    ]
    for link, byte in model.links.items():
        reached = f'{_gbit(byte)}, {analysis.efficiency[link]:.1%} {say("of the rate")}'
        rows.append([_rate(link), 'd', f'{byte * 1e9:.2f} ns', reached])
    return table(['', '', '', say('a byte as Gbit/s')], rows)


def _errors(analysis: Analysis, say: Callable) -> str:
    rows = []
    for link in analysis.errors['all points']:
        parts = [errors[link] for errors in analysis.errors.values()]
        rows.append(
            [say(_rate(link)), *[f'{part["median"]:.0%} / {part["max"]:.0%}' for part in parts]]
        )
    return table([say('link'), *map(say, analysis.errors)], rows)


def _points(analysis: Analysis, say: Callable) -> str:
    sizes = sorted({point.size for point in analysis.points})
    rows: Dict[Any, List[str]] = {}
    for point in sorted(analysis.points, key=lambda point: point.size):
        row = rows.setdefault(
            (point.link, point.ranks), [say(_rate(point.link)), str(point.ranks)]
        )
        predicted = analysis.model.predict(point)
        row.append(f'{_number(point.seconds * 1e3)} / {_number(predicted * 1e3)}')
    return table([say('link'), say('ranks'), *map(_size, sizes)], list(rows.values()))


def _small(found: Dict[str, Any], say: Callable) -> str:
    rows = []
    for point in found['small']:
        each = point['seconds'] / ring_messages(point['ranks'])
        crowding = max(1.0, point['ranks'] / found['cores'])
        rows.append(
            [
                str(point['ranks']),
                f'{point["seconds"] * 1e3:.2f}',
                f'{each * 1e6:.0f}',
                f'{each / crowding * 1e6:.0f}',
            ]
        )
    heads = ['ranks', 'T, ms', 'T / 2(N−1), µs', 'the same / k, µs']
    return table([say(head) for head in heads], rows)


def _start(found: Dict[str, Any], say: Callable) -> str:
    heads = ['', 'ranks', 'connections of a rank', 'store values of a rank', 'bytes of them']
    rows = [
        [
            say('when first used' if row['lazy'] else 'full mesh'),
            str(row['ranks']),
            str(row['connections']),
            str(row['store_values']),
            f'{row["store_bytes"]:,}',
            f'{row["seconds"] * 1e3:.0f}',
        ]
        for row in found['start']
    ]
    return table([say(head) for head in [*heads, 'start, ms']], rows)


def store_bytes(found: Dict[str, Any], ranks: int) -> float:
    """What all ranks together move through the store, carried on along a line from few ranks.

    Each rank leaves one value and reads as many as there are ranks; a value grows with the number
    of ranks, because it holds an address for each connection.
    """
    rows = [row for row in found['start'] if not row['lazy']]
    sizes = [row['store_bytes'] / row['store_values'] for row in rows]
    slope, start = numpy.polyfit([row['ranks'] for row in rows], sizes, 1)
    return ranks * (ranks + 1) * (start + slope * ranks)


def _scale(found: Dict[str, Any], cluster: Cluster, say: Callable) -> str:
    heads = ['hosts', 'ranks', 'connections of a rank', 'connections in all']
    heads += ['through the store, GB', 'of it at 10 Gbit/s, s']
    heads += ['a bucket waits, flat, ms', 'a bucket waits, hierarchical, ms']
    rows = []
    for hosts in HOSTS:
        ranks = hosts * cluster.ranks_per_host
        stored = store_bytes(found, ranks)
        rows.append(
            [
                f'{hosts:,}',
                f'{ranks:,}',
                f'{connections_of_rank(ranks):,}',
                f'{connections_of_all(ranks):,}',
                _number(stored / 1e9),
                _number(stored * 8 / 10e9),
                _number(cluster.bucket_latency(ranks) * 1e3),
                _number(cluster.bucket_latency(hosts) * 1e3),
            ]
        )
    return table([say(head) for head in heads], rows)


def _predicted(cluster: Cluster, say: Callable) -> str:
    ways = ('flat', 'hierarchical', 'hierarchical, bf16')
    heads = [f'{count} M: {say(way)}' for count in PARAMETERS for way in ways]
    rows = []
    for hosts in HOSTS:
        row = [f'{hosts:,}']
        for count in PARAMETERS:
            size = count * 4e6
            row += [
                _number(cluster.flat(size, hosts)),
                _number(cluster.hierarchical(size, hosts)),
                _number(cluster.hierarchical(size, hosts, BF16)),
            ]
        rows.append(row)
    return table([say('hosts'), *heads], rows)


def _limits(clusters: Dict[str, Cluster], say: Callable) -> str:
    """From how many hosts on the latency of the buckets costs more than their bytes."""
    heads = ['link', 'gradients', 'hosts (flat)', 'hosts (hierarchical)']
    rows = []
    for rate, cluster in clusters.items():
        for count in PARAMETERS:
            size, fewest = count * 4e6, []
            for way, factor in ((cluster.flat, cluster.ranks_per_host), (cluster.hierarchical, 1)):
                slow = [
                    hosts
                    for hosts in range(2, 1001)
                    if cluster.waiting(size, hosts * factor) > way(size, hosts) / 2
                ]
                fewest.append(f'{slow[0]:,}' if slow else say('beyond 1,000'))
            rows.append([_rate(rate), f'{count} M', *fewest])
    return f'{say("latency outweighs bytes from")}:\n\n' + table(
        [say(head) for head in heads], rows
    )


def _rate(rate: str) -> str:
    return re.sub(r'([kmg])bit', lambda unit: f' {unit.group(1).upper()}bit/s', rate)


def _gbit(seconds_per_byte: float) -> str:
    return f'{8e-9 / seconds_per_byte:.2f}' if seconds_per_byte else '–'


def _size(size: int) -> str:
    return f'{size >> 20} MB' if size >= 1 << 20 else f'{size >> 10} KB'


def _number(value: float) -> str:
    """Three digits at most before they stop meaning anything."""
    if value >= 100:
        return f'{value:,.0f}'
    return f'{value:.1f}' if value >= 10 else f'{value:.2g}'


def print_report(blocks: Dict[str, str]) -> None:
    """Write all blocks to the terminal."""
    for name, block in blocks.items():
        print(f'[{name}]\n{block}\n')


def update_page(language: str, blocks: Dict[str, str]) -> None:
    """Write the blocks of a page anew.

    Raises:
        SystemExit: If the page lacks a block.
    """
    path = DOCS / language / 'cost_model.md'
    text = path.read_text(encoding='utf-8')
    for name, block in blocks.items():
        pattern = re.compile(rf'(<!-- measured: {name} -->\n).*?(<!-- end -->)', re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f'{path}: no block <!-- measured: {name} --> … <!-- end -->.')
        text = pattern.sub(lambda match, new=block: f'{match[1]}{new}\n{match[2]}', text)
    path.write_text(text, encoding='utf-8')

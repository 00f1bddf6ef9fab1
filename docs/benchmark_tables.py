"""The tables of figures on the pages, made of what ``benchmarks/run_all.py`` measured.

A table is a function of the files that it is made of, by name, and of ``say``, which chooses
between English and Chinese.
"""

import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from tables import DOCS, table

Files = Dict[str, Dict[str, Any]]
Say = Callable[[str, str], str]
Heads = Sequence[Tuple[str, str]]


class Block(NamedTuple):
    """A table, or several with the text between them, on a page.

    Attributes:
        page (str): Without ``.md``.
        title (tuple): In both languages.
        files (tuple): What it is made of; nothing if no command measures it.
        render (callable, optional): Makes the Markdown.
        reason (tuple): Why it is older than others, in both languages; without ``files``, why
            ``make benchmark-all`` does not measure it.
    """

    page: str
    title: Tuple[str, str]
    files: Tuple[str, ...] = ()
    render: Optional[Callable[[Files, Say], str]] = None
    reason: Tuple[str, str] = ('', '')


MODELS = dict(segformer='SegFormer-B0', retinanet='RetinaNet (ResNet-50)', resnet50='ResNet-50')


# cells ----------------------------------------------------------------------------------------


def figure(value: Optional[float]) -> str:
    """A figure as short as its noise allows."""
    if value is None:
        return ''
    digits = 0 if value >= 20 else 1 if value >= 1 else 2
    return f'{value:,.{digits}f}'


def best(values: Dict[str, Optional[float]], names: Sequence[str]) -> Dict[str, str]:
    """All as text, with the least of some in bold."""
    least = min(value for name, value in values.items() if name in names and value is not None)
    return {
        name: f'**{figure(value)}**' if value == least and name in names else figure(value)
        for name, value in values.items()
    }


def ranks_of(count: int, say: Say) -> str:
    return say(f'{count} ranks', f'{count} 个 rank')


def heads_of(heads: Heads, say: Say) -> List[str]:
    return [say(*pair) for pair in heads]


# averaging ------------------------------------------------------------------------------------

DEVICES = dict(
    cpu=('CPU', 'CPU'),
    card=('PrivateUse1 stand-in', 'PrivateUse1 替身'),
    native=('PrivateUse1 stand-in with a backend of its own', '有自己后端的 PrivateUse1 替身'),
    xla=('torch_xla', 'torch_xla'),
)


def averaging(files: Files, say: Say) -> str:
    """Milliseconds of a step for each way to average gradients."""
    ways = ('none', 'stock', 'accelerate', 'naive', 'ours')
    rows = []
    for found in (row for file in files.values() for row in file['rows']):
        ms, floor = found['median_ms'], found['floor_ms']
        cells = best({way: ms.get(way) for way in ways}, ways[1:])
        cells['stock'] = cells['stock'] or say('refuses', '拒绝')
        split = floor + ms['split'] - found['floor']['compute'] if 'split' in ms else None
        size = f'{found["bytes"] / 2**20:.0f} MB'
        where, ranks = say(*DEVICES[found['device']]), ranks_of(found['ranks'], say)
        last = ['', ''] if split is None else [figure(split), f'{ms["ours"] / split:.2f}']
        rows.append(
            [say(f'{where}, {ranks}, {size}', f'{where}，{ranks}，{size}')]
            + [cells[way] for way in ways]
            + [figure(floor), f'{ms["ours"] / floor:.2f}', *last]
        )
    heads = [
        ('', ''),
        ('nothing averaged', '不平均'),
        ("MMEngine's wrapper", 'MMEngine 的包装器'),
        ('accelerate', 'accelerate'),
        ('naive hook', 'naive 钩子'),
        ('ours', '我们'),
        ('floor', '下限'),
        ('ours / floor', '我们 / 下限'),
        ('floor in two executions', '分两次执行的下限'),
        ('ours / that', '我们 / 该下限'),
    ]
    return table(heads_of(heads, say), rows)


def staged(files: Files, say: Say) -> str:
    """An all-reduce, divided by gloo's."""
    sizes = sorted({row['bytes'] for file in files.values() for row in file['rows']})
    places = dict(cpu=('CPU', 'CPU'), card=('stand-in card', '替身卡'))
    rows = []
    for file in files.values():
        for ranks in sorted({row['ranks'] for row in file['rows']}):
            ms = {r['bytes']: r['median_ms'] for r in file['rows'] if r['ranks'] == ranks}
            place = say(*places[file['device']])
            ratios = [f'{ms[size]["staged"] / ms[size]["gloo"]:.2f}' for size in sizes]
            rows.append([say(f'{ranks}, {place}', f'{ranks}，{place}'), *ratios])
    names = [f'{s >> 20} MB' if s >= 1 << 20 else f'{s >> 10} KB' for s in sizes]
    return table([say('ranks', 'rank 数'), *names], rows)


# runs -----------------------------------------------------------------------------------------


def checkpoints(files: Files, say: Say) -> str:
    """How long training waits for a save."""
    rows = []
    for row in (row for file in files.values() for row in file['rows']):
        stall = row['stall_ms']
        cells = best(stall, list(stall))
        where = say(*DEVICES[row['device']])
        rows.append(
            [say(f'{where}, {row["megabytes"]} MB', f'{where}，{row["megabytes"]} MB')]
            + [cells[way] for way in ('mmengine', 'ours', 'background')]
            + [f'{stall["background"] / stall["mmengine"]:.2f}']
        )
    heads = [
        ('device, size', '设备，大小'),
        ("MMEngine's hook", 'MMEngine 的钩子'),
        ('ours', '我们'),
        ('ours, `async_save=True`', '我们，`async_save=True`'),
        ("async / MMEngine's", 'async / MMEngine'),
    ]
    return table(heads_of(heads, say), rows)


def imports(files: Files, say: Say) -> str:
    """Seconds of imports."""
    (row,) = files['import_time']['rows']
    heads = [('package', '包'), ('seconds', '秒')]
    return table(heads_of(heads, say), [['mmdevplug', f'{row["mmdevplug_s"]:.3f}']])


def start(files: Files, say: Say) -> str:
    """What starting a job takes."""
    kinds = dict(
        MMEngine=("torchrun with MMEngine's runner", 'torchrun 加 MMEngine 的 runner'),
        mmdevplug=('`mmdevplug train`', '`mmdevplug train`'),
    )
    rows = [
        [f'{say(*kinds[row["kind"]])}{say(", ", "，")}{ranks_of(row["nproc"], say)}']
        + [f'{row[key]:.1f}' for key in ('first_iteration', 'end')]
        + [f'{row["memory_mb"]:.0f}']
        for row in files['start_time']['rows']
    ]
    heads = [
        ('command', '命令'),
        ('s to the first iteration', '到首次迭代的秒数'),
        ('s to the end', '到结束的秒数'),
        ('memory in MB', '内存，MB'),
    ]
    return table(heads_of(heads, say), rows)


def _loops(file: Dict[str, Any], first: str, heads: Heads, say: Say) -> str:
    rows = []
    for row in file['rows']:
        ms, hooks = row['ms'], row['hooks_ms']
        cells, comma = best(ms, [first, 'ours']), say(', ', '，')
        rows.append(
            [f'{MODELS[row["model"]]}{comma}{ranks_of(row["ranks"], say)}']
            + [cells[first], cells['ours'], f'{hooks[first]:.2f}', f'{hooks["ours"]:.2f}']
            + [f'{row["share"]:.2%}']
        )
    more = ('ours take more, of an iteration', '我们多占一次迭代的')
    return table(heads_of([('model', '模型'), *heads, more], say), rows)


def loops(files: Files, say: Say) -> str:
    """An iteration of MMEngine's runner and of ours."""
    heads = [
        ("MMEngine's runner", 'MMEngine 的 runner'),
        ('ours', '我们'),
        ('its hooks', '它的钩子'),
        ('our hooks', '我们的钩子'),
    ]
    return _loops(files['training_loop'], 'mmengine', heads, say)


def loops_xla(files: Files, say: Say) -> str:
    """An iteration of our runner on torch_xla, with little and with all of it."""
    heads = [
        ('ours, as little as can be', '我们，尽量精简'),
        ('ours', '我们'),
        ('hooks of that', '其钩子'),
        ('our hooks', '我们的钩子'),
    ]
    return _loops(files['training_loop_xla'], 'ours-bare', heads, say)


def sync_bn(files: Files, say: Say) -> str:
    """Synchronized batch normalization on torch_xla."""
    rows = []
    for row in files['sync_bn']['rows']:
        cells, count = best(row['ms'], list(row['ms'])), row['executions']
        counts = f'{count["exact"]} / {count["per_rank"]}'
        name = MODELS[row['model']]
        rows.append([name, str(row['layers']), cells['exact'], cells['per_rank'], counts])
    heads = [
        ('model', '模型'),
        ('layers', '层数'),
        ('synchronized, ms', '同步，毫秒'),
        ("`sync_bn='per_rank'`, ms", "`sync_bn='per_rank'`，毫秒"),
        ('graph executions of a step', '一步的图执行次数'),
    ]
    return table(heads_of(heads, say), rows)


def host_losses(files: Files, say: Say) -> str:
    """Detectors whose losses run on the host."""
    rows = []
    for row in files['host_losses']['rows']:
        cpu, ours, other = (row.get(way, {}) for way in ('cpu', 'auto', 'device'))
        if 'ms' not in ours or 'ms' not in cpu:
            rows.append([f'`{row["model"]}`', *[say('failed', '失败'), *[''] * 6]])
            continue
        limit = f'{other.get("limit", 0):.0f}'
        device = say(f'no 3rd iteration in {limit} s', f'{limit} 秒内没有第 3 次迭代')
        if 'ms' in other:
            times, count = f'{other["ms"]:.0f}', other['compilations']
            device = say(f'{times}, {count} compilations', f'{times}，{count} 次编译')
        rows.append(
            [f'`{row["model"]}`', str(ours['executions']), str(ours['compilations'])]
            + [f'{max(ours["differences"]):.0e}', f'{ours["ms"]:.0f}']
            + [device if other else '']
            + [f'{ours["loss_ms"] / ours["ms"]:.0%}', f'{ours["loss_ms"] / cpu["ms"]:.0%}']
        )
    heads = [
        ('model', '模型'),
        ('executions of an iteration', '一次迭代的执行次数'),
        ('compilations in iterations 3 to 10', '第 3 到 10 次迭代的编译次数'),
        ('largest relative difference of losses', '损失的最大相对差'),
        ('ms with losses on the host', '损失在主机上，毫秒'),
        ('on the device', '在设备上'),
        ('loss on the host, of an iteration', '主机上的损失占一次迭代的'),
        ('of one on the CPU', '占 CPU 上一次迭代的'),
    ]
    return table(heads_of(heads, say), rows)


def spmd(files: Files, say: Say) -> str:
    """All chips in one process beside a process for each."""
    names = dict(
        mlp=('MLP of 32 MB', '32 MB 的 MLP'),
        resnet18=('ResNet-18, synchronized batch normalization', 'ResNet-18，同步批归一化'),
    )
    found: Dict[Any, Dict[str, Any]] = {}
    for row in files['spmd']['rows']:
        found.setdefault((row['model'], row['chips']), {})[row['way']] = row
    rows = []
    for (model, chips), ways in found.items():
        times = [figure(ways[w]['ms']) for w in ('one', 'ranks', 'spmd', 'spmd, whole weights')]
        peaks = [f'{ways[way]["peak_mb"] / 1024:.1f}' for way in ('ranks', 'spmd')]
        peak = f'{say(" and ", " 与 ").join(peaks)} GB'
        rows.append([say(*names[model]), str(chips), *times, peak])
    heads = [
        ('model', '模型'),
        ('chips', '芯片'),
        ('one chip alone', '单个芯片'),
        ('N processes', 'N 个进程'),
        ('one process', '一个进程'),
        ('with whole weights', '权重完整'),
        ('peak, N and one', '峰值：N 个与一个进程'),
    ]
    return table(heads_of(heads, say), rows)


def scale(files: Files, say: Say) -> str:
    """What a rank holds and asks as jobs grow; a column for each number of ranks."""
    found: Dict[int, Dict[str, Any]] = {}
    for row in (row for file in files.values() for row in file['rows']):
        found.setdefault(row['nproc'], {})[row['kind']] = row

    def cells(key: str, form: Callable[[Any], str] = str) -> List[str]:
        return [
            say('; ', '；').join(
                form(kinds[kind][key]) for kind in ('mmdevplug', 'MMEngine') if kind in kinds
            )
            for kinds in found.values()
        ]

    def ours(key: str, form: str) -> List[str]:
        return [form.format(kinds['mmdevplug'][key]) for kinds in found.values()]

    rows = [
        [
            say(
                'seconds to the end of the first iteration; torchrun',
                '到第一次迭代结束的秒数；torchrun',
            ),
            *cells('first_iteration', figure),
        ],
        [
            say('memory of a rank (PSS) in MB; torchrun', '每个 rank 的内存（PSS），MB；torchrun'),
            *cells('memory_mb'),
        ],
        [
            say('descriptors of a rank; torchrun', '每个 rank 的描述符数；torchrun'),
            *cells('descriptors'),
        ],
        [
            say('writes to the store, a second and rank', '写存储的次数，每秒每 rank'),
            *ours('writes', '{:.1f}'),
        ],
        [
            say('reads of the store, a second and rank', '读存储的次数，每秒每 rank'),
            *ours('reads', '{:.1f}'),
        ],
        [
            say('bytes of both in a second, all ranks', '二者每秒的字节数，所有 rank'),
            *ours('sent_kb', '{:.0f} kB'),
        ],
    ]
    return table([say('ranks', 'rank 数'), *map(str, found)], rows)


def exchange(files: Files, say: Say) -> str:
    """Samples between ranks: a table for each exchange and kind of pool."""
    found = files['exchange']['rows']
    columns = sorted({row['ranks'] for row in found})
    parts = []
    for name in ('balance', 'gather'):
        for pool in ('even', 'skewed'):
            mine = [row for row in found if (row['exchange'], row['pool']) == (name, pool)]
            if not mine:
                continue
            caption = say('even pool', '均匀的样本池')
            if pool == 'skewed':
                caption = say(
                    'each rank with twice as many samples as the next',
                    '每个 rank 的样本数是下一个的两倍',
                )
            rows = []
            for size, count in sorted({(row['bytes'], row['samples']) for row in mine}):
                here = {r['ranks']: r for r in mine if (r['bytes'], r['samples']) == (size, count)}
                name_of_size = f'{size} B' if size < 1 << 10 else f'{size >> 10} KB'
                cells = [_exchanged(here.get(ranks)) for ranks in columns]
                rows.append([f'{count:,} × {name_of_size}', *cells])
            heads = [say('samples of each rank', '每个 rank 的样本')]
            heads += [ranks_of(ranks, say) for ranks in columns]
            colon = say(f', {caption}:', f'，{caption}：')
            parts += [f'`{name}_samples`{colon}', table(heads, rows)]
    return '\n\n'.join(parts)


def _exchanged(row: Optional[Dict[str, Any]]) -> str:
    if row is None:
        return '–'
    ms = row['ms']
    cells = best(ms, list(ms))
    ratio = f'{ms["object"] / ms["ours"]:.1f}'
    return f'{" / ".join(cells[way] for way in ("object", "flat", "ours"))} ({ratio})'


# memory ---------------------------------------------------------------------------------------

WAYS = {
    'ddp': ('data parallel', '数据并行'),
    'fsdp2': ('FSDP2 by hand, over gloo', '手写的 FSDP2，经 gloo'),
    'sharded': ('`sharding = True`', '`sharding = True`'),
}
SHARDED = {'gpt2-tiny': 'GPT-2', 'gpt2-medium': 'GPT-2 medium', 'vit-l': 'ViT-L'}


def _sharded(files: Files, say: Say) -> List[Tuple[List[str], Dict[str, Any]]]:
    """The first cells of each row: model, way, ranks."""
    return [
        (
            [
                say(', ', '，').join([SHARDED[row['model']], f'P = {row["weights_mb"]}']),
                say(*WAYS[row['way']]),
                str(row['nproc']),
            ],
            row,
        )
        for file in files.values()
        for row in file['rows']
    ]


def sharding(files: Files, say: Say) -> str:
    """Memory of a rank."""
    rows = []
    for cells, row in _sharded(files, say):
        share = 4 * row['weights_mb'] / (1 if row['way'] == 'ddp' else row['nproc'])
        figures = [f'{share:.0f}', str(row['tensors_mb']), str(row['peak_mb'])]
        rows.append([*cells, *figures])
    heads = [
        ('model', '模型'),
        ('way', '方式'),
        ('ranks', 'rank 数'),
        ('4 P, or 4 P / N', '4 P 或 4 P / N'),
        ('tensors', '张量'),
        ('process', '进程'),
    ]
    return table(heads_of(heads, say), rows)


def sharding_time(files: Files, say: Say) -> str:
    """Seconds of an iteration, and bytes sent."""
    rows = [
        [*cells, f'{row["seconds"]:.2f}', f'{row["sent_mb"]:,}']
        for cells, row in _sharded(files, say)
    ]
    heads = [
        ('model', '模型'),
        ('way', '方式'),
        ('ranks', 'rank 数'),
        ('s of an iteration', '一次迭代的秒数'),
        ('MB sent by all', '全部发送的 MB'),
    ]
    return table(heads_of(heads, say), rows)


# others ---------------------------------------------------------------------------------------


def _placement(name: str) -> Callable[[Files, Say], str]:
    def render(files: Files, say: Say) -> str:
        sys.path.insert(0, str(DOCS.parent / 'benchmarks'))
        try:
            from placement_tables import tables
        finally:
            sys.path.pop(0)
        return tables(files['placement'], say('en', 'zh_cn'))[name]

    return render


def guard(files: Files, say: Say) -> str:
    """How much slower steps are with DeviceGuard."""
    rows = [[row['name'], f'{row["slower"][0]:.1%}'] for row in files['device_guard']['rows']]
    heads = [('training step', '训练步骤'), ('slower with the guard', '使用守卫后慢多少')]
    return table(heads_of(heads, say), rows)


def llama_iterations(files: Files, say: Say) -> str:
    """Bits of held-out text after each validation."""
    (row,) = (row for row in files['llama_lora']['rows'] if row['trained'] == 'both')
    rows = [['0', '8.0'], *([step, f'{bits:.2f}'] for step, bits in row['bits'].items())]
    heads = [
        ('iteration', '迭代'),
        ('bits for each byte of held-out text', '测试文本每个字节所需的比特数'),
    ]
    return table(heads_of(heads, say), rows)


def llama_parts(files: Files, say: Say) -> str:
    """What training parts of the model ends with."""
    names = dict(
        adapters=('adapters alone', '只训练适配器'),
        ends=('embedding and head alone', '只训练嵌入层和输出层'),
        both=('both, as the config has it', '两者都训练，即配置原样'),
    )
    found = files['llama_lora']['rows']
    last = {row['trained']: f'{[*row["bits"].values()][-1]:.2f}' for row in found}
    rows = [
        [say(*names[row['trained']]), last[row['trained']], _code(row['option'])] for row in found
    ]
    heads = [
        ('trained', '训练的部分'),
        ('after the last iteration', '最后一次迭代之后'),
        ('to try it, add `--cfg-options`', '想自己试，加 `--cfg-options`'),
    ]
    return table(heads_of(heads, say), rows)


def _code(text: str) -> str:
    return f'`{text}`' if text else ''


PLACEMENT = ('placement',)
BLOCKS: Dict[str, Block] = dict(
    averaging=Block(
        'benchmarks',
        ('averaging', '平均梯度'),
        ('grad_sync_cpu', 'grad_sync_card', 'grad_sync_native', 'grad_sync_xla'),
        averaging,
        (
            'measured before this command; rows of cards and of torch_xla are of code that is '
            'gone: it is older than [`staged`](staged.md)',
            '测量早于该命令；卡与 torch_xla 的各行来自已经没有的代码：早于 [`staged`](staged.md)',
        ),
    ),
    averaging_hosts=Block(
        'benchmarks',
        ('averaging between two hosts', '两台主机之间平均梯度'),
        reason=('limited links need root and iproute2', '限制链路需要 root 和 iproute2'),
    ),
    checkpoints=Block(
        'benchmarks', ('checkpoints', '检查点'), ('checkpoint_cpu', 'checkpoint_xla'), checkpoints
    ),
    imports=Block('benchmarks', ('import', '导入'), ('import_time',), imports),
    start=Block('benchmarks', ('start of a job', '作业的启动'), ('start_time',), start),
    loops=Block('benchmarks', ('training loops', '训练循环'), ('training_loop',), loops),
    loops_xla=Block(
        'benchmarks',
        ('training loops on torch_xla', 'torch_xla 上的训练循环'),
        ('training_loop_xla',),
        loops_xla,
    ),
    sync_bn=Block(
        'benchmarks', ('synchronized batch norm', '同步批归一化'), ('sync_bn',), sync_bn
    ),
    host_losses=Block(
        'benchmarks', ('losses on the host', '主机上的损失'), ('host_losses',), host_losses
    ),
    scale=Block('clusters', ('scale', '规模'), ('scale', 'scale_96'), scale),
    spmd=Block('torch_xla', ('all chips in one process', '一个进程驱动所有芯片'), ('spmd',), spmd),
    staged=Block('staged', ('sums', '求和'), ('staged_cpu', 'staged_card'), staged),
    exchange=Block('samples', ('samples', '样本'), ('exchange',), exchange),
    sharding=Block('sharding', ('memory', '内存'), ('sharding_small', 'sharding_large'), sharding),
    sharding_time=Block(
        'sharding', ('time', '时间'), ('sharding_small', 'sharding_large'), sharding_time
    ),
    comparison=Block(
        'placement', ('largest loads', '最大负载'), PLACEMENT, _placement('comparison')
    ),
    times=Block('placement', ('time of plans', '计划的时间'), PLACEMENT, _placement('times')),
    example=Block('placement', ('an example', '一个例子'), PLACEMENT, _placement('example')),
    guard=Block('device_guard', ('cost of the guard', '守卫的代价'), ('device_guard',), guard),
    llama_iterations=Block(
        'llama_lora', ('iterations', '迭代'), ('llama_lora',), llama_iterations
    ),
    llama_parts=Block('llama_lora', ('trained parts', '训练的部分'), ('llama_lora',), llama_parts),
)


def draw_placement(figures: Dict[str, Any], path: Path) -> None:
    """Draw the picture of the plans."""
    sys.path.insert(0, str(DOCS.parent / 'benchmarks'))
    try:
        from placement_tables import draw
    finally:
        sys.path.pop(0)
    draw(figures, path)

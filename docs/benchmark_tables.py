"""Write the tables of measurements into pages: ``docs/*/benchmarks.md`` and those that follow.

The figures are those of ``docs/benchmarks/*.json``, which the scripts in ``benchmarks`` write with
``--json``. A table stands between ``<!-- measured: NAME -->`` and ``<!-- end -->``. The best
figure of a row is bold, whoever it belongs to.
"""

import json
import re
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence

from tables import DOCS, table

RESULTS = DOCS / 'benchmarks'
PAGES = ('benchmarks.md', 'samples.md', 'llama_lora.md', 'device_guard.md')

WORDS: Dict[str, Dict[str, str]] = dict(
    en={
        'cpu': 'CPU',
        'xla': 'torch_xla',
        'segformer': 'SegFormer-B0',
        'resnet50': 'ResNet-50',
        'retinanet': 'RetinaNet (ResNet-50)',
        'card': 'PrivateUse1 stand-in',
        'native': 'PrivateUse1 stand-in with a backend of its own',
        'setting': '{device}, {ranks} ranks, {mb} MB',
        'refuses': 'refuses',
        'absent': 'not measured',
        'measured': 'Measured at {}.',
        'at': 'commit {commit} (torch {torch}, {cores} cores)',
        'and': '; ',
        'none': 'nothing averaged',
        'split': 'floor in two executions',
        'split_ratio': 'ours / that',
        'stock': "MMEngine's wrapper",
        'naive': 'naive hook',
        'ours': 'ours',
        'floor': 'floor',
        'ratio': 'ours / floor',
        'flat': 'ours, `hierarchy=False`',
        'size': 'device, size',
        'mmengine': "MMEngine's hook",
        'background': 'ours, `async_save=True`',
        'per_mmengine': "async / MMEngine's",
        'model': 'model',
        'devices': '{} devices',
        'rank_counts': '{} ranks',
        'samples': 'samples of each rank',
        'times': '{} × {}',
        'step': 'training step',
        'slower': 'slower with the guard',
        'runs': '{low} to {high} (median {middle})',
        'balance': 'balance',
        'gather': 'gather',
        'even': 'even',
        'skewed': 'skewed',
        'comma': ', ',
        'memory': 'devices, memory',
        'search': 'search',
        'plan': 'whole plan',
        'equal': 'equal',
        'unequal': '2:1:…',
        'hooks': 'its hooks',
        'our_hooks': 'our hooks',
        'more': 'ours take more, of an iteration',
        'runner': "MMEngine's runner",
        'bare': 'ours, as little as can be',
        'bare_hooks': 'hooks of that',
        'import': 'package',
        'seconds': 'seconds that its import adds',
        'iteration': 'iteration',
        'bits': 'bits for each byte of held-out text',
        'trained': 'trained',
        'after': 'after {} iterations',
        'try': 'to try it, add `--cfg-options`',
        'adapters': 'adapters alone',
        'ends': 'embedding and head alone',
        'both': 'both, as the config has it',
        'layers': 'layers',
        'exact': 'synchronized, ms',
        'per_rank': "`sync_bn='per_rank'`, ms",
        'executions': 'graph executions of a step',
        'of_iteration': 'executions of an iteration',
        'late': 'compilations in iterations 3 to 10',
        'difference': 'largest relative difference of losses',
        'on_host': 'ms with losses on the host',
        'on_device': 'on the device',
        'share': 'loss on the host, of an iteration',
        'share_cpu': 'of one on the CPU',
        'endless': 'no 3rd iteration in {} s',
        'compiling': '{}, {} compilations',
    },
    zh_cn={
        'cpu': 'CPU',
        'xla': 'torch_xla',
        'segformer': 'SegFormer-B0',
        'resnet50': 'ResNet-50',
        'retinanet': 'RetinaNet (ResNet-50)',
        'card': 'PrivateUse1 替身',
        'native': '有自己后端的 PrivateUse1 替身',
        'setting': '{device}，{ranks} 个 rank，{mb} MB',
        'refuses': '拒绝',
        'absent': '未测量',
        'measured': '测量于{}。',
        'at': '提交 {commit}（torch {torch}，{cores} 核）',
        'and': '；',
        'none': '不平均',
        'split': '分两次执行的下限',
        'split_ratio': '我们 / 该下限',
        'stock': 'MMEngine 的包装器',
        'naive': 'naive 钩子',
        'ours': '我们',
        'floor': '下限',
        'ratio': '我们 / 下限',
        'flat': '我们，`hierarchy=False`',
        'size': '设备，大小',
        'mmengine': 'MMEngine 的钩子',
        'background': '我们，`async_save=True`',
        'per_mmengine': 'async / MMEngine',
        'model': '模型',
        'devices': '{} 个设备',
        'rank_counts': '{} 个 rank',
        'samples': '每个 rank 的样本',
        'times': '{} × {}',
        'step': '训练步骤',
        'slower': '使用守卫后慢多少',
        'runs': '{low} 到 {high}（中位数 {middle}）',
        'balance': '均分',
        'gather': '收集',
        'even': '均匀',
        'skewed': '偏斜',
        'comma': '，',
        'memory': '设备数，内存',
        'search': '搜索',
        'plan': '整个计划',
        'equal': '相等',
        'unequal': '2:1:…',
        'hooks': '它的钩子',
        'our_hooks': '我们的钩子',
        'more': '我们多占一次迭代的',
        'runner': 'MMEngine 的 runner',
        'bare': '我们，尽量精简',
        'bare_hooks': '其钩子',
        'import': '包',
        'seconds': '导入所增加的秒数',
        'iteration': '迭代',
        'bits': '测试文本每个字节所需的比特数',
        'trained': '训练的部分',
        'after': '{} 次迭代之后',
        'try': '想自己试，加 `--cfg-options`',
        'adapters': '只训练适配器',
        'ends': '只训练嵌入层和输出层',
        'both': '两者都训练，即配置原样',
        'layers': '层数',
        'exact': '同步，毫秒',
        'per_rank': "`sync_bn='per_rank'`，毫秒",
        'executions': '一步的图执行次数',
        'of_iteration': '一次迭代的执行次数',
        'late': '第 3 到 10 次迭代的编译次数',
        'difference': '损失的最大相对差',
        'on_host': '损失在主机上，毫秒',
        'on_device': '在设备上',
        'share': '主机上的损失占一次迭代的',
        'share_cpu': '占 CPU 上一次迭代的',
        'endless': '{} 秒内没有第 3 次迭代',
        'compiling': '{}，{} 次编译',
    },
)

#: Ways to average that send all bits, of which the fastest is bold.
EXACT = ('stock', 'naive', 'ours')
COMPRESSED = {'ours-bf16': 'bf16', 'ours-fp16': 'fp16', 'ours-powersgd': 'PowerSGD'}
SHOWN_MODELS = (
    'Llama-3.1-8B',
    'ViT-L',
    'Swin-L',
    'SegFormer-B5 (mmseg)',
    'Cascade Mask R-CNN (mmdet)',
)
SHOWN_SAMPLES = ((16, 1 << 10), (1024, 4), (16, 602112))


class File(Dict[str, Any]):
    """What a benchmark wrote: ``rows``, and where they are from."""


def load(*names: str) -> List[File]:
    """The files of results, in this order."""
    return [File(json.loads((RESULTS / name).read_text(encoding='utf-8'))) for name in names]


def rows_of(files: Iterable[File]) -> List[Dict[str, Any]]:
    """All rows of some files."""
    return [row for file in files for row in file['rows']]


def number(value: float) -> str:
    """Milliseconds, with one place below 20."""
    return f'{value:.1f}' if round(value, 1) < 20 else f'{value:.0f}'


def bold_best(values: Sequence[Optional[float]], show: Callable[[float], str]) -> List[str]:
    """Show figures, the least of them bold; what shows like the least is bold too."""
    shown = ['' if value is None else show(value) for value in values]
    present = [(value, text) for value, text in zip(values, shown) if value is not None]
    if len(present) < 2:
        return shown
    best = min(present)[1]
    if all(text == best for _, text in present):
        return shown
    return [f'**{text}**' if text == best else text for text in shown]


def where(files: Sequence[File], words: Dict[str, str]) -> str:
    """The sentence that says what the figures are from."""
    told = [words['at'].format(**file) for file in files]
    return words['measured'].format(words['and'].join(dict.fromkeys(told)))


# averaging ------------------------------------------------------------------------------------


def averaging(files: Sequence[File], words: Dict[str, str], between_hosts: bool) -> str:
    """Milliseconds of a step for each way to average."""
    rows = rows_of(files)
    extra = [way for way in COMPRESSED if between_hosts]
    titles = ['', words['none'], *(words[way] for way in EXACT), words['floor'], words['ratio']]
    titles += [words['flat'], *(COMPRESSED[way] for way in extra)] if between_hosts else []
    titles += [] if between_hosts else [words['split'], words['split_ratio']]
    lines = []
    for row in rows:
        ms = row['median_ms']
        told = words['setting'].format(
            device=words[row['device']], ranks=row['ranks'], mb=round(row['bytes'] / 2**20)
        )
        exact = bold_best([ms.get(way) for way in EXACT], number)
        if 'stock' not in ms:
            exact[0] = words['absent' if row['device'] == 'cpu' else 'refuses']
        line = [told, number(ms['none']), *exact, number(row['floor_ms'])]
        line.append(f'{ms["ours"] / row["floor_ms"]:.2f}')
        if between_hosts:
            line += [number(ms[way]) if way in ms else '' for way in ('ours-flat', *extra)]
        elif 'split' in ms:
            floor = row['floor_ms'] + ms['split'] - ms['none']
            line += [number(floor), f'{ms["ours"] / floor:.2f}']
        else:
            line += ['', '']
        lines.append(line)
    return f'{table(titles, lines)}\n\n{where(files, words)}'


def averaging_one_host(words: Dict[str, str]) -> str:
    """Two ranks on one host."""
    kinds = ('cpu', 'card', 'native', 'xla')
    files = load(*(f'grad_sync_{kind}.json' for kind in kinds))
    return averaging(files, words, between_hosts=False)


def averaging_two_hosts(words: Dict[str, str]) -> str:
    """Two hosts at 1 Gbit/s."""
    kinds = ('cpu', 'card', 'xla')
    return averaging(load(*(f'grad_sync_hosts_{kind}.json' for kind in kinds)), words, True)


# the others -----------------------------------------------------------------------------------


def checkpoints(words: Dict[str, str]) -> str:
    """How long training stands still."""
    ways = ('mmengine', 'ours', 'background')
    titles = [words['size'], *(words[way] for way in ways), words['per_mmengine']]
    files = load('checkpoint_cpu.json', 'checkpoint_xla.json')
    lines = []
    for row in rows_of(files):
        ms = row['stall_ms']
        told = f'{words[row["device"]]}{words["comma"]}{row["megabytes"]} MB'
        ratio = f'{ms["background"] / ms["mmengine"]:.2f}'
        lines.append([told, *bold_best([ms[way] for way in ways], number), ratio])
    return f'{table(titles, lines)}\n\n{where(files, words)}'


def plans(words: Dict[str, str]) -> str:
    """How uneven plans are: HF accelerate's and ours, on equal devices."""
    files = load('placement.json')
    rows = [row for row in rows_of(files) if row['equal']]
    counts = sorted({row['devices'] for row in rows})
    lines = []
    for model in SHOWN_MODELS:
        found = {row['devices']: row for row in rows if row['model'] == model}
        pairs = [[found[count][key] for key in ('accelerate', 'ours')] for count in counts]
        shown = [bold_best(pair, lambda value: f'{max(value, 0.0):.3f}') for pair in pairs]
        lines.append([model, *(' / '.join(pair) for pair in shown)])
    titles = [words['model'], *(words['devices'].format(count) for count in counts)]
    return f'{table(titles, lines)}\n\n{where(files, words)}'


def plan_times(words: Dict[str, str]) -> str:
    """Milliseconds to plan a chain of 1,000 blocks."""
    files = load('placement.json')
    lines = []
    for row in files[0]['times']:
        memory = words['equal' if row['equal'] else 'unequal']
        whole = bold_best([row['plan'], row['accelerate']], number)
        told = f'{row["devices"]}{words["comma"]}{memory}'
        lines.append([told, number(row['search']), *whole])
    titles = [words['memory'], words['search'], words['plan'], 'HF accelerate']
    return table(titles, lines)


def guard(words: Dict[str, str]) -> str:
    """What DeviceGuard costs."""
    files = load('device_guard.json')
    lines = []
    for row in rows_of(files):
        found = sorted(row['slower'])
        shown = dict(low=found[0], middle=found[len(found) // 2], high=found[-1])
        told = words['runs'] if len(found) > 1 else '{middle}'
        percents = {
            name: f'{value * 100:.1f} %'.replace('-', '−') for name, value in shown.items()
        }
        lines.append([row['name'], told.format(**percents)])
    return f'{table([words["step"], words["slower"]], lines)}\n\n{where(files, words)}'


def import_time(words: Dict[str, str]) -> str:
    """What importing costs."""
    files = load('import_time.json')
    (row,) = rows_of(files)
    lines = [['mmdevplug', f'{row["mmdevplug_s"]:.3f}']]
    return f'{table([words["import"], words["seconds"]], lines)}\n\n{where(files, words)}'


def training_loops(words: Dict[str, str]) -> str:
    """What an iteration takes, and what its hooks take of it."""
    return _loops(words, 'training_loop.json', 'mmengine', ('runner', 'ours', 'hooks'))


def lazy_training_loops(words: Dict[str, str]) -> str:
    """The same on a lazy device, against ours without what can be left out."""
    return _loops(words, 'training_loop_xla.json', 'ours-bare', ('bare', 'ours', 'bare_hooks'))


def _loops(words: Dict[str, str], file: str, peer: str, titles: Sequence[str]) -> str:
    files = load(file)
    lines = []
    for row in rows_of(files):
        ms, hooks = row['ms'], row['hooks_ms']
        told = f'{words[row["model"]]}{words["comma"]}{words["rank_counts"].format(row["ranks"])}'
        best = bold_best([ms[peer], ms['ours']], number)
        shown = [f'{hooks[way]:.2f}' for way in (peer, 'ours')]
        lines.append([told, *best, *shown, f'{row["share"]:.2%}'])
    heads = [words[name] for name in ('model', *titles, 'our_hooks', 'more')]
    return f'{table(heads, lines)}\n\n{where(files, words)}'


def sync_bn(words: Dict[str, str]) -> str:
    """What synchronized batch normalization adds to a step on a lazy device."""
    files = load('sync_bn.json')
    ways = ('exact', 'per_rank')
    lines = []
    for row in rows_of(files):
        shown = bold_best([row['ms'][way] for way in ways], number)
        executions = ' / '.join(str(row['executions'][way]) for way in ways)
        lines.append([words[row['model']], str(row['layers']), *shown, executions])
    titles = [words[name] for name in ('model', 'layers', *ways, 'executions')]
    return f'{table(titles, lines)}\n\n{where(files, words)}'


def host_losses(words: Dict[str, str]) -> str:
    """What detectors and segmentors execute and compile on a lazy device."""
    files = load('host_losses.json')
    lines = []
    for row in rows_of(files):
        cpu, auto, device = row['cpu'], row['auto'], row.get('device')
        cells = [
            f'`{row["model"]}`',
            str(auto['executions']),
            str(auto['compilations']),
            f'{max(auto["differences"]):.1g}',
            number(auto['ms']),
            words['absent'] if device is None else _on_device(device, words),
            f'{auto["loss_ms"] / auto["ms"]:.0%}',
            f'{cpu["loss_ms"] / cpu["ms"]:.0%}',
        ]
        lines.append(cells)
    names = ('model', 'of_iteration', 'late', 'difference', 'on_host', 'on_device', 'share')
    titles = [words[name] for name in (*names, 'share_cpu')]
    return f'{table(titles, lines)}\n\n{where(files, words)}'


def _on_device(measured: Dict[str, Any], words: Dict[str, str]) -> str:
    if 'ms' not in measured:
        return words['endless'].format(measured['limit'])
    return words['compiling'].format(number(measured['ms']), measured['compilations'])


def llama_learns(words: Dict[str, str]) -> str:
    """Bits for a byte while the small Llama learns."""
    files = load('llama_lora.json')
    (row,) = [row for row in rows_of(files) if row['trained'] == 'both']
    lines = [['0', '8.0'], *([step, f'{bits:.2f}'] for step, bits in row['bits'].items())]
    return f'{table([words["iteration"], words["bits"]], lines)}\n\n{where(files, words)}'


def llama_parts(words: Dict[str, str]) -> str:
    """What is left of that where only a part of it is trained."""
    rows = rows_of(load('llama_lora.json'))
    last = list(rows[0]['bits'])[-1]
    bits = bold_best([row['bits'][last] for row in rows], lambda value: f'{value:.2f}')
    lines = [
        [words[row['trained']], shown, f'`{row["option"]}`' if row['option'] else '']
        for row, shown in zip(rows, bits)
    ]
    return table([words['trained'], words['after'].format(last), words['try']], lines)


def exchange(words: Dict[str, str], kinds: Sequence[Sequence[str]], shown: Any = None) -> str:
    """Milliseconds to share samples: all_gather_object / one flat all-gather / ours."""
    files = load('exchange.json')
    rows = rows_of(files)
    counts = sorted({row['ranks'] for row in rows})
    lines = []
    for kind in kinds:
        mine = [row for row in rows if (row['exchange'], row['pool']) == tuple(kind)]
        settings = sorted({(row['bytes'], row['samples']) for row in mine})
        for size, samples in sorted(settings, key=lambda one: (one[0] > 1024, one)):
            if shown is not None and (samples, size) not in shown:
                continue
            told = words['times'].format(f'{samples:,}', _bytes(size))
            name = [words[part] for part in kind] if len(kinds) > 1 else []
            found = {row['ranks']: row for row in mine if _is(row, samples, size)}
            cells = [_exchange_cell(found.get(count)) for count in counts]
            lines.append([words['comma'].join([*name, told]), *cells])
    titles = [words['samples'], *(words['rank_counts'].format(count) for count in counts)]
    return f'{table(titles, lines)}\n\n{where(files, words)}'


def _is(row: Dict[str, Any], samples: int, size: int) -> bool:
    return (row['samples'], row['bytes']) == (samples, size)


def _bytes(size: int) -> str:
    return f'{size} B' if size < 1024 else f'{round(size / 1024)} KB'


def _exchange_cell(row: Optional[Dict[str, Any]]) -> str:
    if row is None:
        return '–'
    ms = row['ms']
    shown = bold_best([ms[way] for way in ('object', 'flat', 'ours')], number)
    return f'{" / ".join(shown)} ({ms["object"] / ms["ours"]:.1f})'


KINDS = [(exchange, pool) for exchange in ('balance', 'gather') for pool in ('even', 'skewed')]
TABLES: Dict[str, Callable[[Dict[str, str]], str]] = {
    'averaging, one host': averaging_one_host,
    'averaging, two hosts': averaging_two_hosts,
    'checkpoints': checkpoints,
    'plans': plans,
    'plan times': plan_times,
    'guard': guard,
    'training loops': training_loops,
    'training loops, lazy': lazy_training_loops,
    'synchronized batch norm': sync_bn,
    'host losses': host_losses,
    'import': import_time,
    'llama learns': llama_learns,
    'llama parts': llama_parts,
    'samples': lambda words: exchange(words, KINDS[:3], SHOWN_SAMPLES),
    **{', '.join(kind): lambda words, kind=kind: exchange(words, [kind]) for kind in KINDS},  # type: ignore[misc]
}
BLOCK = re.compile(r'(<!-- measured: ([^>]*) -->\n).*?(\n<!-- end -->)', re.DOTALL)


def fill(text: str, words: Dict[str, str]) -> str:
    """Write the tables of a page between their marks."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]](words) + found[3], text)


def main() -> None:
    """Write the tables into all pages."""
    for language, words in WORDS.items():
        for name in PAGES:
            path = DOCS / language / name
            path.write_text(fill(path.read_text(encoding='utf-8'), words), encoding='utf-8')
            print(f'wrote {path}')


if __name__ == '__main__':
    main()

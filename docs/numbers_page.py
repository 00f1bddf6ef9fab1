"""Write ``numbers.md`` of what ``make test-numbers`` and ``test-configs-xla`` have measured."""

import json
from pathlib import Path
from typing import Any, Dict, List

from tables import table, write_pages

RESULTS = Path(__file__).parent / 'numbers'
#: The columns, in their order: the device, and how it is called.
DEVICES = dict(xla='torch_xla', lazy='lazy', tpu='TorchTPU', zeta='PrivateUse1')
LANGUAGES: Dict[str, Dict[str, Any]] = dict(
    en=dict(
        heading='# Numbers: operators that differ from the CPU',
        links='English | [简体中文](../zh_cn/numbers.md)',
        intro="""\
Read this page if you train on a device that is not a GPU, or write an accelerator. PyTorch's
own samples (OpInfo) run on a device and on the CPU: outputs, and gradients of their weighted
sum. An operator differs if a value is off by more than 1e-3 of the largest (float32), 5e-2
(bfloat16), or at all (int64), or if shape or dtype differ. Random operators and factors that
are not unique (`svd`, `qr`, ...) are left out. "Before" is without the
[replacements](patches.md) of mmdevplug.""",
        summary=[
            'device',
            'torch',
            'operators',
            'with a dtype',
            'samples',
            'differ before',
            'differ now',
            'raise errors',
        ],
        notes="""\
- All devices compute on the host here: torch_xla and TorchTPU with XLA's compiler for the CPU,
  `lazy` with PyTorch; the PrivateUse1 card is a stand-in. A TPU may differ elsewhere.
- [`mmdevplug check`](check.md) compares one training step of your model with the CPU.
- `topk`, `kthvalue` and `cummax` choose another of equal values.
- An error is no difference: its message names the operator.""",
        device='## {}',
        none='None differs.',
        columns=['what differs', 'dtypes', 'operators, samples that differ'],
        comma=', ',
        configs="""\
## Released configs

Released configs are made small (pictures of 64 × 64, ResNet-18 of half its width in place of
ResNet-50, SGD, no random augmentation), and the first step is compared as
[`mmdevplug check`](check.md) does: outputs, gradients, buffers. Before means without the operators
that mmdevplug replaces. Configs that take more than 400 seconds are named and not compared.
`make test-configs-xla` measures all of `docs/numbers/configs.py`; the table has those that
were measured so far. Where `native_batch_norm` differs, it is `running_var`: torch_xla divides by
the number of elements, PyTorch by one less, which shows where a layer normalizes few of them.

Two configs differ by rounding: in `resnet18_8xb16_cifar10` and `shufflenet-v1-1x_16xb64_in1k` one
or two inputs of a ReLU, of some 100,000, are off zero by less than 3e-4 and have the other sign,
so that their gradients are zero on one device. All other gradients agree within 2e-5. Measured by
float64, torch_xla is 15 times as far off there as the CPU: 8e-5 and 5e-6 in the first of them
(root mean square, values up to 5).""",
        of_configs=['device', 'library', 'configs', 'equal before', 'equal now', 'not compared'],
        difference=['config', 'before', 'now'],
        equal='equal',
        unmeasured='not measured',
        again="""\
## To measure again

`make test-numbers` takes about twenty minutes and writes this page. For another accelerator:
""",
    ),
    zh_cn=dict(
        heading='# 数值：与 CPU 结果不同的算子',
        links='[English](../en/numbers.md) | 简体中文',
        intro="""\
如果您在 GPU 以外的设备上训练，或编写加速器，请阅读本页。PyTorch
自带的算子样例（OpInfo）分别在设备和 CPU 上运行：输出，以及其加权和的梯度。
数值与最大值相比偏差超过 1e-3（float32）、5e-2（bfloat16）或有任何偏差（int64），或形状、dtype
不同，即为不同。随机算子和结果不唯一的分解（`svd`、`qr` 等）不在其中。“之前”指没有 mmdevplug
的[替换](patches.md)。""",
        summary=['设备', 'torch', '算子', '算子与 dtype', '样例', '之前不同', '现在不同', '报错'],
        notes="""\
- 这里各设备都在主机上计算：torch_xla 与 TorchTPU 使用 XLA 的 CPU 编译器，`lazy` 使用 PyTorch；
  PrivateUse1 卡是替身。TPU 可能在别处不同。
- [`mmdevplug check`](check.md) 把您的模型的一步训练与 CPU 比较。
- `topk`、`kthvalue` 与 `cummax` 在相等的值中选了另一个。
- 报错不算不同：它会指出算子。""",
        device='## {}',
        none='没有不同。',
        columns=['不同之处', 'dtype', '算子及不同的样例数'],
        comma='、',
        configs="""\
## 发布的配置

把发布的配置缩小（64 × 64 的图片，以宽度减半的 ResNet-18 代替 ResNet-50，SGD，没有随机增强），
第一步的输出、梯度和缓冲区像 [`mmdevplug check`](check.md) 那样比较。
“之前”指没有 mmdevplug 替换的算子。耗时超过 400 秒的配置只列出，不比较。
`make test-configs-xla` 测量 `docs/numbers/configs.py` 中的全部配置；表中是目前已测量的。
`native_batch_norm` 的不同在于 `running_var`：torch_xla 除以元素个数，PyTorch 除以其减一，
在元素很少的层上可见。

有两个配置因舍入而不同：在 `resnet18_8xb16_cifar10` 和 `shufflenet-v1-1x_16xb64_in1k` 中，
约十万个 ReLU 输入里有一两个离零不到 3e-4，符号相反，因此其梯度在其中一个设备上为零。
其余梯度的差不超过 2e-5。与 float64 相比，torch_xla 在此处的偏差是 CPU 的 15 倍：
在前一个配置中为 8e-5 与 5e-6（均方根，数值最大为 5）。""",
        of_configs=['设备', '代码库', '配置', '之前相同', '现在相同', '未比较'],
        difference=['配置', '之前', '现在'],
        equal='相同',
        unmeasured='未测量',
        again="""\
## 重新测量

`make test-numbers` 用约二十分钟测量并写出本页。其他加速器：
""",
    ),
)
COMMAND = """\
```bash
python -m docs.numbers.operators --accelerator acme --json acme.json
```"""


def load(name: str) -> Dict[str, Any]:
    """What was measured; {} if it was not."""
    path = RESULTS / f'{name}.json'
    return json.loads(path.read_text(encoding='utf-8')) if path.exists() else {}


def grouped(rows: List[Dict[str, Any]], comma: str) -> List[List[str]]:
    """A line for all operators with the same dtypes and the same differences."""
    operators: Dict[str, Dict[str, Any]] = {}
    for row in rows:
        found = operators.setdefault(
            row['operator'], dict(dtypes=[], differ=0, samples=0, what=[])
        )
        found['dtypes'].append(row['dtype'])
        found['differ'] += row['differ']
        found['samples'] += row['samples']
        found['what'] += [each for each in row['what'] if each not in found['what']]
    lines: Dict[Any, List[str]] = {}
    for name, found in operators.items():
        key = ('; '.join(found['what']), ', '.join(found['dtypes']))
        lines.setdefault(key, []).append(f'`{name}` {found["differ"]}/{found["samples"]}')
    return [[*key, comma.join(names)] for key, names in lines.items()]


def compared(measured: Dict[str, Any]) -> bool:
    """Whether a step was compared: it ended, and on both devices."""
    return measured.get('level') in ('ok', 'error')


def word(measured: Dict[str, Any], texts: Dict[str, Any]) -> str:
    """What a step showed, in a cell."""
    if measured.get('equal'):
        return str(texts['equal'])
    said = measured.get('said') or measured.get('failed') or measured.get('ended')
    return str(said or texts['unmeasured']).replace('|', '/')


def of_configs(texts: Dict[str, Any]) -> List[str]:
    """The section of released configs; nothing where none was measured."""
    summary, lines = [], []
    for name, title in DEVICES.items():
        rows = load(f'configs_{name}').get('rows', {})
        for library in dict.fromkeys(each.partition('::')[0] for each in rows):
            here = [row for each, row in rows.items() if each.partition('::')[0] == library]
            steps = [[row.get(when, {}) for row in here] for when in ('before', 'now')]
            equal = [sum(bool(each.get('equal')) for each in step) for step in steps]
            left_out = sum(not compared(each) for each in steps[1])
            summary.append([title, library, *map(str, [len(here), *equal, left_out])])
        for each, row in rows.items():
            before, now = row.get('before', {}), row.get('now', {})
            if not (before.get('equal') and now.get('equal')):
                lines.append([f'`{each}`', word(before, texts), word(now, texts)])
    if not summary:
        return []
    return [
        texts['configs'],
        table(texts['of_configs'], summary),
        table(texts['difference'], lines) if lines else texts['none'],
    ]


def render(texts: Dict[str, Any]) -> List[str]:
    """The parts of the page in one language."""
    summary, parts = [], []
    for name, title in DEVICES.items():
        now, before = load(name), load(f'{name}_plain')
        if not now:
            continue
        summary.append(
            [
                title,
                now['torch'],
                str(now['operators']),
                str(now['compared']),
                str(now['samples']),
                str(len(before['different'])) if before else '',
                str(len(now['different'])),
                str(len(now['raised'])),
            ]
        )
        parts.append(texts['device'].format(title))
        lines = grouped(now['different'], texts['comma'])
        parts.append(table(texts['columns'], lines) if lines else texts['none'])
    return [
        texts['heading'],
        texts['links'],
        texts['intro'],
        table(texts['summary'], summary),
        texts['notes'],
        *parts,
        *of_configs(texts),
        texts['again'].strip(),
        COMMAND,
    ]


if __name__ == '__main__':
    write_pages('numbers.md', LANGUAGES, render)

"""Write ``docs/*/options.md`` from the dataclasses in ``mmdevplug/config``.

Keys, types, defaults and the English meanings stand in the dataclasses; the Chinese meanings stand
here, and who needs an option in ``options_needed.py``. A test compares the pages with all.
"""

import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Type

from options_needed import NEEDED
from tables import table, write_pages

EXAMPLE = """```python
accelerator = dict(type='xla', backend='gloo', pad_to=64, memory=False)
```"""

TEXTS: Dict[str, Dict[str, Any]] = dict(
    en=dict(
        heading='# Options',
        intro="""\
Read this page to look up an option of `accelerator`, `model_parallel`, `sharding`,
`model_wrapper_cfg` or `default_hooks.checkpoint`. A job refuses impossible values and unknown
names at its start, and suggests the nearest.

## Options of `accelerator`

The config key `accelerator` is the name of an accelerator, or a dict with its `type`, its
arguments and these options.""",
        after='`mmdevplug check CONFIG` names wrong values before a job starts.\n\n'
        'Arguments of single accelerators are on their pages: `spmd` of '
        '[`xla`](torch_xla.md#all-chips-in-one-process), `generation` of [`gcu`](enflame_t20.md), '
        'and those of [a card of your own](add_an_accelerator.md).',
        titles=('option', 'values', 'default', 'meaning', 'who needs it'),
        language=0,
        model_parallel='## Options of `model_parallel`',
        model_parallel_intro="""\
The key may also be `True` or `False` for `enable` alone; without it a model stays on one device.
See [models over several devices](model_parallel.md).""",
        required='required',
        sections={
            'sharding': """\
## Options of `sharding`

The key may also be `True` for all defaults. See [sharded training](sharding.md).""",
            'model_wrapper_cfg': """\
## Options of the model wrapper

Write `model_wrapper_cfg = dict(type='DeviceDistributedDataParallel', grad_compression='bf16')`;
`DeviceSeparateDistributedDataParallel` takes the same. Both also take the arguments of MMEngine's
and PyTorch's wrapper.""",
            'default_hooks.checkpoint': """\
## Options of checkpoints

`SafeCheckpointHook` replaces MMEngine's `CheckpointHook` and takes these besides its arguments.
See [resuming](resuming.md).""",
        },
    ),
    zh_cn=dict(
        heading='# 选项',
        intro="""\
查找 `accelerator`、`model_parallel`、`sharding`、`model_wrapper_cfg` 或 `default_hooks.checkpoint`
的选项时请阅读本页。作业在启动时拒绝不可能的取值和未知的名称，并给出最接近的名称。

## `accelerator` 的选项

配置键 `accelerator` 是加速器的名称，或一个字典，其中有 `type`、该加速器的参数以及下列选项。""",
        after='`mmdevplug check CONFIG` 在作业开始之前指出错误的取值。\n\n'
        '单个加速器的参数见各自的页面：[`xla`](torch_xla.md#一个进程驱动所有芯片) 的 `spmd`，'
        '[`gcu`](enflame_t20.md) 的 `generation`，以及[您自己的卡](add_an_accelerator.md)的参数。',
        titles=('选项', '取值', '默认值', '含义', '谁需要'),
        language=1,
        model_parallel='## `model_parallel` 的选项',
        model_parallel_intro="""\
该键也可以是 `True` 或 `False`，即只给出 `enable`；没有该键时模型留在一个设备上。
见[把模型放在多个设备上](model_parallel.md)。""",
        required='必填',
        sections={
            'sharding': """\
## `sharding` 的选项

该键也可以是 `True`，即全部取默认值。见[分片训练](sharding.md)。""",
            'model_wrapper_cfg': """\
## 模型包装器的选项

写法是 `model_wrapper_cfg = dict(type='DeviceDistributedDataParallel', grad_compression='bf16')`；
`DeviceSeparateDistributedDataParallel` 接受相同的选项。二者也接受 MMEngine 与 PyTorch
的包装器的参数。""",
            'default_hooks.checkpoint': """\
## 检查点的选项

`SafeCheckpointHook` 代替 MMEngine 的 `CheckpointHook`；除该钩子的参数外，还接受下列选项。
见[恢复训练](resuming.md)。""",
        },
        meanings={
            'accelerator.backend': 'torch.distributed 的后端，优先于 '
            "`env_cfg.dist_cfg.backend`。`'auto'` 仅在 `env_cfg` 的后端适合该设备时使用它。",
            'accelerator.compilations': '在惰性设备上记录 `device/compiles`；编译不止时警告。',
            'accelerator.host_losses': '在惰性设备上，检测器和分割器的头在主机上计算损失。'
            "`'auto'`：损失中的形状取决于数值时。",
            'accelerator.initial_weights': '最初的权重在哪里抽取：'
            "`'host'` 使所有设备得到相同的权重，`'device'` 得到只用 MMEngine 时的权重。"
            "`'auto'`：CUDA 上在设备上，其他设备以及分布在多个设备上的模型在主机上。"
            '分片的模型总是在主机上抽取。',
            'accelerator.memory': '记录主机内存，翻倍时警告；'
            '模型分到多个设备时，也记录每个设备的内存。',
            'accelerator.pad_to': '把一批图像填充到的尺寸：某数的倍数、一个尺寸，'
            '或多个尺寸，取能容纳该批的最小者。',
            'accelerator.preemption': '收到 SIGTERM、SIGINT、SIGHUP 和 SIGUSR1 '
            '时保存检查点并结束。',
            'accelerator.resume_settings': '检查点与配置的优化器或调度器设置不同时：'
            "`'checkpoint'` 保留检查点的设置，`'config'` 采用配置的设置，"
            '位于当前步数。警告会列出这些设置。',
            'model_parallel.enable': '模型是否分到多个设备上；`None` 由设备与训练所需内存决定。',
            'model_parallel.devices': "每个进程使用多少个设备，或设备名称，如 `'cuda:0-3'`；"
            '`None` 表示全部。',
            'model_parallel.strategy': '计划的做法：最优的连续划分；HF accelerate '
            '的映射（足够均衡时）；或 accelerate 的映射。',
            'model_parallel.max_memory': "计划在每个设备上可用的内存，如 `{'cuda:0': '10GB'}`；"
            '`None` 表示设备现有的内存。',
            'model_parallel.no_split': '保持在同一设备上的类或模块；`None` 表示自动查找。',
            'model_parallel.balance_threshold': '不均衡度高于该值的计划视为不均衡。',
            'model_parallel.force_balance': '计划不均衡时的做法：`None`：警告，'
            '有设备分不到任何部分时报错；`True`：一律报错；`False`：可以不用某个设备。',
            'model_parallel.exclude_cpu': '主机是否不参与计算；`False` '
            '表示由主机承担设备容纳不下的部分。',
            'model_parallel.precision': '冻结权重与前向传播的精度；被训练的权重保持不变。`None` '
            '表示一切不变。',
            'model_parallel.guard': '`DeviceGuard` 对混用设备的操作的做法：移动操作数、'
            '警告或停止；`None` 表示不使用。',
            'model_parallel.check_r_consistency': 'LoRA 适配器的秩不一致时是否警告。',
            'model_parallel.strict_r_check': '是否拒绝秩不一致的 LoRA 适配器。',
            'model_parallel.plan': '直接采用的计划，由 `mmdevplug plan --json` 写出。',
            'sharding.blocks': '逐个完整收集的类或模块；`None` 表示自动查找。',
            'sharding.ranks': '共同持有一份模型的 rank 数，其余 rank 持有更多份；'
            '`None`：所有 rank。',
            'sharding.reshard_after_forward': '前向传播之后是否释放各块，反向传播时再次收集；'
            '`False` 占用内存，通信量少三分之一。',
            'sharding.mixed_precision': "`'bf16'`：各块以 bfloat16 收集并计算，"
            '梯度以 float32 平均；权重与优化器保持不变。',
            'sharding.offload': '权重、梯度和优化器状态是否位于主机内存，优化器在主机上计算：'
            '卡上只有正在计算的块。在 CPU 上没有效果。',
            'sharding.sharded_checkpoint': '各 rank 是否把检查点中自己的分片写入 `.pth` '
            '文件旁的目录，其余内容在该文件中；可在任意数量的 rank 上恢复。',
            'model_wrapper_cfg.bucket_cap_mb': '一条消息的大小，单位 MB；`None` 时，梯度经主机'
            '中转为 5，其 rank 共享内存时为 16（跨多台主机时更小），惰性设备为 8，'
            '其他情况为 PyTorch 自己的值。',
            'model_wrapper_cfg.grad_compression': "传输什么来代替 float32：`'bf16'` 是 PyTorch "
            '的钩子，用于主机之间的慢链路；其他钩子由 `register_comm_hook` 注册。',
            'model_wrapper_cfg.nonfinite_grads': '某个 rank 的梯度出现 NaN 或无穷大时所有 rank '
            '的做法：停止并指出 rank 和参数，或继续。梯度缩放器自行跳过，优先于它。'
            "`None` 在梯度经主机中转时为 `'stop'`（没有额外开销），其他情况为 `'ignore'`。",
            'default_hooks.checkpoint.async_save': '是否由 rank 0 的一个线程写入，训练同时继续；'
            '训练只等待复制到主机内存。错误在下一个检查点或结束时抛出。',
            'default_hooks.checkpoint.resumable_best': '`save_best` 的文件是否像其他文件一样'
            '包含恢复训练所需的内容：优化器、调度器和随机数的状态。',
        },
    ),
)


def rows(kind: Type, texts: Dict[str, Any]) -> Iterator[List[str]]:
    """The rows of a table: an option of a dataclass in each."""
    from mmdevplug.config.fields import REQUIRED, options_of

    for one in options_of(kind):
        given = one.metadata
        name = f'{kind.key}.{one.name}'
        meaning = texts['meanings'][name] if 'meanings' in texts else given['meaning']
        default = given['default']
        shown = texts['required'] if default is REQUIRED else f'`{default!r}`'
        needed = NEEDED[name][texts['language']]
        yield [f'`{name}`', f'`{given["accepts"]}`', shown, meaning, needed]


def kinds() -> List[Type]:
    """The dataclass of each key."""
    from mmdevplug.config.accelerator import AcceleratorOptions
    from mmdevplug.config.checkpoint import CheckpointOptions
    from mmdevplug.config.model_parallel import ModelParallelOptions
    from mmdevplug.config.model_wrapper import WrapperOptions
    from mmdevplug.config.sharding import ShardingOptions

    return [
        AcceleratorOptions,
        ModelParallelOptions,
        ShardingOptions,
        WrapperOptions,
        CheckpointOptions,
    ]


def render(texts: Dict[str, Any]) -> List[str]:
    """The parts of the page in one language."""
    accelerator, model_parallel, *others = kinds()

    def table_of(*shown: Type) -> str:
        return table(texts['titles'], [row for kind in shown for row in rows(kind, texts)])

    page = [
        texts['heading'],
        texts['intro'],
        EXAMPLE,
        texts['after'],
        table_of(accelerator),
        texts['model_parallel'],
        texts['model_parallel_intro'],
        table_of(model_parallel),
    ]
    for kind in others:
        page += [texts['sections'][kind.key], table_of(kind)]
    return page


def main() -> None:
    """Write both pages."""
    write_pages('options.md', TEXTS, render)


if __name__ == '__main__':
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()

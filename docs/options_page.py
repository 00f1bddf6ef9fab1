"""Write ``docs/*/options.md`` from the dataclasses in ``mmdevplug/config``.

Keys, types, defaults and the English meanings stand in the dataclasses; the Chinese meanings stand
here. A test compares the pages with both.
"""

import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple, Type

from tables import table, write_pages

EXAMPLE = """```python
accelerator = dict(type='xla', backend='gloo', pad_to=64, memory=dict(interval=500))
```"""

TEXTS: Dict[str, Dict[str, Any]] = dict(
    en=dict(
        heading='# Options of `accelerator` and `model_parallel`',
        intro="""\
The config key `accelerator` holds the name of an accelerator, or a dict with its `type`, arguments
of that accelerator, and the options below. `DeviceRunner` reads the key of the config;
`DeviceStrategy` takes the same options in `strategy`.""",
        after="""\
A value that an option cannot have is refused when the job starts, and so is a name that neither
this page nor the accelerator knows. `mmdevplug doctor --config CONFIG` lists all wrong values at
once.""",
        titles=('option', 'values', 'default', 'meaning'),
        dicts='## Options that are dicts',
        dicts_intro="""\
`compilations` and `memory` may be `True`, which takes all of these defaults, or `False`, which
turns the feature off.""",
        model_parallel='## Options of `model_parallel`',
        model_parallel_intro="""\
The key may also be `True` or `False`, which is `enable` alone; without the key a model stays on
one device. See [models over several devices](model_parallel.md).""",
        strategy="""\
`DeviceStrategy` differs in one default: `backend` is `'auto'`, because `FlexibleRunner` asks for
nccl when a config says nothing.""",
    ),
    zh_cn=dict(
        heading='# `accelerator` 与 `model_parallel` 的选项',
        intro="""\
配置键 `accelerator` 是加速器的名称，或一个字典，其中有 `type`、该加速器的参数以及下列选项。
`DeviceRunner` 读取配置中的该键；`DeviceStrategy` 在 `strategy` 中接受相同的选项。""",
        after="""\
选项的取值不可能时，作业在启动时拒绝；本页与加速器都不认识的名称同样被拒绝。
`mmdevplug doctor --config CONFIG` 一次列出所有错误的取值。""",
        titles=('选项', '取值', '默认值', '含义'),
        dicts='## 取值为字典的选项',
        dicts_intro="""\
`compilations` 与 `memory` 可以是 `True`（全部使用这些默认值）或 `False`（关闭该功能）。""",
        model_parallel='## `model_parallel` 的选项',
        model_parallel_intro="""\
该键也可以是 `True` 或 `False`，即只给出 `enable`；没有该键时模型留在一个设备上。
见[把模型放在多个设备上](model_parallel.md)。""",
        strategy="""\
`DeviceStrategy` 只有一个默认值不同：`backend` 为 `'auto'`，因为配置未写明时 `FlexibleRunner`
会要求 nccl。""",
        meanings={
            'accelerator.backend': 'torch.distributed 的后端，优先于 '
            "`env_cfg.dist_cfg.backend`。`'auto'` 仅在 `env_cfg` 的后端适合该设备时使用它。",
            'accelerator.compilation_cache': '目录，各 rank '
            '在其中保留编译好的图，供以后运行使用；`True` 表示位于工作目录中。',
            'accelerator.compilations': '在惰性设备上记录 `device/compiles`；'
            '编译不止时警告，并指出变化的形状。',
            'accelerator.heartbeat_timeout': '心跳沉默的秒数，超过后询问该 '
            'rank，其进程不应答则视为已死：至少 6；`None` 表示 60。',
            'accelerator.hook': '`DeviceHook` 的参数，该钩子在运行前检查一切所在的设备。',
            'accelerator.memory': '记录主机与设备的内存，并报告增长。',
            'accelerator.mmcv_ops': 'mmcv 算子在该设备上没有内核时的做法：在主机上运行，'
            '或停止作业。',
            'accelerator.monitor': '作业有多个 rank 时，记录通信的开销。',
            'accelerator.on_nan': '损失不是有限数时，所有 rank 是否停止。',
            'accelerator.pad_to': '把一批图像填充到的尺寸：某数的倍数、一个尺寸，'
            '或多个尺寸，取能容纳该批的最小者。',
            'accelerator.preemption': '收到 SIGTERM、SIGINT、SIGHUP 和 SIGUSR1 '
            '时保存检查点并结束。',
            'accelerator.safe_checkpoints': '是否以 `SafeCheckpointHook` 代替 MMEngine 的 '
            '`CheckpointHook`。',
            'accelerator.compilations.warmup': '允许编译计算图的迭代次数。',
            'accelerator.compilations.patience': '预热之后、警告之前允许编译计算图的迭代次数。',
            'accelerator.hook.on_mismatch': '运行前发现张量不在其 rank 的设备上时的做法：'
            '移动并警告，或停止作业。',
            'accelerator.memory.interval': '两次垃圾回收之间的迭代次数，'
            '回收时也归还设备的缓存内存；`None` 表示从不。',
            'accelerator.memory.sample_interval': '两次内存采样之间的迭代次数。',
            'accelerator.memory.warmup': '允许内存增长的迭代次数。',
            'model_parallel.enable': '模型是否分到多个设备上；`None` 由设备与训练所需内存决定。',
            'model_parallel.devices': "每个进程使用多少个设备，或设备名称，如 `'cuda:0-3'`；"
            '`None` 表示全部。',
            'model_parallel.auto_rule': '`enable` 为 `None` 时的依据：训练所需的内存，'
            '或仅凭设备数量。',
            'model_parallel.strategy': '计划的做法：最优的连续划分；HF accelerate '
            '的映射（足够均衡时）；或 accelerate 的映射。',
            'model_parallel.max_memory': "计划在每个设备上可用的内存，如 `{'cuda:0': '10GB'}`；"
            '`None` 表示设备现有的内存。',
            'model_parallel.no_split': '保持在同一设备上的类或模块；`None` 表示自动查找。',
            'model_parallel.balance_threshold': "不均衡度不超过该值时，`'dynamic'` 采用 "
            'accelerate 的映射。',
            'model_parallel.force_balance': '有设备分不到任何部分时，是否拒绝该计划。',
            'model_parallel.exclude_cpu': '主机是否不参与计算；`False` '
            '表示由主机承担设备容纳不下的部分。',
            'model_parallel.precision': '冻结权重与前向传播的精度；被训练的权重保持不变。`None` '
            '表示一切不变。',
            'model_parallel.num_microbatches': '一个批分成的份数，各份依次通过各设备。',
            'model_parallel.guard': '`DeviceGuard` 对混用设备的操作的做法：移动操作数、'
            '警告或停止；`None` 表示不使用。',
            'model_parallel.check_r_consistency': 'LoRA 适配器的秩不一致时是否警告。',
            'model_parallel.strict_r_check': '是否拒绝秩不一致的 LoRA 适配器。',
            'model_parallel.plan': '直接采用的计划，由 `mmdevplug plan --json` 写出。',
            'accelerator.memory.growth_mb': '所报告的最小增长，单位 MB；`None` 表示不报告。',
        },
    ),
)


def rows(kind: Type, key: str, texts: Dict[str, Any]) -> Iterator[List[str]]:
    """The rows of a table: an option of a dataclass in each."""
    from mmdevplug.config.fields import options_of

    for one in options_of(kind):
        name = f'{key}.{one.name}'
        given = one.metadata
        meaning = texts['meanings'][name] if 'meanings' in texts else given['meaning']
        yield [f'`{name}`', f'`{given["accepts"]}`', f'`{given["default"]!r}`', meaning]


def parts() -> Iterator[Tuple[str, Type]]:
    """Keys of the options that are dicts, and the dataclasses of these."""
    from mmdevplug.config.accelerator import AcceleratorOptions
    from mmdevplug.config.fields import options_of

    for one in options_of(AcceleratorOptions):
        if 'dict' in one.metadata['accepts']:
            yield f'accelerator.{one.name}', type(one.default)


def render(texts: Dict[str, Any]) -> List[str]:
    """The parts of the page in one language."""
    from mmdevplug.config.accelerator import AcceleratorOptions
    from mmdevplug.config.model_parallel import ModelParallelOptions

    inner = [row for key, kind in parts() for row in rows(kind, key, texts)]
    return [
        texts['heading'],
        texts['intro'],
        EXAMPLE,
        texts['after'],
        table(texts['titles'], list(rows(AcceleratorOptions, 'accelerator', texts))),
        texts['strategy'],
        texts['dicts'],
        texts['dicts_intro'],
        table(texts['titles'], inner),
        texts['model_parallel'],
        texts['model_parallel_intro'],
        table(texts['titles'], list(rows(ModelParallelOptions, 'model_parallel', texts))),
    ]


def main() -> None:
    """Write both pages."""
    write_pages('options.md', TEXTS, render)


if __name__ == '__main__':
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()

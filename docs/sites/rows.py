"""The rows of the table: MMEngine's assumptions about devices, what is stock and what is ours.

The texts are what the documentation says; whether they hold is what the tests find out.
"""

from dataclasses import dataclass, field
from typing import Dict

#: Why a row is not for a kind of device; docs/site_table.py has the words.
ABSENT = dict(
    served='served',  # MMEngine is right there; on the native stand-in that is tested
    none='none',  # the device has no such thing
    named='named',  # is about devices that MMEngine names, or about a vendor's backend
)


@dataclass
class Row:
    """An assumption.

    Attributes:
        where (str): Where in MMEngine 0.10.7.
        stock, stock_zh (str): What MMEngine does.
        ours, ours_zh (str): What we do.
        absent (dict): Accelerators that the row is not for → a key of :data:`ABSENT`.
    """

    where: str
    stock: str
    stock_zh: str
    ours: str
    ours_zh: str
    absent: Dict[str, str] = field(default_factory=dict)


def _on_cpu(why='served', **more):
    return dict(cpu=why, **more)


#: MMEngine knows the device and its backend by name.
NAMED = dict(npu='served')


ROWS = {
    1: Row(
        'device/utils.py `get_device`',
        'says `cpu` beside an accelerator',
        '有加速卡时仍返回 `cpu`',
        'says the device type of the accelerator in use',
        '返回所用加速卡的设备类型',
        _on_cpu(**NAMED),
    ),
    2: Row(
        'dist/utils.py `_init_dist_pytorch`',
        'calls `torch.cuda.set_device`, and fails without CUDA',
        '调用 `torch.cuda.set_device`，没有 CUDA 即失败',
        '`init_device` sets the device of the rank and starts the process group',
        '`init_device` 设置本 rank 的设备并启动进程组',
        NAMED,
    ),
    3: Row(
        'dist/utils.py `_init_dist_pytorch`',
        'takes `hccl` on a device named `npu`, whatever the config says',
        '设备名为 `npu` 时一律使用 `hccl`，忽略配置的后端',
        "uses the config's backend if it suits the device",
        '配置的后端适合该设备时即被使用',
        dict(cpu='named', xla='named', gcu='named'),
    ),
    4: Row(
        'dist/utils.py `_init_dist_mpi`, `_init_dist_slurm`',
        'calls `torch.cuda.set_device`; divides by the number of GPUs',
        '调用 `torch.cuda.set_device`；除以 GPU 数量',
        '`init_device` reads the variables of both launchers',
        '`init_device` 读取这两种启动器的变量',
    ),
    5: Row(
        'dist/utils.py `get_comm_device`',
        "gives host tensors to a vendor's backend that it does not know",
        '把主机张量交给它不认识的厂商后端',
        'gives host tensors to gloo',
        '把主机张量交给 gloo',
        dict(cpu='named', xla='named', gcu='named', **NAMED),
    ),
    6: Row(
        'dist/dist.py object collectives',
        'the same, for pickled objects',
        '同上，针对序列化对象',
        'sends objects over gloo',
        '对象经 gloo 传输',
        dict(cpu='named', xla='named', gcu='named', **NAMED),
    ),
    7: Row(
        'runner/runner.py `wrap_model`',
        'leaves the model on the CPU',
        '模型留在 CPU 上',
        'moves it to the device of the rank',
        '模型移到本 rank 的设备上',
        _on_cpu(**NAMED),
    ),
    8: Row(
        'runner/runner.py `wrap_model`',
        'gives `device_ids` to DDP, which refuses them',
        '把 `device_ids` 传给 DDP，被其拒绝',
        'gives no `device_ids` where DDP takes none',
        'DDP 不接受时不传 `device_ids`',
        NAMED,
    ),
    9: Row(
        'runner/runner.py `_init_model_weights`',
        'one broadcast and execution for each tensor',
        '每个张量各广播、执行一次',
        'broadcasts a few packed tensors; `initial_weights` chooses where weights are made',
        '合并后广播；`initial_weights` 选择在何处生成权重',
    ),
    10: Row(
        'runner/runner.py `resume`',
        'loads to the CPU',
        '加载到 CPU',
        'puts parameters and optimizer state on the device',
        '参数与优化器状态位于设备上',
        _on_cpu(**NAMED),
    ),
    11: Row(
        'runner/checkpoint.py, utils/dl_utils/hub.py',
        'cannot resume from its own checkpoints on torch 2.6 or later; runs code from downloads',
        '在 torch 2.6 及以上无法从自己的检查点恢复；会执行所下载文件中的代码',
        'resumes, and runs no code from files',
        '可恢复，且不执行文件中的代码',
    ),
    13: Row(
        'model/wrappers/seperate_distributed.py',
        'moves each child to the CPU, and fails on an NPU',
        '把每个子模块移到 CPU，在 NPU 上失败',
        'uses `DeviceSeparateDistributedDataParallel`',
        '使用 `DeviceSeparateDistributedDataParallel`',
        _on_cpu(),
    ),
    14: Row(
        'model/base_model/data_preprocessor.py, base_model.py',
        "needs CUDA for `.cuda`; after a vendor's own method batches stay on the CPU",
        '`.cuda` 需要 CUDA；使用厂商自己的方法后，批次留在 CPU',
        'tells every preprocessor its device; nothing calls `.cuda`',
        '每个预处理器都获知设备；不调用 `.cuda`',
        NAMED,
    ),
    15: Row(
        'runner/amp.py, optim/optimizer/amp_optimizer_wrapper.py',
        'refuses mixed precision',
        '拒绝混合精度',
        'uses mixed precision of the device',
        '使用设备的混合精度',
        NAMED,
    ),
    16: Row(
        'hooks/empty_cache_hook.py',
        'does nothing',
        '什么也不做',
        'empties the cache of the device',
        '清空设备缓存',
        dict(cpu='none', xla='none', gcu='none'),
    ),
    17: Row(
        'runner/log_processor.py',
        'no memory in the log line',
        '日志行中没有内存',
        'memory of the device in each line',
        '每行都有设备内存',
        dict(cpu='none', xla='none', gcu='none'),
    ),
    18: Row(
        'runner/utils.py `set_random_seed`',
        "does not seed the device's generator",
        '不设置设备生成器的种子',
        'seeds it',
        '设置种子',
        dict(cpu='served', zeta='served', gcu='none', **NAMED),
    ),
    19: Row(
        'logging/logger.py',
        'names the log of a rank after its local rank',
        '以 local rank 命名各 rank 的日志',
        "reads the accelerator's visible-devices variable",
        '读取该加速卡的可见设备变量',
        dict(cpu='served', xla='none'),
    ),
    20: Row(
        'hooks/iter_timer_hook.py',
        'measures the queueing alone',
        '只计时排队',
        'waits for the device',
        '等待设备',
        _on_cpu('none'),
    ),
    21: Row(
        'utils/dl_utils/collect_env.py',
        'does not name the accelerator',
        '不列出加速卡',
        'logs each device, the package and the variable',
        '日志列出每个设备、厂商包与可见设备变量',
        _on_cpu('none'),
    ),
    22: Row(
        'structures/instance_data.py',
        'refuses masks and indices on the device',
        '拒绝设备上的掩码与索引',
        'takes them on any device',
        '接受任何设备上的掩码与索引',
        _on_cpu(**NAMED),
    ),
    23: Row(
        'hooks/profiler_hook.py',
        'records the host alone',
        '只记录主机',
        'records the device, torch_xla into `device_trace`',
        '记录设备，torch_xla 写入 `device_trace`',
        dict(cpu='served', gcu='none'),
    ),
    24: Row(
        '`torch.nn.SyncBatchNorm`',
        'fails over gloo',
        '经 gloo 同步时失败',
        'computes the same statistics on all ranks',
        '所有 rank 统计量相同',
        NAMED,
    ),
    25: Row(
        'infer/infer.py, model/test_time_aug.py',
        'computes on the CPU; one execution for each sample',
        '在 CPU 上计算；每个样本执行一次',
        'computes on the device; one execution for each view',
        '在设备上计算；每个视图执行一次',
        _on_cpu(**NAMED),
    ),
    26: Row(
        'hooks/runtime_info_hook.py',
        'one execution for each loss',
        '每个损失执行一次',
        'one execution for all losses',
        '所有损失执行一次',
        dict(cpu='none', zeta='none', npu='none'),
    ),
}

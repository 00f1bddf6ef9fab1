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
        'says the device type of the accelerator in use, also where it was imported before',
        '返回所用加速卡的设备类型，之前已导入该函数的模块也一样',
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
        "takes `hccl` on a device named `npu`, whatever the config's backend is",
        '设备名为 `npu` 时一律使用 `hccl`，忽略配置的后端',
        "the config's backend is used where it suits the device",
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
        'asks the process group where it takes tensors; gloo takes the host tensors beside such a '
        'backend',
        '询问进程组接收哪里的张量；此类后端旁由 gloo 处理主机张量',
        dict(cpu='named', xla='named', gcu='named', **NAMED),
    ),
    6: Row(
        'dist/dist.py object collectives',
        'the same, for pickled objects',
        '同上，针对序列化对象',
        'the same: objects travel over gloo',
        '同上：对象经 gloo 传输',
        dict(cpu='named', xla='named', gcu='named', **NAMED),
    ),
    7: Row(
        'runner/runner.py `wrap_model`',
        'leaves the model on the CPU',
        '模型留在 CPU 上',
        'the model is on the device of its rank',
        '模型位于本 rank 的设备上',
        _on_cpu(**NAMED),
    ),
    8: Row(
        'runner/runner.py `wrap_model`',
        'gives `device_ids` to DDP, which refuses them',
        '把 `device_ids` 传给 DDP，被其拒绝',
        'no `device_ids` where DDP takes none; the job trains',
        'DDP 不接受时不传 `device_ids`；作业可训练',
        NAMED,
    ),
    9: Row(
        'runner/runner.py `_init_model_weights`',
        'one broadcast for each tensor, and one execution on a lazy device',
        '每个张量一次广播，在惰性设备上各执行一次',
        'initializes where `initial_weights` says (on the device with CUDA, on the host elsewhere)'
        ' and broadcasts a few packed tensors',
        '在 `initial_weights` 指定处初始化（CUDA 上在设备上，其他设备在主机上），合并后广播',
    ),
    10: Row(
        'runner/runner.py `resume`',
        "loads to what `get_device` says: the CPU, beside the model's device",
        '加载到 `get_device` 所说的位置：CPU，而非模型所在设备',
        'reads to the host; parameters and optimizer state end on the device',
        '读入主机；参数与优化器状态最终位于设备上',
        _on_cpu(**NAMED),
    ),
    11: Row(
        'runner/checkpoint.py, utils/dl_utils/hub.py',
        'cannot resume from its own checkpoints on torch 2.6 or later; runs code from a file that '
        'it downloads',
        '在 torch 2.6 及以上无法从自己的检查点恢复；会执行所下载文件中的代码',
        'resumes, and runs no code from files; also in `mmengine.runner.load_checkpoint`',
        '可恢复，且不执行文件中的代码；`mmengine.runner.load_checkpoint` 也一样',
    ),
    13: Row(
        'model/wrappers/seperate_distributed.py',
        'moves each child to what `get_device` says: the CPU; on NPU it asks torch_npu for a name '
        'that it no longer has, and fails',
        '把每个子模块移到 `get_device` 所说的位置：CPU；'
        '在 NPU 上查询 torch_npu 已不再提供的名称而失败',
        '`DeviceSeparateDistributedDataParallel` in its place',
        '以 `DeviceSeparateDistributedDataParallel` 代替',
        _on_cpu(),
    ),
    14: Row(
        'model/base_model/data_preprocessor.py, base_model.py',
        '`.cuda` needs CUDA; where a vendor adds a method of its own to move models, the data '
        'preprocessor does not notice, and batches stay on the CPU',
        '`.cuda` 需要 CUDA；用厂商自己的方法移动模型时，数据预处理器并不知道，批次留在 CPU',
        'every preprocessor is told of the device, wherever it is; nothing calls `.cuda`',
        '无论位于何处，每个预处理器都获知设备；不调用 `.cuda`',
        NAMED,
    ),
    15: Row(
        'runner/amp.py, optim/optimizer/amp_optimizer_wrapper.py',
        'refuses mixed precision',
        '拒绝混合精度',
        'mixed precision of the device',
        '使用设备的混合精度',
        NAMED,
    ),
    16: Row(
        'hooks/empty_cache_hook.py',
        'does nothing',
        '什么也不做',
        'empties the cache of the device, when its options say',
        '按其选项清空设备缓存',
        dict(cpu='none', xla='none', gcu='none'),
    ),
    17: Row(
        'runner/log_processor.py',
        'no memory in the log line',
        '日志行中没有内存',
        'memory of the device in each line, where the vendor tells',
        '厂商提供时，每行都有设备内存',
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
        "the accelerator's own visible-devices variable decides",
        '由该加速卡自己的可见设备变量决定',
        dict(cpu='served', xla='none'),
    ),
    20: Row(
        'hooks/iter_timer_hook.py',
        'never waits for the device, and times the queueing',
        '从不等待设备，只计时排队',
        'waits before a time is written',
        '写出时间前等待',
        _on_cpu('none'),
    ),
    21: Row(
        'utils/dl_utils/collect_env.py',
        'does not name the accelerator',
        '不列出加速卡',
        'the report at the start of the log names each device, the package and the variable',
        '日志开头的报告列出每个设备、厂商包与可见设备变量',
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
        'records the host alone, with `activity_with_cuda=True` too',
        '即使 `activity_with_cuda=True` 也只记录主机',
        "records the device by PyTorch's profiler, or by torch_xla's into `device_trace`",
        '用 PyTorch 的分析器，或用 torch_xla 的分析器写入 `device_trace` 来记录设备',
        dict(cpu='served', gcu='none'),
    ),
    24: Row(
        '`torch.nn.SyncBatchNorm`',
        'fails where it is synchronized over gloo',
        '经 gloo 同步时失败',
        'layers of ours, the same statistics on all ranks',
        '使用我们的层，所有 rank 统计量相同',
        NAMED,
    ),
    25: Row(
        'infer/infer.py, model/test_time_aug.py',
        'computes on the CPU; one execution for each sample that is read',
        '在 CPU 上计算；每读取一个样本执行一次',
        'inferencers, `mmdevplug test` and `--tta` on the device; one execution for each view',
        '推理器、`mmdevplug test` 与 `--tta` 在设备上运行；每个视图执行一次',
        _on_cpu(**NAMED),
    ),
    26: Row(
        'hooks/runtime_info_hook.py',
        'reads each loss by itself, each an execution on a lazy device',
        '逐个读取损失，在惰性设备上各执行一次',
        'one execution before any is read',
        '读取前统一执行一次',
        dict(cpu='none', zeta='none', npu='none'),
    ),
}

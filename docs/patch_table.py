"""List every symbol of another package that is replaced, and write ``patches.md`` of it."""

from typing import Any, Dict, List, NamedTuple

from tables import table, write_pages

#: Periods in which patches are active.
JOB = 'job'
LOG_FILES = 'log files'
SEGMENTS = 'segments'
MODEL = 'model'
LAZY_MODEL = 'lazy model'
AUTOCAST = 'autocast'
VIDEOS = 'videos'
PROCESS_GROUP = 'process group'
MMCV_OPS = 'mmcv ops'
LOADING = 'loading'
GUARD = 'guard'
AUTOPATCH = 'autopatch'
WORKER = 'worker'
COMMAND = 'command'


class PatchedSymbol(NamedTuple):
    """A symbol of another package that is replaced for a while."""

    owner: str  #: Full name of the module, the class, or the function whose closure holds it.
    name: str  #: Its name there; ``'*'`` for every public function.
    period: str  #: When the patch is active.

    def __str__(self) -> str:
        return f'{self.owner}.{self.name}'


#: By period, the symbols of an owner as ``'owner: name name'``.
_LISTED = {
    JOB: (
        'mmengine.device.utils: DEVICE',
        'mmengine.device.utils: IS_NPU_AVAILABLE',
        'mmengine.dist.dist: collect_results_cpu _collect_results_device',
        'torch.distributed: broadcast_object_list',
        'mmengine.dist.dist: _broadcast_object_list',
        'mmengine.runner.checkpoint: load_state_dict',
        'mmengine.structures.instance_data: BoolTypeTensor IndexType',
        'mmengine.infer.infer.BaseInferencer: _init_model',
        'mmengine.model.averaged_model.BaseAveragedModel: update_parameters',
        'torch.Tensor: cuda is_cuda',
        'torch.Tensor: type',
        'torch.amp.autocast_mode.autocast: __init__ __enter__',
        'torch.amp.autocast_mode: torch _cast',
        'torch: histc',
        'torch.Tensor: histc',
        'torch: index_select mean sum var std amax amin cumsum count_nonzero clamp clip reshape '
        'flatten norm arange where pixel_shuffle',
        'torch.Tensor: index_select mean sum var std amax amin cumsum count_nonzero clamp clip '
        'reshape flatten contiguous reshape_as where',
        'torch.nn.functional: elu selu celu adaptive_avg_pool2d avg_pool2d avg_pool3d l1_loss '
        'mse_loss interpolate batch_norm pixel_shuffle cross_entropy nll_loss embedding linear '
        'conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d',
    ),
    LOG_FILES: ('mmengine.logging.logger: _get_device_id',),
    SEGMENTS: ('torch.utils.checkpoint.DefaultDeviceType: _default_device_type',),
    MODEL: (
        'mmagic.models.utils.model_utils: get_module_device',
        'mmgen.models.architectures.common: get_module_device',
        'mmrazor.models.utils.utils: get_module_device',
        'mmseg.models.losses.focal_loss.FocalLoss: forward',
    ),
    LAZY_MODEL: ('mmseg.models.losses.accuracy: accuracy', 'torch: _shape_as_tensor'),
    AUTOCAST: ('mmengine.runner.amp.autocast: __code__',),
    VIDEOS: ('mmdet.evaluation.metrics.base_video_metric: collect_tracking_results_cpu',),
    PROCESS_GROUP: ('torch.distributed: barrier',),
    MMCV_OPS: ('mmcv._ext: *',),
    LOADING: ('torch: load',),
    GUARD: ('torch.autograd.function.BackwardCFunction: apply',),
    AUTOPATCH: (
        'mmengine.runner.runner.Runner: __new__ from_cfg',
        'mmengine.dist.utils: _init_dist_mpi _init_dist_pytorch _init_dist_slurm',
        'mmengine.runner._flexible_runner.FlexibleRunner: from_cfg',
    ),
    WORKER: ('torch.utils.data._utils.fetch._MapDatasetFetcher: fetch',),
    COMMAND: ('torch.distributed.elastic.multiprocessing.api.MultiprocessContext: _start',),
}
PATCHED_SYMBOLS: List[PatchedSymbol] = []
for _period, _listed in _LISTED.items():
    for _owner_and_names in _listed:
        _owner, _, _names = _owner_and_names.partition(': ')
        for _name in _names.split():
            PATCHED_SYMBOLS.append(PatchedSymbol(_owner, _name, _period))

SCRIPT = """```python
from mmdevplug.patches.barrier import restore_barrier
from mmdevplug.patches.mmcv_ops import restore_mmcv_ops
from mmdevplug.patches.mmengine import restore_mmengine
from mmdevplug.utils.patching import active_patches

print(list(map(str, active_patches())))
for restore in (restore_mmengine, restore_barrier, restore_mmcv_ops):
    restore()
```"""

#: Periods in English: the beginning and the end.
PERIODS_EN = {
    JOB: ('a runner starts, or `patch_mmengine()`', '`restore_mmengine()`'),
    LOG_FILES: ('our runner is looked up, or `init_device()`', '`restore_mmengine()`'),
    SEGMENTS: (
        '`init_device()` on a device that is neither CUDA nor the CPU',
        '`restore_mmengine()`',
    ),
    MODEL: ('a model is moved to a device that is not CUDA', '`restore_mmengine()`'),
    LAZY_MODEL: ('a model is moved to a lazy device', '`restore_mmengine()`'),
    AUTOCAST: (
        '`patch_mmengine()` or `DeviceAmpOptimWrapper`, if MMEngine does not know mixed precision'
        ' on the device; or a runner compiles its model',
        '`restore_mmengine()`',
    ),
    VIDEOS: ('a run of several ranks begins that has imported mmdet', '`restore_mmengine()`'),
    PROCESS_GROUP: ('`init_device()`, where PyTorch finds no accelerator', '`restore_barrier()`'),
    MMCV_OPS: ('`init_device()`', '`restore_mmcv_ops()`'),
    LOADING: ('a checkpoint begins to load, or `init_weights()` begins', 'its end'),
    GUARD: ('a `DeviceGuard` that moves operands is entered', 'its exit'),
    AUTOPATCH: (
        'a base config of ours is read in a script, or `mmdevplug.autopatch` is imported',
        'the end of the process',
    ),
    WORKER: (
        'a worker process of a data loader starts, with PyTorch before 1.13',
        'the end of the worker process',
    ),
    COMMAND: ('`mmdevplug train --nproc` or `test --nproc` starts its ranks', 'their end'),
}

#: Periods in Chinese: the beginning and the end.
PERIODS = {
    LOG_FILES: ('查找我们的 runner，或调用 `init_device()`', '`restore_mmengine()`'),
    SEGMENTS: ('在非 CUDA、非 CPU 的设备上调用 `init_device()`', '`restore_mmengine()`'),
    JOB: ('runner 启动，或调用 `patch_mmengine()`', '`restore_mmengine()`'),
    MODEL: ('模型移动到非 CUDA 的设备', '`restore_mmengine()`'),
    LAZY_MODEL: ('模型移动到惰性设备', '`restore_mmengine()`'),
    AUTOCAST: (
        '`patch_mmengine()` 或 `DeviceAmpOptimWrapper`，且 MMEngine 不支持该设备的混合精度；'
        '或 runner 编译模型',
        '`restore_mmengine()`',
    ),
    VIDEOS: ('已导入 mmdet 的多 rank 运行开始', '`restore_mmengine()`'),
    PROCESS_GROUP: ('`init_device()`，且 PyTorch 找不到加速器', '`restore_barrier()`'),
    MMCV_OPS: ('`init_device()`', '`restore_mmcv_ops()`'),
    LOADING: ('开始加载检查点，或 `init_weights()` 开始', '该操作结束'),
    GUARD: ('进入会移动操作数的 `DeviceGuard`', '退出时'),
    AUTOPATCH: ('脚本读取我们的基础配置，或导入 `mmdevplug.autopatch`', '进程结束'),
    WORKER: ('PyTorch 早于 1.13 时，数据加载器的工作进程启动', '工作进程结束'),
    COMMAND: ('`mmdevplug train --nproc` 或 `test --nproc` 启动其 rank', '这些 rank 结束'),
}


_LAYERS_WITH_BIAS = [
    'torch.nn.functional.linear',
    *(f'torch.nn.functional.conv{dims}d' for dims in (1, 2, 3)),
    *(f'torch.nn.functional.conv_transpose{dims}d' for dims in (1, 2, 3)),
]


def _both(names: str) -> List[str]:
    """Functions that are methods, too."""
    return [f'{owner}.{name}' for name in names.split() for owner in ('torch', 'torch.Tensor')]


#: Replaced on torch_xla, each for the reason that its page gives.
OTHERWISE = [
    *_both('amax amin cumsum count_nonzero clamp clip reshape flatten where'),
    'torch.Tensor.contiguous',
    'torch.Tensor.reshape_as',
    'torch.norm',
    'torch.arange',
    'torch.pixel_shuffle',
    'torch.nn.functional.pixel_shuffle',
    'torch.nn.functional.interpolate',
    'torch.nn.functional.batch_norm',
    'torch.nn.functional.cross_entropy',
    'torch.nn.functional.nll_loss',
    'torch.nn.functional.embedding',
]

#: Symbols that share a reason, by a short name of it.
ADDS_UP = [
    *_both('mean sum var std'),
    'torch.nn.functional.adaptive_avg_pool2d',
    'torch.nn.functional.avg_pool2d',
    'torch.nn.functional.avg_pool3d',
    'torch.nn.functional.l1_loss',
    'torch.nn.functional.mse_loss',
]
MODULE_DEVICE = [
    'mmagic.models.utils.model_utils.get_module_device',
    'mmgen.models.architectures.common.get_module_device',
    'mmrazor.models.utils.utils.get_module_device',
]
ELU = [f'torch.nn.functional.{name}' for name in ('elu', 'selu', 'celu')]
CUSTOM_FWD = ['torch.amp.autocast_mode.torch', 'torch.amp.autocast_mode._cast']

#: Reason and condition in English, by the first symbol of a row. Equal reasons make one row.
REASONS_EN = {
    'mmengine.device.utils.DEVICE': (
        '`get_device()` returns this constant, which covers only the devices MMEngine lists.',
        'MMEngine asks `torch.accelerator` or a registry.',
    ),
    'mmengine.device.utils.IS_NPU_AVAILABLE': (
        'MMEngine reads an error of `torch.npu.set_compile_mode` as "no NPU".',
        'MMEngine asks `torch.npu.is_available()` alone.',
    ),
    'mmengine.logging.logger._get_device_id': (
        'It names log files after variables of CUDA and MUSA, and fails if ranks share a GPU.',
        'MMEngine names log files after the rank.',
    ),
    'torch.utils.checkpoint.DefaultDeviceType._default_device_type': (
        'Segments computed again get random numbers of CUDA (PyTorch 2.1 to 2.5), and no '
        'autocast if no argument is a tensor.',
        'PyTorch asks for the device of the segment.',
    ),
    'mmengine.dist.dist.collect_results_cpu': (
        'Metrics gather results through a shared folder, or gather all results on every rank.',
        'MMEngine sends results to rank 0 in pieces.',
    ),
    'torch.distributed.broadcast_object_list': (
        'Ranks that wait for a metric of rank 0 run into the timeout of collectives.',
        'MMEngine computes metrics outside of collectives.',
    ),
    'mmengine.dist.dist._broadcast_object_list': (
        'The same, on an NPU.',
        'MMEngine computes metrics outside of collectives.',
    ),
    'mmdet.evaluation.metrics.base_video_metric.collect_tracking_results_cpu': (
        'Metrics of videos gather results through a shared folder.',
        "mmdet calls MMEngine's function.",
    ),
    'mmengine.runner.checkpoint.load_state_dict': (
        'It accepts a checkpoint of another model and continues with random weights.',
        'MMEngine refuses a checkpoint of another model.',
    ),
    'mmengine.structures.instance_data.BoolTypeTensor': (
        '`InstanceData` takes indices on the CPU, CUDA, NPU, MLU and MUSA alone.',
        'MMEngine checks the dtype of an index.',
    ),
    'mmengine.infer.infer.BaseInferencer._init_model': (
        'Inferencers keep synchronized batch norm, and compile a graph for each sample.',
        'MMEngine lets an accelerator prepare the model.',
    ),
    'mmengine.model.averaged_model.BaseAveragedModel.update_parameters': (
        'On torch_xla, averaged weights share buffers with the weights, and updates delete them.',
        'torch_xla copies into new buffers.',
    ),
    'torch.Tensor.cuda': (
        'Models, losses and metrics call `.cuda()`, and mean the device of this process.',
        'Model repositories ask a tensor for its device.',
    ),
    **dict.fromkeys(
        CUSTOM_FWD,
        (
            '`torch.cuda.amp.custom_fwd(cast_inputs=torch.float32)` has no effect on other '
            'devices, from PyTorch 2.4 on.',
            'Models use `torch.amp.custom_fwd`.',
        ),
    ),
    'torch.amp.autocast_mode.autocast.__enter__': (
        'The same, for methods decorated before the job starts.',
        'Model repositories call `mmengine.runner.autocast`.',
    ),
    'torch.amp.autocast_mode.autocast.__init__': (
        '`torch.cuda.amp.autocast(enabled=False)` does not turn autocast off on other devices.',
        'Model repositories call `mmengine.runner.autocast`.',
    ),
    'torch.Tensor.type': (
        'It knows no type of a T20 (PyTorch 1.10) or of torch_xla, and no '
        '`torch.cuda.FloatTensor` without CUDA.',
        'Packages register the names of their types.',
    ),
    **dict.fromkeys(
        OTHERWISE,
        (
            'torch_xla 2.9 computes '
            '[other values](torch_xla.md#what-torch_xla-computes-otherwise) than the CPU.',
            'torch_xla computes the values of the CPU.',
        ),
    ),
    **dict.fromkeys(
        ELU,
        (
            "torch_xla 2.9's gradient of negative inputs is 1 + x, not exp(x).",
            'torch_xla computes the values of the CPU.',
        ),
    ),
    **dict.fromkeys(
        _LAYERS_WITH_BIAS,
        (
            'torch_xla 2.9 sums gradients of a bias in bfloat16: over 64 × 64 pixels they are '
            'less than a tenth of the right value.',
            "XLA's compiler for the CPU sums in float32.",
        ),
    ),
    **dict.fromkeys(
        ADDS_UP,
        (
            'torch_xla 2.9 sums bfloat16 in bfloat16: means and sums of 28 × 28 elements and '
            'more are up to a third too small.',
            "XLA's compiler for the CPU sums in float32.",
        ),
    ),
    **dict.fromkeys(
        _both('histc'),
        (
            'In float32 a bin stops at 16,777,216, on the CPU for each of its threads: metrics of '
            'mmseg and mmdet count fewer pixels than a large image has.',
            'PyTorch counts in whole numbers.',
        ),
    ),
    **dict.fromkeys(
        _both('index_select'),
        (
            'torch_xla 2.9 aborts the process if `sort` or `topk` returned the indices.',
            'torch_xla reads the shape of one of several outputs.',
        ),
    ),
    **dict.fromkeys(
        MODULE_DEVICE,
        (
            'It returns the CPU for modules on any device but CUDA.',
            'It returns the device of the first parameter.',
        ),
    ),
    'mmengine.runner.amp.autocast.__code__': (
        'It refuses devices that MMEngine does not list, or casts for the CPU.',
        'MMEngine passes the device type on to `torch.autocast`.',
    ),
    'mmseg.models.losses.focal_loss.FocalLoss.forward': (
        'On any device but CUDA it fails for labels: it takes one column of their one-hot code.',
        'mmseg takes all columns, `target[:, :num_classes]`.',
    ),
    'mmseg.models.losses.accuracy.accuracy': (
        'Indexing with a mask makes a lazy device compile every iteration.',
        'mmseg multiplies with the mask.',
    ),
    'torch._shape_as_tensor': (
        'Deformable attention sends sizes to the device and reads each of them back.',
        'mmcv and mmdet read sizes from `Tensor.shape`.',
    ),
    'torch.distributed.barrier': (
        'It fails if the vendor registers no `PrivateUse1HooksInterface`.',
        'The vendor registers one.',
    ),
    'mmcv._ext.*': (
        'mmcv has no kernel for the device; on the CPU it takes no half precision. It runs on '
        'the host in float32.',
        'mmcv has kernels for the device and the precision.',
    ),
    'torch.load': (
        'Other code calls it without the classes of a checkpoint of MMEngine, or with '
        '`weights_only=False`.',
        'MMEngine loads with `weights_only=True`.',
    ),
    'torch.autograd.function.BackwardCFunction.apply': (
        'Autograd refuses gradients of custom functions on another device than their operand.',
        'PyTorch offers a hook on these gradients.',
    ),
    'mmengine.runner.runner.Runner.__new__': (
        'Scripts that call `Runner.from_cfg` or `Runner(...)`, and runners of repositories, '
        'ignore `runner_type` and `accelerator`.',
        '`Runner.from_cfg` reads `runner_type`.',
    ),
    'mmengine.dist.utils._init_dist_mpi': (
        'A script that calls `init_dist` fails where there is no CUDA.',
        'MMEngine starts process groups on any device.',
    ),
    'mmengine.runner._flexible_runner.FlexibleRunner.from_cfg': (
        'It ignores the key `accelerator`.',
        'MMEngine has removed `FlexibleRunner`.',
    ),
    'torch.distributed.elastic.multiprocessing.api.MultiprocessContext._start': (
        'Each rank gets the result queues of all others, so more than about 120 ranks '
        'cannot start.',
        'PyTorch sends each rank its own queue.',
    ),
    'torch.utils.data._utils.fetch._MapDatasetFetcher.fetch': (
        'PyTorch before 1.13 does not call `__getitems__`, which sets the seed of a batch.',
        'PyTorch 1.13.',
    ),
}

#: Reason and condition in Chinese, by the first symbol of a row.
REASONS = {
    'mmengine.device.utils.DEVICE': (
        '`get_device()` 返回此常量，它只包括 MMEngine 列出的设备。',
        'MMEngine 询问 `torch.accelerator` 或注册表。',
    ),
    'mmengine.device.utils.IS_NPU_AVAILABLE': (
        'MMEngine 把 `torch.npu.set_compile_mode` 的报错当作没有 NPU。',
        'MMEngine 只询问 `torch.npu.is_available()`。',
    ),
    'mmengine.logging.logger._get_device_id': (
        '它按 CUDA 和 MUSA 的变量命名日志文件；多个 rank 共用一块 GPU 时会报错。',
        'MMEngine 按 rank 命名日志文件。',
    ),
    'torch.utils.checkpoint.DefaultDeviceType._default_device_type': (
        '重新计算的片段使用 CUDA 的随机数（PyTorch 2.1 至 2.5）；'
        '片段的参数中没有张量时，不使用 autocast。',
        'PyTorch 查询片段所在的设备。',
    ),
    'mmengine.dist.dist.collect_results_cpu': (
        '指标通过共享文件夹收集结果，或在每个 rank 上收集所有结果。',
        'MMEngine 把结果分块发送到 rank 0。',
    ),
    'torch.distributed.broadcast_object_list': (
        '等待 rank 0 计算指标的 rank 会在集合通信超时后放弃。',
        'MMEngine 在集合通信之外计算指标。',
    ),
    'mmengine.dist.dist._broadcast_object_list': (
        '同上，用于 NPU。',
        'MMEngine 在集合通信之外计算指标。',
    ),
    'mmdet.evaluation.metrics.base_video_metric.collect_tracking_results_cpu': (
        '视频指标通过共享文件夹收集结果。',
        'mmdet 调用 MMEngine 的函数。',
    ),
    'mmengine.runner.checkpoint.load_state_dict': (
        '它接受其他模型的检查点，并以随机权重继续。',
        'MMEngine 拒绝其他模型的检查点。',
    ),
    'mmengine.structures.instance_data.BoolTypeTensor': (
        '`InstanceData` 只接受 CPU、CUDA、NPU、MLU 和 MUSA 上的索引。',
        'MMEngine 检查索引的 dtype。',
    ),
    'mmengine.infer.infer.BaseInferencer._init_model': (
        '推理器保留同步批归一化，并为每个样本编译一张计算图。',
        'MMEngine 让加速器准备模型。',
    ),
    'mmengine.model.averaged_model.BaseAveragedModel.update_parameters': (
        '在 torch_xla 上，平均权重与权重共用缓冲区，更新时缓冲区被删除。',
        'torch_xla 复制到新的缓冲区。',
    ),
    'torch.Tensor.cuda': (
        '模型、损失和指标会调用 `.cuda()`，指的是本进程的设备。',
        '模型库向张量询问其设备。',
    ),
    **dict.fromkeys(
        CUSTOM_FWD,
        (
            '自 PyTorch 2.4 起，`torch.cuda.amp.custom_fwd(cast_inputs=torch.float32)` '
            '在其他设备上不起作用。',
            '模型使用 `torch.amp.custom_fwd`。',
        ),
    ),
    'torch.amp.autocast_mode.autocast.__enter__': (
        '同上，用于作业启动之前就已装饰的方法。',
        '模型库调用 `mmengine.runner.autocast`。',
    ),
    'torch.amp.autocast_mode.autocast.__init__': (
        '`torch.cuda.amp.autocast(enabled=False)` 在其他设备上不能关闭 autocast。',
        '模型库调用 `mmengine.runner.autocast`。',
    ),
    'torch.Tensor.type': (
        '它不认识 T20（PyTorch 1.10）和 torch_xla 的类型；没有 CUDA 时也不认识 '
        '`torch.cuda.FloatTensor`。',
        '各个包注册其类型的名字。',
    ),
    **dict.fromkeys(
        OTHERWISE,
        (
            'torch_xla 2.9 的[结果与 CPU 不同](torch_xla.md#torch_xla-计算结果不同之处)。',
            'torch_xla 的结果与 CPU 相同。',
        ),
    ),
    **dict.fromkeys(
        ELU,
        (
            'torch_xla 2.9 对负数输入的梯度为 1 + x，而不是 exp(x)。',
            'torch_xla 的结果与 CPU 相同。',
        ),
    ),
    **dict.fromkeys(
        _LAYERS_WITH_BIAS,
        (
            'torch_xla 2.9 用 bfloat16 累加偏置的梯度：对 64 × 64 个像素，'
            '结果不到应有值的十分之一。',
            'XLA 的 CPU 编译器用 float32 累加。',
        ),
    ),
    **dict.fromkeys(
        ADDS_UP,
        (
            'torch_xla 2.9 用 bfloat16 累加 bfloat16：28 × 28 及更多元素的均值与总和'
            '最多偏小三分之一。',
            'XLA 的 CPU 编译器用 float32 累加。',
        ),
    ),
    **dict.fromkeys(
        _both('histc'),
        (
            '使用 float32 时，一个区间数到 16,777,216 就不再增加（CPU 上每个线程各自如此）：'
            'mmseg 和 mmdet 的指标在大图上会少数像素。',
            'PyTorch 用整数计数。',
        ),
    ),
    **dict.fromkeys(
        _both('index_select'),
        (
            '若索引是 `sort` 或 `topk` 的返回值，torch_xla 2.9 会使进程退出。',
            'torch_xla 能读取算子多个输出之一的形状。',
        ),
    ),
    **dict.fromkeys(
        MODULE_DEVICE, ('对任何非 CUDA 设备上的模块，它都返回 CPU。', '它返回第一个参数的设备。')
    ),
    'mmengine.runner.amp.autocast.__code__': (
        '它拒绝 MMEngine 未列出的设备，或转而在 CPU 上转换精度。',
        'MMEngine 将设备类型传给 `torch.autocast`。',
    ),
    'mmseg.models.losses.focal_loss.FocalLoss.forward': (
        '在 CUDA 以外的任何设备上，标签会使它报错：它只取了 one-hot 编码的一列。',
        'mmseg 取所有列，即 `target[:, :num_classes]`。',
    ),
    'mmseg.models.losses.accuracy.accuracy': (
        '用掩码作索引使惰性设备每次迭代都要编译。',
        'mmseg 改为与掩码相乘。',
    ),
    'torch._shape_as_tensor': (
        '可变形注意力把尺寸发送到设备，再逐个读回。',
        'mmcv 和 mmdet 从 `Tensor.shape` 读取尺寸。',
    ),
    'torch.distributed.barrier': (
        '厂商未注册 `PrivateUse1HooksInterface` 时它会失败。',
        '厂商注册了该接口。',
    ),
    'mmcv._ext.*': (
        'mmcv 没有该设备的算子，其 CPU 算子也不接受半精度。替换后在主机上以 float32 运行。',
        'mmcv 有该设备和该精度的算子。',
    ),
    'torch.load': (
        '其他代码调用它时缺少 MMEngine 检查点所需的类，或使用 `weights_only=False`。',
        'MMEngine 以 `weights_only=True` 加载。',
    ),
    'torch.autograd.function.BackwardCFunction.apply': (
        '自定义函数返回的梯度若与操作数不在同一设备，autograd 会拒绝。',
        'PyTorch 为这些梯度提供钩子。',
    ),
    'mmengine.runner.runner.Runner.__new__': (
        '调用 `Runner.from_cfg` 或 `Runner(...)` 的脚本以及代码库自己的 runner '
        '忽略 `runner_type` 和 `accelerator`。',
        '`Runner.from_cfg` 读取 `runner_type`。',
    ),
    'mmengine.dist.utils._init_dist_mpi': (
        '调用 `init_dist` 的脚本在没有 CUDA 时失败。',
        'MMEngine 能在任何设备上启动进程组。',
    ),
    'mmengine.runner._flexible_runner.FlexibleRunner.from_cfg': (
        '它忽略 `accelerator` 键。',
        'MMEngine 移除 `FlexibleRunner`。',
    ),
    'torch.distributed.elastic.multiprocessing.api.MultiprocessContext._start': (
        '每个 rank 都收到其他所有 rank 的结果队列，超过约 120 个 rank 则无法启动。',
        'PyTorch 只向每个 rank 发送它自己的队列。',
    ),
    'torch.utils.data._utils.fetch._MapDatasetFetcher.fetch': (
        'PyTorch 1.13 之前不调用 `__getitems__`，而批的随机种子在其中设置。',
        'PyTorch 1.13。',
    ),
}

LANGUAGES: Dict[str, Dict[str, Any]] = dict(
    en=dict(
        period=PERIODS_EN.__getitem__,
        reasons=REASONS_EN,
        heading='# Patches of other packages',
        intro="""\
Read this page if another function of PyTorch or MMEngine behaves differently in a job, or before
you update one of these packages. It lists every symbol that mmdevplug replaces, and a test checks
the list. `import mmdevplug` patches nothing; `import mmdevplug.autopatch` does.""",
        when='## When patches are active',
        periods=('#', 'from', 'to'),
        ends="""\
The end of `runner.train()`, `val()` or `test()` restores nothing: inferencers and other loops in
the same process use the same device. A second runner first restores the patches of the first
device. List and restore patches like this:""",
        restore="""\
Restore them after the last use of the runner. If another package has since replaced the same
symbol, its function stays.

`sys.excepthook` and `warnings.showwarning` are not listed: Python lets programs assign them. With
the first, a rank that stops because of another prints one line. With the second, one rank of each
host prints a warning.""",
        which='## Symbols',
        symbols=('symbol', 'active', 'why', 'unnecessary when'),
    ),
    zh_cn=dict(
        period=PERIODS.__getitem__,
        reasons=REASONS,
        heading='# 对其他包的补丁',
        intro="""\
当 PyTorch 或 MMEngine 的函数在作业中行为不同，或您要更新这些包时，请阅读本页。
它列出 mmdevplug 替换的全部符号，并有测试核对此列表。`import mmdevplug` 不打补丁，
`import mmdevplug.autopatch` 会打补丁。""",
        when='## 补丁何时有效',
        periods=('#', '开始', '结束'),
        ends="""\
`runner.train()`、`val()` 或 `test()` 结束时不恢复任何补丁：同一进程中的推理器和其他循环使用同一
设备。第二个 runner 会先恢复前一个设备的补丁。列出并恢复补丁：""",
        restore="""\
请在最后一次使用 runner 之后恢复。若其他包后来替换了同一符号，则保留其函数。

列表不含 `sys.excepthook` 和 `warnings.showwarning`：Python 允许程序给它们赋值。前者使因其他 rank
而停止的 rank 只打印一行；后者使每台主机只有一个 rank 打印同样的警告。""",
        which='## 符号',
        symbols=('符号', '有效期', '原因', '何时不再需要'),
    ),
)


def grouped() -> List[List[PatchedSymbol]]:
    """Group the symbols of each row: one period and one reason."""
    rows: Dict[Any, List[PatchedSymbol]] = {}
    for symbol in PATCHED_SYMBOLS:
        reason = REASONS_EN.get(str(symbol))
        if reason is not None:
            row = rows.setdefault((symbol.period, reason), [])
        row.append(symbol)
    return list(rows.values())


def _by_owner(group: List[PatchedSymbol]) -> str:
    """List the symbols of a row, each owner once."""
    names: Dict[str, List[str]] = {}
    for symbol in group:
        names.setdefault(symbol.owner, []).append(f'`{symbol.name}`')
    return '; '.join(f'`{owner}`: {" ".join(found)}' for owner, found in names.items())


def render(texts: Dict[str, Any]) -> List[str]:
    """The parts of the page in one language."""
    groups = grouped()
    periods = list(dict.fromkeys(group[0].period for group in groups))
    rows = []
    for group in groups:
        reason, until = texts['reasons'][str(group[0])]
        number = str(periods.index(group[0].period) + 1)
        rows.append([_by_owner(group), number, reason, until])
    return [
        texts['heading'],
        texts['intro'],
        texts['when'],
        table(
            texts['periods'],
            [[str(i), *texts['period'](period)] for i, period in enumerate(periods, 1)],
        ),
        texts['ends'],
        SCRIPT,
        texts['restore'],
        texts['which'],
        table(texts['symbols'], rows),
    ]


if __name__ == '__main__':
    write_pages('patches.md', LANGUAGES, render)

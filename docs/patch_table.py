"""List every symbol of another package that is replaced, and write ``patches.md`` of it."""

from typing import Any, Dict, List, NamedTuple

from tables import table, write_pages

#: Periods in which patches are active.
JOB = 'job'
LOG_FILES = 'log files'
MODEL = 'model'
LAZY_MODEL = 'lazy model'
AUTOCAST = 'autocast'
VIDEOS = 'videos'
PROCESS_GROUP = 'process group'
MMCV_OPS = 'mmcv ops'
LOADING = 'loading'
CONFIG = 'config'
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
        'mmengine.structures.instance_data: BoolTypeTensor LongTypeTensor IndexType',
        'mmengine.infer.infer.BaseInferencer: _init_model',
        'mmengine.model.averaged_model.BaseAveragedModel: update_parameters',
        'torch.Tensor: cuda is_cuda',
        'torch.Tensor: type',
        'torch.amp.autocast_mode.autocast: __init__ __enter__',
        'torch.amp.autocast_mode: torch _cast',
        'torch: index_select mean sum var std amax amin cumsum count_nonzero clamp clip reshape '
        'flatten norm arange where pixel_shuffle',
        'torch.Tensor: index_select mean sum var std amax amin cumsum count_nonzero clamp clip '
        'reshape flatten contiguous reshape_as where',
        'torch.nn.functional: elu selu celu adaptive_avg_pool2d avg_pool2d avg_pool3d l1_loss '
        'mse_loss interpolate batch_norm pixel_shuffle linear conv1d conv2d conv3d '
        'conv_transpose1d conv_transpose2d conv_transpose3d',
    ),
    LOG_FILES: ('mmengine.logging.logger: _get_device_id',),
    MODEL: (
        'mmagic.models.utils.model_utils: get_module_device',
        'mmgen.models.architectures.common: get_module_device',
        'mmrazor.models.utils.utils: get_module_device',
    ),
    LAZY_MODEL: ('mmseg.models.losses.accuracy: accuracy', 'torch: _shape_as_tensor'),
    AUTOCAST: ('mmengine.runner.amp.autocast: __code__',),
    VIDEOS: ('mmdet.evaluation.metrics.base_video_metric: collect_tracking_results_cpu',),
    PROCESS_GROUP: ('torch.distributed: barrier',),
    MMCV_OPS: ('mmcv._ext: *',),
    LOADING: ('torch: load',),
    CONFIG: ('mmengine.config.config: is_installed get_installed_path',),
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
    MODEL: ('a model is moved to a device that is not CUDA', '`restore_mmengine()`'),
    LAZY_MODEL: ('a model is moved to a lazy device', '`restore_mmengine()`'),
    AUTOCAST: (
        '`patch_mmengine()` or `DeviceAmpOptimWrapper`, on a device whose mixed precision'
        ' MMEngine does not know; or a runner compiles its model',
        '`restore_mmengine()`',
    ),
    VIDEOS: ('a run of several ranks begins that has imported mmdet', '`restore_mmengine()`'),
    PROCESS_GROUP: ('`init_device()`, where PyTorch finds no accelerator', '`restore_barrier()`'),
    MMCV_OPS: ('`init_device()`', '`restore_mmcv_ops()`'),
    LOADING: ('a checkpoint begins to load, or `init_weights()` begins', 'its end'),
    CONFIG: ('`mmdevplug` begins to read a config, without pkg_resources', 'its end'),
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
    CONFIG: ('没有 pkg_resources 时，`mmdevplug` 开始读取配置', '该操作结束'),
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
]

#: Reason and condition in English, by the first symbol of a row.
REASONS_EN = {
    'mmengine.device.utils.DEVICE': (
        '`get_device()` returns this constant, which is chosen at import from the devices'
        ' that MMEngine lists.',
        'MMEngine asks `torch.accelerator` or a registry.',
    ),
    'mmengine.device.utils.IS_NPU_AVAILABLE': (
        'MMEngine takes an error of `torch.npu.set_compile_mode`, which it calls at '
        'import, for a host without NPUs.',
        'MMEngine asks `torch.npu.is_available()` alone.',
    ),
    'mmengine.logging.logger._get_device_id': (
        'It names the log files of ranks after the variables of CUDA and MUSA, and after '
        'the local rank on any other device; and it fails where ranks share a GPU.',
        'MMEngine names log files after the rank alone.',
    ),
    'mmengine.dist.dist.collect_results_cpu': (
        'Metrics gather results through a folder, which hosts need not share and which '
        'may not be writable, or with those of all ranks on every rank.',
        'MMEngine sends results to rank 0 in pieces.',
    ),
    'torch.distributed.broadcast_object_list': (
        'Ranks that wait for a metric of rank 0 give up after the timeout of collectives,'
        ' though it is alive.',
        'MMEngine computes metrics outside of collectives.',
    ),
    'mmengine.dist.dist._broadcast_object_list': (
        'The same, on an NPU.',
        'MMEngine computes metrics outside of collectives.',
    ),
    'mmdet.evaluation.metrics.base_video_metric.collect_tracking_results_cpu': (
        'Metrics of videos gather results through a folder.',
        "mmdet calls MMEngine's function.",
    ),
    'mmengine.runner.checkpoint.load_state_dict': (
        'It goes on with random weights where nothing of a checkpoint fits the model, and'
        ' lists all names where some do; inferencers and `init_cfg` call it.',
        'MMEngine returns what was loaded, and refuses a checkpoint of another model.',
    ),
    'mmengine.structures.instance_data.BoolTypeTensor': (
        '`InstanceData` takes indices of the CPU, CUDA, NPU, MLU and MUSA alone.',
        'MMEngine checks the dtype of an index and not its class.',
    ),
    'mmengine.infer.infer.BaseInferencer._init_model': (
        'Inferencers keep synchronized batch normalization, and on a lazy device compute '
        'every sample as a graph of its own.',
        'MMEngine has a place where an inferencer prepares its model.',
    ),
    'mmengine.model.averaged_model.BaseAveragedModel.update_parameters': (
        'Averaged weights share buffers with weights on torch_xla, which an update then '
        'deletes: training ends at frozen weights, and where gradients accumulate.',
        'Copies within a device of torch_xla have buffers of their own.',
    ),
    'torch.Tensor.cuda': (
        'Models, losses and metrics call `.cuda()`, or do so where `is_cuda` is true: '
        'they mean the device of this process.',
        'Model repositories ask a tensor for its device.',
    ),
    **dict.fromkeys(
        ('torch.amp.autocast_mode.torch', 'torch.amp.autocast_mode._cast'),
        (
            'Functions of autograd with `torch.cuda.amp.custom_fwd(cast_inputs=torch.float32)` '
            'ask there whether the autocast of CUDA is enabled, and would compute in 16 bits on '
            'another device. From PyTorch 2.4 on.',
            'They name `device_type` in `torch.amp.custom_fwd`.',
        ),
    ),
    'torch.amp.autocast_mode.autocast.__enter__': (
        'A method of a model was decorated with `torch.cuda.amp.autocast(enabled=False)` before '
        'there was a job.',
        'Model repositories call `mmengine.runner.autocast`.',
    ),
    'torch.amp.autocast_mode.autocast.__init__': (
        'Models turn mixed precision off with `torch.cuda.amp.autocast(enabled=False)` where a '
        'loss or a cost needs float32, which has no effect on another device.',
        'Model repositories call `mmengine.runner.autocast`.',
    ),
    'torch.Tensor.type': (
        "PyTorch 1.10 has no name for the type of a T20's tensors, so `SyncBuffersHook`, "
        '`ZeroRedundancyOptimizer` and printing a `ParameterList` fail; and no PyTorch '
        'takes the name that tensors of torch_xla have: `x.type(y.type())` of BasicVSR '
        'fails. Nor does it take `torch.cuda.FloatTensor` where there is no CUDA.',
        'torch_xla registers the names of its types.',
    ),
    'torch.index_select': (
        'torch_xla 2.9 aborts the process if the indices are what `sort` or `topk` '
        "returned, as those of mmcv's `nms_rotated` are; they are copied.",
        'torch_xla reads the shape of one of several outputs of an operator.',
    ),
    **dict.fromkeys(
        OTHERWISE,
        (
            'torch_xla 2.9 computes otherwise than the CPU, without a word: see '
            '[torch_xla](torch_xla.md#what-torch_xla-computes-otherwise).',
            'torch_xla computes what the CPU does.',
        ),
    ),
    **dict.fromkeys(
        ('torch.nn.functional.elu', 'torch.nn.functional.selu', 'torch.nn.functional.celu'),
        (
            "torch_xla 2.9's gradient of negative inputs is 1 + x in place of exp(x).",
            'torch_xla has the gradient of the CPU.',
        ),
    ),
    **dict.fromkeys(
        _LAYERS_WITH_BIAS,
        (
            'torch_xla 2.9 adds the gradient of a bias up in bfloat16, also under autocast: over '
            '64 × 64 pixels it is less than a tenth of what it should be.',
            "XLA's compiler for the CPU adds up in float32.",
        ),
    ),
    **dict.fromkeys(
        (
            *_both('mean sum var std'),
            'torch.nn.functional.adaptive_avg_pool2d',
            'torch.nn.functional.avg_pool2d',
            'torch.nn.functional.avg_pool3d',
            'torch.nn.functional.l1_loss',
            'torch.nn.functional.mse_loss',
        ),
        (
            'torch_xla 2.9 adds bfloat16 up in bfloat16: means and sums of 28 × 28 elements and '
            'more are up to a third too small.',
            "XLA's compiler for the CPU adds up in float32.",
        ),
    ),
    'torch.Tensor.index_select': (
        'torch_xla 2.9 aborts the process if the indices are what `sort` or `topk` '
        "returned, as those of mmcv's `nms_rotated` are; they are copied.",
        'torch_xla reads the shape of one of several outputs of an operator.',
    ),
    'mmagic.models.utils.model_utils.get_module_device': (
        'It returns the CPU for the modules of any device that is not CUDA, so noise is '
        'made there; it is replaced in each module that imported it.',
        'It returns the device of the first parameter.',
    ),
    'mmgen.models.architectures.common.get_module_device': (
        'It returns the CPU for the modules of any device that is not CUDA, so noise is '
        'made there; it is replaced in each module that imported it.',
        'It returns the device of the first parameter.',
    ),
    'mmrazor.models.utils.utils.get_module_device': (
        'It returns the CPU for the modules of any device that is not CUDA, so noise is '
        'made there; it is replaced in each module that imported it.',
        'It returns the device of the first parameter.',
    ),
    'mmengine.runner.amp.autocast.__code__': (
        'It refuses devices that MMEngine does not list, or casts for the CPU; models '
        'have imported the function and decorated others with it, so the code of its generator '
        'is replaced.',
        'MMEngine passes the device type on to `torch.autocast`.',
    ),
    'mmseg.models.losses.accuracy.accuracy': (
        'It indexes with a mask, whose varying size makes a lazy device compile every '
        'iteration anew; it is replaced in each module of the model that imported it.',
        'mmseg multiplies with the mask.',
    ),
    'torch._shape_as_tensor': (
        'Deformable attention sends the sizes that it returns to the device and reads '
        'them there, each number with an execution of its own; the replacement keeps them'
        ' on the host.',
        'mmcv and mmdet read the sizes of feature maps from `Tensor.shape`.',
    ),
    'torch.distributed.barrier': (
        'It asks PyTorch for the accelerator, which fails where a vendor registers no '
        '`PrivateUse1HooksInterface`; the replacement synchronizes with a host element.',
        'The vendor registers one, or a barrier over host tensors asks for no device.',
    ),
    'mmcv._ext.*': (
        'The build of mmcv may have no kernel for the device, and those for the CPU take '
        'no half precision; the replacement runs the operator on the host, in float32.',
        'mmcv registers a fallback to the CPU, or has kernels for the device and the precision.',
    ),
    'torch.load': (
        'Code that is not ours calls it without the classes that a checkpoint of MMEngine'
        ' needs, or with `weights_only=False`; other threads get the original.',
        'MMEngine loads with `weights_only=True` and names its own classes.',
    ),
    'mmengine.config.config.is_installed': (
        'It looks for packages with pkg_resources, which setuptools removed in release 81.',
        'MMEngine uses `importlib.metadata`.',
    ),
    'torch.autograd.function.BackwardCFunction.apply': (
        'Autograd refuses gradients of custom functions that are on another device than '
        'their operand.',
        'PyTorch offers a hook on the gradients that a custom function returns.',
    ),
    'mmengine.runner.runner.Runner.__new__': (
        'Scripts that call `Runner.from_cfg` or `Runner(...)` ignore `runner_type` and '
        '`accelerator`, and so do runners of a repository.',
        'MMEngine reads `runner_type` in `Runner.from_cfg`, and runners ask an accelerator.',
    ),
    'mmengine.dist.utils._init_dist_mpi': (
        'A script that calls `init_dist` itself ends in an error of CUDA where there is none.',
        'MMEngine starts process groups on any device.',
    ),
    'mmengine.runner._flexible_runner.FlexibleRunner.from_cfg': (
        'It would ignore the key `accelerator` and train where MMEngine does.',
        'MMEngine has removed `FlexibleRunner`.',
    ),
    'torch.distributed.elastic.multiprocessing.api.MultiprocessContext._start': (
        'Each rank is sent the queues for results of all others, two descriptors each, and more'
        ' than some 120 ranks cannot be started.',
        'PyTorch sends each rank its own queue.',
    ),
    'torch.utils.data._utils.fetch._MapDatasetFetcher.fetch': (
        'PyTorch before 1.13 does not ask the dataset for `__getitems__`, where the seed '
        'of a batch is set.',
        'PyTorch 1.13.',
    ),
}

#: Reason and condition in Chinese, by the first symbol of a row.
REASONS = {
    'mmengine.device.utils.DEVICE': (
        '`get_device()` 返回此常量，它在导入时从 MMEngine 列出的设备中选定。',
        'MMEngine 询问 `torch.accelerator` 或注册表。',
    ),
    'mmengine.device.utils.IS_NPU_AVAILABLE': (
        'MMEngine 在导入时调用 `torch.npu.set_compile_mode`，并把其报错当作本机没有 NPU。',
        'MMEngine 只询问 `torch.npu.is_available()`。',
    ),
    'mmengine.logging.logger._get_device_id': (
        '它按 CUDA 和 MUSA 的变量命名各 rank 的日志文件，在其他设备上则按 local rank 命名；'
        '而且在多个 rank 共用一块 GPU 时会报错。',
        'MMEngine 只按 rank 命名日志文件。',
    ),
    'mmengine.dist.dist.collect_results_cpu': (
        '指标通过文件夹收集结果，而各主机未必共享该文件夹，也未必能写入；'
        '或者在每个 rank 上收集所有 rank 的结果。',
        'MMEngine 把结果分块发送到 rank 0。',
    ),
    'torch.distributed.broadcast_object_list': (
        '等待 rank 0 计算指标的 rank 会在集合通信超时后放弃，尽管 rank 0 仍在运行。',
        'MMEngine 在集合通信之外计算指标。',
    ),
    'mmengine.dist.dist._broadcast_object_list': (
        '同上，用于 NPU。',
        'MMEngine 在集合通信之外计算指标。',
    ),
    'mmdet.evaluation.metrics.base_video_metric.collect_tracking_results_cpu': (
        '视频指标通过文件夹收集结果。',
        'mmdet 调用 MMEngine 的函数。',
    ),
    'mmengine.runner.checkpoint.load_state_dict': (
        '检查点与模型完全不符时，它仍以随机权重继续；部分相符时列出所有名字。'
        '推理器和 `init_cfg` 会调用它。',
        'MMEngine 返回加载了哪些权重，并拒绝其他模型的检查点。',
    ),
    'mmengine.structures.instance_data.BoolTypeTensor': (
        '`InstanceData` 只接受 CPU、CUDA、NPU、MLU 和 MUSA 上的索引。',
        'MMEngine 检查索引的 dtype，而不是类。',
    ),
    'mmengine.infer.infer.BaseInferencer._init_model': (
        '推理器保留同步批归一化；在惰性设备上，每个样本各成一张计算图。',
        'MMEngine 提供供推理器准备模型的接口。',
    ),
    'mmengine.model.averaged_model.BaseAveragedModel.update_parameters': (
        '在 torch_xla 上，平均权重与权重共用缓冲区，更新时缓冲区被删除：'
        '有冻结的权重或累积梯度时训练会中断。',
        'torch_xla 在设备内复制时使用各自的缓冲区。',
    ),
    'torch.Tensor.cuda': (
        '模型、损失和指标会调用 `.cuda()`，或在 `is_cuda` 为真时才调用，指的都是本进程的设备。',
        '模型库向张量询问其设备。',
    ),
    **dict.fromkeys(
        ('torch.amp.autocast_mode.torch', 'torch.amp.autocast_mode._cast'),
        (
            '带有 `torch.cuda.amp.custom_fwd(cast_inputs=torch.float32)` 的 autograd 函数'
            '在此询问 CUDA 的 autocast 是否启用，在其他设备上会以 16 位计算。自 PyTorch 2.4 起。',
            '这些函数在 `torch.amp.custom_fwd` 中写明 `device_type`。',
        ),
    ),
    'torch.amp.autocast_mode.autocast.__enter__': (
        '模型的方法在任务开始之前就已用 `torch.cuda.amp.autocast(enabled=False)` 装饰。',
        '模型库调用 `mmengine.runner.autocast`。',
    ),
    'torch.amp.autocast_mode.autocast.__init__': (
        '损失或代价需要 float32 时，模型用 `torch.cuda.amp.autocast(enabled=False)` 关闭混合精度，'
        '而这在其他设备上不起作用。',
        '模型库调用 `mmengine.runner.autocast`。',
    ),
    'torch.Tensor.type': (
        'PyTorch 1.10 无法命名 T20 张量的类型，因此 `SyncBuffersHook`、`ZeroRedundancyOptimizer` '
        '和打印 `ParameterList` 会失败；而且没有任何 PyTorch 接受 torch_xla 张量类型的名字：'
        'BasicVSR 的 `x.type(y.type())` 会失败。没有 CUDA 时，`torch.cuda.FloatTensor` '
        '也不被接受。',
        'torch_xla 注册其类型的名字。',
    ),
    **dict.fromkeys(
        OTHERWISE,
        (
            'torch_xla 2.9 的结果与 CPU 不同，而且没有提示：见 '
            '[torch_xla](torch_xla.md#torch_xla-计算结果不同之处)。',
            'torch_xla 的结果与 CPU 相同。',
        ),
    ),
    **dict.fromkeys(
        ('torch.nn.functional.elu', 'torch.nn.functional.selu', 'torch.nn.functional.celu'),
        (
            'torch_xla 2.9 对负数输入的梯度为 1 + x，而不是 exp(x)。',
            'torch_xla 的梯度与 CPU 相同。',
        ),
    ),
    **dict.fromkeys(
        _LAYERS_WITH_BIAS,
        (
            'torch_xla 2.9 用 bfloat16 累加偏置的梯度，autocast 下也是：对 64 × 64 个像素，'
            '结果不到应有值的十分之一。',
            'XLA 的 CPU 编译器用 float32 累加。',
        ),
    ),
    **dict.fromkeys(
        (
            *_both('mean sum var std'),
            'torch.nn.functional.adaptive_avg_pool2d',
            'torch.nn.functional.avg_pool2d',
            'torch.nn.functional.avg_pool3d',
            'torch.nn.functional.l1_loss',
            'torch.nn.functional.mse_loss',
        ),
        (
            'torch_xla 2.9 用 bfloat16 累加 bfloat16：28 × 28 及更多元素的均值与总和'
            '最多偏小三分之一。',
            'XLA 的 CPU 编译器用 float32 累加。',
        ),
    ),
    **dict.fromkeys(
        ('torch.index_select', 'torch.Tensor.index_select'),
        (
            '若索引正是 `sort` 或 `topk` 的返回值，torch_xla 2.9 会使进程退出，'
            'mmcv 的 `nms_rotated` 即是如此；替换后的函数复制索引。',
            'torch_xla 能读取算子多个输出之一的形状。',
        ),
    ),
    **dict.fromkeys(
        (
            'mmagic.models.utils.model_utils.get_module_device',
            'mmgen.models.architectures.common.get_module_device',
            'mmrazor.models.utils.utils.get_module_device',
        ),
        (
            '对任何非 CUDA 设备上的模块，它都返回 CPU，噪声因此在主机上生成；'
            '在每个导入它的模块里替换。',
            '它返回第一个参数的设备。',
        ),
    ),
    'mmengine.runner.amp.autocast.__code__': (
        '它拒绝 MMEngine 未列出的设备，或转而在 CPU 上转换精度；模型已导入该函数，'
        '并用它装饰过其他函数，因此替换其生成器的代码。',
        'MMEngine 将设备类型传给 `torch.autocast`。',
    ),
    'mmseg.models.losses.accuracy.accuracy': (
        '它用掩码作索引，大小逐批变化，惰性设备每次迭代都要重新编译；在模型中每个导入它的模块里替换。',
        'mmseg 改为与掩码相乘。',
    ),
    'torch._shape_as_tensor': (
        '可变形注意力把它返回的尺寸发送到设备再从设备读取，每个数都要单独执行一次；'
        '替换后的函数把尺寸留在主机上。',
        'mmcv 和 mmdet 从 `Tensor.shape` 读取特征图的尺寸。',
    ),
    'torch.distributed.barrier': (
        '它向 PyTorch 询问加速器，而厂商未注册 `PrivateUse1HooksInterface` 时会失败；'
        '替换后的函数用主机上的一个元素同步。',
        '厂商注册了该接口，或主机张量上的 barrier 不再询问设备。',
    ),
    'mmcv._ext.*': (
        '所装的 mmcv 可能没有该设备的算子，其 CPU 算子也不接受半精度；'
        '替换后的函数在主机上以 float32 运行算子。',
        'mmcv 注册 CPU 回退，或提供该设备和该精度的算子。',
    ),
    'torch.load': (
        '他人的代码调用它时未登记 MMEngine 检查点所需的类，或使用 `weights_only=False`；'
        '其他线程仍得到原函数。',
        'MMEngine 以 `weights_only=True` 加载，并登记自己的类。',
    ),
    'mmengine.config.config.is_installed': (
        '它用 pkg_resources 查找包，而 setuptools 81 已将其移除。',
        'MMEngine 使用 `importlib.metadata`。',
    ),
    'torch.autograd.function.BackwardCFunction.apply': (
        '自定义函数返回的梯度若与操作数不在同一设备，autograd 会拒绝。',
        'PyTorch 为自定义函数返回的梯度提供钩子。',
    ),
    'mmengine.runner.runner.Runner.__new__': (
        '直接调用 `Runner.from_cfg` 或 `Runner(...)` 的脚本忽略 `runner_type` 和 `accelerator`，'
        '代码库自己的 runner 也是如此。',
        'MMEngine 在 `Runner.from_cfg` 中读取 `runner_type`，且 runner 向加速器询问设备。',
    ),
    'mmengine.dist.utils._init_dist_mpi': (
        '自行调用 `init_dist` 的脚本在没有 CUDA 的主机上以 CUDA 的错误结束。',
        'MMEngine 能在任何设备上启动进程组。',
    ),
    'mmengine.runner._flexible_runner.FlexibleRunner.from_cfg': (
        '它会忽略 `accelerator` 键，在 MMEngine 所选的设备上训练。',
        'MMEngine 移除 `FlexibleRunner`。',
    ),
    'torch.distributed.elastic.multiprocessing.api.MultiprocessContext._start': (
        '每个 rank 都会收到其他所有 rank 的结果队列，各占两个描述符，'
        '超过约 120 个 rank 则无法启动。',
        'PyTorch 只向每个 rank 发送它自己的队列。',
    ),
    'torch.utils.data._utils.fetch._MapDatasetFetcher.fetch': (
        'PyTorch 1.13 之前不查找数据集的 `__getitems__`，而批的随机种子在其中设置。',
        'PyTorch 1.13。',
    ),
}

LANGUAGES: Dict[str, Dict[str, Any]] = dict(
    en=dict(
        period=PERIODS_EN.__getitem__,
        reasons=REASONS_EN,
        heading='# Patches of other packages',
        intro="""\
Every symbol of another package that mmdevplug replaces in a running process. Nothing is patched at
import, except by `mmdevplug.autopatch`, which is imported for that. The list is
`docs/patch_table.py`; one function patches, and a test compares with the list all attributes of
MMEngine, mmcv, mmseg and PyTorch before, during and after a job.""",
        when='## When patches are active',
        periods=('#', 'from', 'to'),
        ends="""\
Patches of a context (loading, reading a config, the guard) end with it, also when it
fails. The end of `runner.train()`, `val()` or `test()` restores nothing: inferencers and other
loops in the same process use the same device. A second runner, or a second call, first restores
what belongs to the device of the first. The other patches stay until they are restored:""",
        restore="""\
A process whose runner goes on needs its patches: restore them after the last use of the runner. If
another package has replaced the same symbol in the meantime, its function stays.

`sys.excepthook` and `warnings.showwarning` are not listed: Python's documentation provides for
programs that assign them. With the first, a rank that stops because of another prints one line and
no traceback. With the second, only one rank of each host of `mmdevplug train --nproc` prints a
warning.""",
        which='## Symbols',
        symbols=('symbol', 'active', 'why', 'unnecessary when'),
    ),
    zh_cn=dict(
        period=PERIODS.__getitem__,
        reasons=REASONS,
        heading='# 对其他包的补丁',
        intro="""\
mmdevplug 在运行的进程中替换的其他包的全部符号。导入时不打任何补丁，只有专为此导入的
`mmdevplug.autopatch` 例外。列表位于 `docs/patch_table.py`；
补丁都由同一个函数完成，有测试在作业之前、期间和之后将 MMEngine、mmcv、mmseg 和
PyTorch 的所有属性与列表对比。""",
        when='## 补丁何时有效',
        periods=('#', '开始', '结束'),
        ends="""\
限于某个上下文的补丁（加载、读取配置、设备检查）随其结束而恢复，出错时也一样。
`runner.train()`、`val()` 或 `test()` 结束时不恢复任何补丁：同一进程中的推理器和其他循环使用同一
设备。第二个 runner 或第二次调用会先恢复属于前一个设备的补丁。其余补丁一直有效，直到被恢复：""",
        restore="""\
runner 仍在使用时需要这些补丁：请在最后一次使用 runner 之后恢复。
若其他包在此期间替换了同一符号，则保留其函数。

列表不含 `sys.excepthook` 和 `warnings.showwarning`：Python 文档允许程序给它们赋值。前者使因其他
rank 而停止的 rank 只打印一行，不打印回溯信息；后者使 `mmdevplug train --nproc` 在每台主机上只有
一个 rank 打印同样的警告。""",
        which='## 符号',
        symbols=('符号', '有效期', '原因', '何时不再需要'),
    ),
)


def grouped() -> List[List[Any]]:
    """The symbols of each row, which have one reason."""
    rows: List[List[Any]] = []
    for symbol in PATCHED_SYMBOLS:
        if str(symbol) in REASONS_EN:
            rows.append([])
        rows[-1].append(symbol)
    return rows


def render(texts: Dict[str, Any]) -> List[str]:
    """The parts of the page in one language."""
    groups = grouped()
    periods = list(dict.fromkeys(group[0].period for group in groups))
    rows = []
    for group in groups:
        reason, until = texts['reasons'][str(group[0])]
        names = ' '.join(f'`{symbol.name}`' for symbol in group)
        number = str(periods.index(group[0].period) + 1)
        rows.append([f'`{group[0].owner}`: {names}', number, reason, until])
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

"""List every symbol of another package that is replaced.

:func:`mmdevplug.utils.patching.patch_symbol` refuses symbols that are not listed, and
``docs/patch_table.py`` writes ``patches.md`` from the list.
"""

from typing import List, NamedTuple, Sequence


class Period(NamedTuple):
    """When a group of patches is active: what applies and what restores them."""

    begins: str
    ends: str


JOB = Period('a runner starts, or `patch_mmengine()`', '`restore_mmengine()`')
LOG_FILES = Period('our runner is looked up, or `init_device()`', '`restore_mmengine()`')
MODEL = Period('a model is moved to a device that is not CUDA', '`restore_mmengine()`')
LAZY_MODEL = Period('a model is moved to a lazy device', '`restore_mmengine()`')
AUTOCAST = Period(
    '`patch_mmengine()` or `DeviceAmpOptimWrapper`, on a device whose mixed precision MMEngine '
    'does not know',
    '`restore_mmengine()`',
)
VIDEOS = Period('a run of several ranks begins that has imported mmdet', '`restore_mmengine()`')
PROCESS_GROUP = Period(
    '`init_device()`, where PyTorch finds no accelerator',
    '`restore_barrier()`',
)
MMCV_OPS = Period('`init_device()`', '`restore_mmcv_ops()`')
LOADING = Period('a checkpoint begins to load, or `init_weights()` begins', 'its end')
PLANNING = Period('a model begins to be measured on the meta device', 'its end')
CONFIG = Period('`mmdevplug` begins to read a config, without pkg_resources', 'its end')
GUARD = Period('a `DeviceGuard` that moves operands is entered', 'its exit')
AUTOPATCH = Period(
    'a base config of ours is read in a script, or `mmdevplug.autopatch` is imported',
    'the end of the process',
)
WATCH = Period('a distributed job begins to watch its ranks', 'the end of the process')
A_RANK = Period('a rank of `mmdevplug train --nproc` starts, without `--verbose`', 'its end')
WORKER = Period(
    'a worker process of a data loader starts, with PyTorch before 1.13',
    'the end of the worker process',
)


class PatchedSymbol(NamedTuple):
    """A symbol of another package that is replaced for a while."""

    owner: str  #: Full name of the module, the class, or the function whose closure holds it.
    name: str  #: Its name there; ``'*'`` for every public function.
    period: Period  #: When the patch is active.
    reason: str  #: Why it is replaced.
    until: str  #: The condition that makes the patch unnecessary.

    def __str__(self) -> str:
        return f'{self.owner}.{self.name}'


def _symbols(listed: str, period: Period, reason: str, until: str) -> List[PatchedSymbol]:
    """Make the symbols of an owner, which are listed as ``'owner: name name'``."""
    owner, _, names = listed.partition(': ')
    return [PatchedSymbol(owner, name, period, reason, until) for name in names.split()]


PATCHED_SYMBOLS: Sequence[PatchedSymbol] = (
    *_symbols(
        'mmengine.device.utils: DEVICE',
        JOB,
        '`get_device()` returns this constant, which is chosen at import from the devices that '
        'MMEngine lists.',
        'MMEngine asks `torch.accelerator` or a registry.',
    ),
    *_symbols(
        'mmengine.device.utils: IS_NPU_AVAILABLE',
        JOB,
        'MMEngine takes an error of `torch.npu.set_compile_mode`, which it calls at import, for a '
        'host without NPUs.',
        'MMEngine asks `torch.npu.is_available()` alone.',
    ),
    *_symbols(
        'mmengine.logging.logger: _get_device_id',
        LOG_FILES,
        'It names the log files of ranks after the variables of CUDA and MUSA, and after the '
        'local rank on any other device; and it fails where ranks share a GPU.',
        'MMEngine names log files after the rank alone.',
    ),
    *_symbols(
        'mmengine.dist.dist: collect_results_cpu _collect_results_device',
        JOB,
        'Metrics gather results through a folder, which hosts need not share and which may not be '
        'writable, or with those of all ranks on every rank.',
        'MMEngine sends results to rank 0 in pieces.',
    ),
    *_symbols(
        'torch.distributed: broadcast_object_list',
        JOB,
        'Ranks that wait for a metric of rank 0 give up after the timeout of collectives, though '
        'it is alive.',
        'MMEngine computes metrics outside of collectives.',
    ),
    *_symbols(
        'mmengine.dist.dist: _broadcast_object_list',
        JOB,
        'The same, on an NPU.',
        'MMEngine computes metrics outside of collectives.',
    ),
    *_symbols(
        'mmdet.evaluation.metrics.base_video_metric: collect_tracking_results_cpu',
        VIDEOS,
        'Metrics of videos gather results through a folder.',
        "mmdet calls MMEngine's function.",
    ),
    *_symbols(
        'mmengine.runner.checkpoint: load_state_dict',
        JOB,
        'It goes on with random weights where nothing of a checkpoint fits the model, and lists '
        'all names where some do; inferencers and `init_cfg` call it.',
        'MMEngine returns what was loaded, and refuses a checkpoint of another model.',
    ),
    *_symbols(
        'mmengine.structures.instance_data: BoolTypeTensor LongTypeTensor IndexType',
        JOB,
        '`InstanceData` takes indices of the CPU, CUDA, NPU, MLU and MUSA alone.',
        'MMEngine checks the dtype of an index and not its class.',
    ),
    *_symbols(
        'mmengine.infer.infer.BaseInferencer: _init_model',
        JOB,
        'Inferencers keep synchronized batch normalization, and on a lazy device compute every '
        'sample as a graph of its own.',
        'MMEngine has a place where an inferencer prepares its model.',
    ),
    *_symbols(
        'mmengine.model.averaged_model.BaseAveragedModel: update_parameters',
        JOB,
        'Averaged weights share buffers with weights on torch_xla, which an update then deletes: '
        'training ends at frozen weights, and where gradients accumulate.',
        'Copies within a device of torch_xla have buffers of their own.',
    ),
    *_symbols(
        'torch.Tensor: cuda is_cuda',
        JOB,
        'Models, losses and metrics call `.cuda()`, or do so where `is_cuda` is true: they mean '
        'the device of this process.',
        'Model repositories ask a tensor for its device.',
    ),
    *_symbols(
        'torch.Tensor: type',
        JOB,
        "PyTorch 1.10 has no name for the type of a T20's tensors, so `SyncBuffersHook`, "
        '`ZeroRedundancyOptimizer` and printing a `ParameterList` fail; and no PyTorch takes the '
        'name that tensors of torch_xla have: `x.type(y.type())` of BasicVSR fails. Nor does it '
        'take `torch.cuda.FloatTensor` where there is no CUDA.',
        'torch_xla registers the names of its types.',
    ),
    *(
        symbol
        for owner in ('torch', 'torch.Tensor')
        for symbol in _symbols(
            f'{owner}: index_select',
            JOB,
            'torch_xla 2.9 aborts the process if the indices are what `sort` or `topk` returned, '
            "as those of mmcv's `nms_rotated` are; they are copied.",
            'torch_xla reads the shape of one of several outputs of an operator.',
        )
    ),
    *(
        symbol
        for owner in (
            'mmagic.models.utils.model_utils',
            'mmgen.models.architectures.common',
            'mmrazor.models.utils.utils',
        )
        for symbol in _symbols(
            f'{owner}: get_module_device',
            MODEL,
            'It returns the CPU for the modules of any device that is not CUDA, so noise is made '
            'there; it is replaced in each module that imported it.',
            'It returns the device of the first parameter.',
        )
    ),
    *_symbols(
        'mmengine.runner.amp.autocast: func',
        AUTOCAST,
        'It refuses devices that MMEngine does not list, or casts for the CPU; models have '
        'imported the function, so the generator in its closure is replaced.',
        'MMEngine passes the device type on to `torch.autocast`.',
    ),
    *_symbols(
        'mmseg.models.losses.accuracy: accuracy',
        LAZY_MODEL,
        'It indexes with a mask, whose varying size makes a lazy device compile every iteration '
        'anew; it is replaced in each module of the model that imported it.',
        'mmseg multiplies with the mask.',
    ),
    *_symbols(
        'torch: _shape_as_tensor',
        LAZY_MODEL,
        'Deformable attention sends the sizes that it returns to the device and reads them there, '
        'each number with an execution of its own; the replacement keeps them on the host.',
        'mmcv and mmdet read the sizes of feature maps from `Tensor.shape`.',
    ),
    *_symbols(
        'torch.distributed: barrier',
        PROCESS_GROUP,
        'It asks PyTorch for the accelerator, which fails where a vendor registers no '
        '`PrivateUse1HooksInterface`; the replacement synchronizes with a host element.',
        'The vendor registers one, or a barrier over host tensors asks for no device.',
    ),
    *_symbols(
        'mmcv._ext: *',
        MMCV_OPS,
        'The build of mmcv may have no kernel for the device, and those for the CPU take no half '
        'precision; the replacement runs the operator on the host, in float32.',
        'mmcv registers a fallback to the CPU, or has kernels for the device and the precision.',
    ),
    *_symbols(
        'torch: load',
        LOADING,
        'Code that is not ours calls it without the classes that a checkpoint of MMEngine needs, '
        'or with `weights_only=False`; other threads get the original.',
        'MMEngine loads with `weights_only=True` and names its own classes.',
    ),
    *_symbols(
        'torch: autocast',
        PLANNING,
        'Models turn autocast off for the device of their tensors, which older releases of '
        'PyTorch refuse for meta.',
        'The oldest PyTorch in use takes `meta` in `torch.autocast`.',
    ),
    *_symbols(
        'mmengine.config.config: is_installed get_installed_path',
        CONFIG,
        'It looks for packages with pkg_resources, which setuptools removed in release 81.',
        'MMEngine uses `importlib.metadata`.',
    ),
    *_symbols(
        'torch.autograd.function.BackwardCFunction: apply',
        GUARD,
        'Autograd refuses gradients of custom functions that are on another device than their '
        'operand.',
        'PyTorch offers a hook on the gradients that a custom function returns.',
    ),
    *_symbols(
        'mmengine.runner.runner.Runner: from_cfg',
        AUTOPATCH,
        'Scripts that call `Runner.from_cfg` ignore `runner_type`.',
        'MMEngine reads `runner_type` in `Runner.from_cfg`.',
    ),
    *_symbols(
        'mmengine.runner._flexible_runner.FlexibleRunner: from_cfg',
        AUTOPATCH,
        'It would ignore the key `accelerator` and train where MMEngine does.',
        'MMEngine has removed `FlexibleRunner`.',
    ),
    *_symbols(
        'sys: excepthook',
        WATCH,
        'A rank that stops because of another prints one line, not a traceback that hides the '
        "other's.",
        'torchrun prints the error of the rank that failed first.',
    ),
    *_symbols(
        'warnings: showwarning',
        A_RANK,
        'Each rank of a host prints the same warnings to one terminal.',
        'torchrun shows once what several ranks print.',
    ),
    *_symbols(
        'torch.utils.data._utils.fetch._MapDatasetFetcher: fetch',
        WORKER,
        'PyTorch before 1.13 does not ask the dataset for `__getitems__`, where the seed of a '
        'batch is set.',
        'PyTorch 1.13.',
    ),
)


def find_symbol(owner: str, name: str) -> PatchedSymbol:
    """Look up a symbol in the list, or raise LookupError."""
    for symbol in PATCHED_SYMBOLS:
        if symbol.owner == owner and symbol.name in (name, '*'):
            return symbol
    raise LookupError(
        f'{owner}.{name} is not in PATCHED_SYMBOLS of mmdevplug/utils/patched_symbols.py: add it '
        f'there with the reason and the period before you replace it.'
    )

"""Patch functions of MMEngine for the accelerator in use.

They are functions that other packages import by name, so that no registry, subclass or argument
can replace them. They are patched when a job starts, never at import, and stay patched when its
loops end, so that an inferencer or another loop can follow.
"""

import os
from functools import wraps
from typing import Any, Callable, Union
from weakref import WeakSet

import numpy as np
import torch
from mmengine.device import utils as device_utils
from mmengine.infer import BaseInferencer
from mmengine.logging import logger as logger_module
from mmengine.model import BaseAveragedModel, revert_sync_batchnorm
from mmengine.runner import CheckpointLoader, checkpoint as checkpoint_functions
from mmengine.structures import instance_data
from torch import Tensor, nn
from torch.utils import checkpoint

from mmdevplug.accelerators import Accelerator, device_context, enter_rank_device
from mmdevplug.accelerators.detection import AcceleratorConfig
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.patching import JOB, KEPT, patch_symbol, restore_patches

from .autocast import patch_autocast, patch_cuda_autocast
from .histogram import patch_histograms
from .metric_results import patch_result_collection
from .module_device import patch_cuda_calls
from .torch_load import safe_loading

#: Devices whose index tensors MMEngine takes, also if it did not find them at its import.
_KNOWN = ('cpu', 'cuda')


def patch_mmengine(accelerator: AcceleratorConfig = None) -> Accelerator:
    """Patch functions of MMEngine for an accelerator that MMEngine does not know.

    The runner calls it. Call it yourself before you use MMEngine without a
    runner, for inference for example. A second call patches for another accelerator.

    - ``mmengine.device.get_device`` returns its device type, so inferencers compute on it.
    - ``InstanceData[...]`` takes masks and indices on it.
    - ``mmengine.dist`` uses tensors that the backend of the process group takes, and gathers the
      results of metrics through it, not through a folder.
    - ``mmengine.device.is_npu_available`` is true on an NPU whose operators' compilation MMEngine
      could not set when it was imported.
    - The log files of ranks are named after the visible devices of this process.
    - ``mmengine.runner.load_checkpoint``, inferencers and ``init_cfg`` run no code from a file,
      refuse one of which nothing fits the model, and say in one line what does not.
    - ``mmengine.runner.amp.autocast`` casts on it.
    - Averaged weights (``EMAHook``) have memory of their own on torch_xla.
    - ``tensor.type()`` names the tensors of torch_xla, also on a T20, and casts to these names;
      ``index_select`` takes indices that ``sort`` returns.
    - ``torch.histc`` counts more than 16 million equal numbers, as pixels of a large image are.
    - ``tensor.cuda()`` moves to it, where there is no CUDA.

    Args:
        accelerator (str, dict or Accelerator, optional): See
            :func:`mmdevplug.get_accelerator`. Defaults to None: that of the running job, or else
            the detected one.

    Returns:
        Accelerator: The accelerator.

    Examples:
        >>> import mmdevplug
        >>> from mmdet.apis import DetInferencer
        >>> mmdevplug.patch_mmengine('xla')
        >>> DetInferencer('rtmdet-tiny')  # computes on xla
    """
    restore_patches(JOB)
    chosen, device = enter_rank_device(accelerator)
    patch_symbol(device_utils, 'DEVICE', chosen.device_type)
    if chosen.device_type == 'npu':
        _find_npu()
    patch_device_id()
    patch_result_collection()
    patch_histograms()
    _register_loaders(safe=True)
    patch_symbol(checkpoint_functions, 'load_state_dict', _load_state_dict)
    if chosen.device_type not in _KNOWN:
        _patch_instance_data()
    if chosen.device_type == 'xla':
        update = _in_own_memory(BaseAveragedModel.update_parameters)
        patch_symbol(BaseAveragedModel, 'update_parameters', update)
        from .torch_xla import patch_tensor_methods

        patch_tensor_methods()
    patch_cuda_calls(device)
    patch_cuda_autocast(chosen)
    patch_autocast(chosen)
    patch_symbol(BaseInferencer, '_init_model', _for_device(BaseInferencer._init_model, chosen))
    return chosen


def _for_device(init_model: Callable, accelerator: Accelerator) -> Callable:
    """Let the models of inferencers run on any device, on lazy ones each batch as one graph."""

    @wraps(init_model)
    def init(*args: object, **kwargs: object) -> object:
        # SyncBatchNorm of PyTorch 1 takes CUDA tensors only.
        model = revert_sync_batchnorm(init_model(*args, **kwargs))
        devices = accelerator.compilation.recording(model.parameters())
        if devices:
            from mmdevplug.lazy.predictions import materialize_predictions

            materialize_predictions(model, accelerator, devices)
        return model

    return init


def _load_state_dict(*args: Any, **options: Any) -> Any:
    from .load_weights import load_state_dict  # imported only by runs that load weights

    return load_state_dict(*args, **options)


def restore_mmengine() -> None:
    """Restore all functions of MMEngine, mmseg and mmdet."""
    restore_patches(JOB, KEPT)
    _register_loaders(safe=False)


def _find_npu() -> None:
    """Let MMEngine know of the NPU if ``torch.npu.set_compile_mode`` failed at its import.

    MMEngine calls it before a device was chosen and takes any error for a host without NPUs: it is
    missing in old releases of torch_npu, and fails before the runtime has started in others. Then
    MMEngine starts process groups for CUDA (mmengine#1307).
    """
    if device_utils.is_npu_available() or not hasattr(device_utils, 'npu_utils'):
        return
    patch_symbol(device_utils, 'IS_NPU_AVAILABLE', True)
    jit_compile = getattr(device_utils, 'npu_jit_compile', False)
    try:
        vendor: Any = torch
        vendor.npu.set_compile_mode(jit_compile=jit_compile)
    except (AttributeError, RuntimeError, TypeError) as error:
        log_warning(
            f'torch.npu.set_compile_mode(jit_compile={jit_compile}) fails with '
            f'{type(error).__name__}: {error}. Operators are compiled as torch_npu does it by '
            f'itself: slowly, if the shapes of the data change. Training goes on; install the '
            f'torch_npu for this torch and CANN to have it.'
        )


def patch_device_id() -> None:
    """Name the log files of ranks after the visible devices of this process."""
    if logger_module._get_device_id is not _device_id:
        patch_symbol(logger_module, '_get_device_id', _device_id, KEPT)


def patch_checkpointing(device_type: str) -> None:
    """Let segments that are computed again have the random numbers and precision of a device.

    PyTorch 2.1 to 2.5 sets the random numbers of CUDA otherwise, and fails without it. Later ones
    compute a segment again without autocast if no argument is a tensor of the device.
    """
    default = getattr(checkpoint, 'DefaultDeviceType', None)  # since PyTorch 2.1
    if default is None or device_type in ('cpu', 'cuda') or not hasattr(torch, device_type):
        return
    if default._default_device_type != device_type:
        patch_symbol(default, '_default_device_type', device_type, KEPT)


_id_of_mmengine: Callable[[], Union[int, str]] = logger_module._get_device_id


def _device_id() -> Union[int, str]:
    """See ``mmengine.logging.logger._get_device_id``, which reads ``CUDA_VISIBLE_DEVICES``."""
    context = device_context()
    if context is None or not context.final or context.accelerator.shares_devices:
        try:
            return _id_of_mmengine()
        except IndexError:  # more ranks than GPUs
            return int(os.environ['LOCAL_RANK'])
    return context.accelerator.device_id(context.device)


def _patch_instance_data() -> None:
    class _OfDtype(type):
        """A class of tensors by dtype, on any device."""

        dtype: torch.dtype

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, Tensor) and instance.dtype == cls.dtype

    # `InstanceData.__getitem__` looks these names up and reads their `__args__`.
    masks: object = Union[torch.BoolTensor, _OfDtype('AnyBoolTensor', (), dict(dtype=torch.bool))]
    indices: object = Union[
        torch.LongTensor, _OfDtype('AnyLongTensor', (), dict(dtype=torch.int64))
    ]
    patch_symbol(instance_data, 'BoolTypeTensor', masks)
    patch_symbol(
        instance_data, 'IndexType', Union[str, slice, int, list, indices, masks, np.ndarray]
    )


def _safely(loader: Any) -> Callable:
    """Let a loader of MMEngine's ``CheckpointLoader`` run no code of a file."""

    @wraps(loader)
    def load(filename: str, *args: object, **kwargs: object) -> object:
        with safe_loading(filename):
            return loader(filename, *args, **kwargs)

    load.of_mmengine = loader  # type: ignore[attr-defined]
    return load


def _register_loaders(safe: bool) -> None:
    """Register MMEngine's loaders of checkpoints anew, safe or as they were."""
    for prefix, loader in list(CheckpointLoader._schemes.items()):
        own = getattr(loader, 'of_mmengine', loader)
        CheckpointLoader.register_scheme(prefix, _safely(own) if safe else own, force=True)


def _in_own_memory(update: Callable) -> Callable:
    """Let averaged weights share no memory with weights that an iteration does not change.

    The first update copies the weights. On torch_xla 2.9 a copy shares the buffer, and the next
    update would give the buffer away, with the weights that are frozen or still accumulate.
    """
    owners: WeakSet[object] = WeakSet()

    @wraps(update)
    def update_parameters(average: Any, model: nn.Module) -> None:
        update(average, model)
        if average not in owners:
            owners.add(average)
            for weight in average.avg_parameters.values():
                weight.data.copy_(weight.data * 1)

    return update_parameters

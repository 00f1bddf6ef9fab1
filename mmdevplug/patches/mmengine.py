"""Patch functions of MMEngine for the accelerator in use.

A registry, a subclass or an argument answers most of what MMEngine assumes about devices. The
rest are functions that other packages import by name. They are patched when a job starts, never at
import, and stay so when its loops end, so that an inferencer or another loop can follow;
:func:`restore_mmengine` restores them.
"""

import time
from functools import wraps
from types import SimpleNamespace
from typing import Any, Callable, Union

import numpy as np
import torch
from mmengine.device import utils as device_utils
from mmengine.dist import dist as dist_functions, utils as dist_utils
from mmengine.infer import BaseInferencer
from mmengine.logging import logger as logger_module
from mmengine.model import revert_sync_batchnorm, utils as model_utils
from mmengine.runner import CheckpointLoader
from mmengine.structures import instance_data
from mmengine.utils.dl_utils import TimeCounter, time_counter
from torch import Tensor

from mmdevplug.accelerators import Accelerator
from mmdevplug.accelerators.detection import AcceleratorConfig
from mmdevplug.accelerators.lazy_predictions import materialize_predictions
from mmdevplug.distributed.process_group import device_context, group_device, rank_device
from mmdevplug.utils.patched_symbols import AUTOCAST, FLEXIBLE_RUNNER, JOB, LAZY_MODEL
from mmdevplug.utils.patching import patch_symbol, restore_patches

from .autocast import patch_autocast
from .explain_sync_bn import explain_missing_group
from .torch_load import safe_loading

#: Devices whose index tensors MMEngine takes, and for which its clock waits. On others one of both
#: is missing: on NPU and MLU it times the queueing, on MPS it refuses masks.
_KNOWN = ('cpu', 'cuda')


def patch_mmengine(accelerator: AcceleratorConfig = None) -> Accelerator:
    """Patch functions of MMEngine for an accelerator that MMEngine does not know.

    The runner and the strategies call it. Call it yourself before you use MMEngine without a
    runner, for inference for example. A second call patches for another accelerator.

    - ``mmengine.device.get_device`` tells its device type, so inferencers compute on it.
    - ``InstanceData[...]`` takes masks and indices on it.
    - ``TimeCounter`` waits for it: in every call where operations run at once, and when it reports
      on a lazy device, where waiting in between would cut the graph.
    - ``mmengine.dist`` sends its messages where the backend of the process group takes tensors.
    - The log files of ranks are named after the devices that this process was given.
    - ``mmengine.runner.load_checkpoint``, inferencers and ``init_cfg`` run no code from a file.
    - ``mmengine.runner.amp.autocast`` casts on it.
    - ``convert_sync_batchnorm(..., 'mmcv')`` says that it needs a process group where none is.

    Args:
        accelerator (str, dict or Accelerator, optional): See
            :func:`mmdevplug.get_accelerator`. Defaults to None: that of the job that has started,
            or else what detection finds.

    Returns:
        Accelerator: The accelerator.

    Examples:
        >>> import mmdevplug
        >>> from mmdet.apis import DetInferencer
        >>> mmdevplug.patch_mmengine('xla')
        >>> DetInferencer('rtmdet-tiny')  # computes on xla
    """
    restore_patches(JOB, LAZY_MODEL)
    chosen, _ = rank_device(accelerator)
    patch_symbol(device_utils, 'DEVICE', chosen.device_type)
    patch_symbol(logger_module, '_get_device_id', _device_id)
    for functions in (dist_utils, dist_functions):
        patch_symbol(functions, 'get_comm_device', group_device)
    _patch_checkpoint_loader()
    if chosen.device_type not in _KNOWN:
        _patch_instance_data()
        _patch_time_counter(chosen)
    patch_symbol(BaseInferencer, '_init_model', _for_device(BaseInferencer._init_model, chosen))
    convert = model_utils.convert_sync_batchnorm
    patch_symbol(model_utils, 'convert_sync_batchnorm', explain_missing_group(convert))
    patch_autocast(chosen)
    return chosen


def restore_mmengine() -> None:
    """Restore all functions of MMEngine, and the accuracy of mmseg's heads.

    That is what :func:`patch_mmengine` patched, ``mmengine.runner.amp.autocast``, and the methods
    of ``FlexibleRunner``.
    """
    restore_patches(JOB, LAZY_MODEL, AUTOCAST, FLEXIBLE_RUNNER)


_id_of_mmengine: Callable[[], Union[int, str]] = logger_module._get_device_id


def _device_id() -> Union[int, str]:
    """See ``mmengine.logging.logger._get_device_id``, which asks ``CUDA_VISIBLE_DEVICES``."""
    context = device_context()
    if context is None or context.accelerator.shares_devices:
        return _id_of_mmengine()
    return context.accelerator.device_id(context.device)


class _OfDtype(type):
    """A class of tensors by what they hold, wherever they are."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor) and instance.dtype == cls.dtype


class AnyBoolTensor(metaclass=_OfDtype):
    """A mask on any device."""

    dtype = torch.bool


class AnyLongTensor(metaclass=_OfDtype):
    """Indices on any device."""

    dtype = torch.int64


def _patch_instance_data() -> None:
    # The names that `InstanceData.__getitem__` looks up; it asks for their `__args__`.
    masks = Union[torch.BoolTensor, AnyBoolTensor]
    indices = Union[torch.LongTensor, AnyLongTensor]
    patch_symbol(instance_data, 'BoolTypeTensor', masks)
    patch_symbol(instance_data, 'LongTypeTensor', indices)
    patch_symbol(
        instance_data, 'IndexType', Union[str, slice, int, list, indices, masks, np.ndarray]
    )


def _patch_time_counter(accelerator: Accelerator) -> None:
    """Functions that are decorated already look these up at each call."""
    if accelerator.lazy:
        patch_symbol(TimeCounter, 'print_time', _waiting(TimeCounter.print_time, accelerator))
        return
    card = SimpleNamespace(is_available=lambda: True, synchronize=accelerator.synchronize)
    patch_symbol(time_counter, 'torch', _TorchWith(cuda=card))
    patch_symbol(time_counter, 'is_cuda_available', card.is_available)


class _TorchWith(SimpleNamespace):
    """PyTorch with other attributes in the place of some."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _waiting(print_time: Callable, accelerator: Accelerator) -> Callable:
    """Add to a time that is about to be reported how long the device still takes."""

    @wraps(print_time)
    def waiting(counter: TimeCounter, elapsed: float) -> None:
        count = counter._TimeCounter__count
        reports = count >= counter.warmup_interval and count % counter.log_interval == 0
        if counter.with_sync and reports:
            start = time.perf_counter()
            accelerator.synchronize(rank_device()[1])
            elapsed += time.perf_counter() - start
        print_time(counter, elapsed)

    return waiting


def _patch_checkpoint_loader() -> None:
    """Keep MMEngine's loader of checkpoints, by any scheme, from running what it loads."""
    of_mmengine = CheckpointLoader.load_checkpoint.__func__

    @wraps(of_mmengine)
    def load_checkpoint(cls: type, filename: str, *args: Any, **kwargs: Any) -> Any:
        with safe_loading(filename):
            return of_mmengine(cls, filename, *args, **kwargs)

    patch_symbol(CheckpointLoader, 'load_checkpoint', classmethod(load_checkpoint))


def _for_device(init_model: Callable, accelerator: Accelerator) -> Callable:
    """Let the models of inferencers run on any device, on lazy ones each batch as one graph.

    Synchronized batch normalization predicts as any other does, but that of PyTorch 1 takes no
    tensors except CUDA's.
    """

    @wraps(init_model)
    def init(*args: Any, **kwargs: Any) -> Any:
        model = revert_sync_batchnorm(init_model(*args, **kwargs))
        if accelerator.lazy:
            devices = {parameter.device for parameter in model.parameters()}
            here = [device for device in devices if device.type == accelerator.device_type]
            materialize_predictions(model, accelerator, here)
        return model

    return init

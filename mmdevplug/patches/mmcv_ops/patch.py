"""Patch mmcv's operators for devices that they have no kernel for."""

from typing import Any, Callable, Dict, Optional, Sequence

import torch
from torch import Tensor

from mmdevplug.accelerators.context import PROCESS
from mmdevplug.errors import DeviceMismatchError, ModelError, first_line
from mmdevplug.utils.logs import log_warning

from .host_call import call_on_host, is_reduced
from .interception import Interception
from .kernels import Kernels, called_for_vendor, lacks_kernel

_HOST = torch.device('cpu')


class OperatorPatch:
    """Replaces mmcv's compiled operators; see :func:`patch_mmcv_ops`."""

    def __init__(self) -> None:
        #: How often each operator ran on the host.
        self.calls: Dict[str, int] = {}
        self.interception = Interception(self.call)
        self._kernels = Kernels()

    def call(self, function: Callable, args: Sequence[Any], kwargs: Dict[str, Any]) -> Any:
        """Call a function of ``mmcv._ext`` where it has a kernel."""
        values = [*args, *kwargs.values()]
        device = _device_of(function.__name__, values)
        if device is None:
            if any(map(is_reduced, values)):
                return call_on_host(function, args, kwargs, _HOST)
            return function(*args, **kwargs)
        if self._kernels.has_kernel(function.__name__, device, self.interception.originals):
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                if not lacks_kernel(error):
                    raise
                self._kernels.note_lacking(function.__name__, device)
        return self._call_on_host(function, args, kwargs, device)

    def _call_on_host(
        self, function: Callable, args: Sequence[Any], kwargs: Dict[str, Any], device: torch.device
    ) -> Any:
        name = function.__name__
        if called_for_vendor(name, device):
            raise ModelError(
                f'{_no_kernel(name, device)}, and mmcv prepares its arguments for that of '
                f'{device.type}, so the host would compute something else. Install the build of '
                f'mmcv for {device.type}.'
            )
        try:
            result = call_on_host(function, args, kwargs, device)
        except RuntimeError as error:
            if not lacks_kernel(error):
                raise
            raise ModelError(
                f'{_no_kernel(name, device)}, and none for the CPU either ({first_line(error)}), '
                f'so it cannot run on the host. Install a build of mmcv that has kernels for '
                f'{device.type}, or take a variant of the model that does without it.'
            ) from error
        self.calls[name] = self.calls.get(name, 0) + 1
        if self.calls[name] == 1:
            log_warning(
                f'{_no_kernel(name, device)}: it runs on the host. docs/en/mmcv_ops.md says what '
                f'that costs.'
            )
        return result


def _no_kernel(name: str, device: torch.device) -> str:
    place = _where()
    used = f' (used in {place})' if place else ''
    return f'The mmcv operator {name} has no kernel for {device}{used}'


def _where() -> str:
    """The current module or backward, and the line, as far as they are known."""
    from mmdevplug.device_guard.stack_location import (
        LIBRARIES,
        module_and_backward,
        source_of,
        user_frame,
    )

    module, backward = module_and_backward(None)
    frame = innermost = user_frame()
    # The line in mmcv says no more than the name of the operator.
    passed_over = LIBRARIES | {'mmcv'}
    while frame is not None and not backward:
        if (frame.f_globals.get('__name__') or '').partition('.')[0] not in passed_over:
            break
        frame = frame.f_back
    source = source_of(frame or innermost)
    line = '' if source is None else f'{source.file}:{source.line}'
    return ', '.join(part for part in (module, backward, line) if part)


def _device_of(name: str, values: Sequence[Any]) -> Optional[torch.device]:
    """The device outside the host that tensors are on; None if there is none.

    Some operators take settings in tensors on the host, besides those on the device.
    """
    devices = {
        value.device: None
        for value in values
        if isinstance(value, Tensor) and value.device.type not in ('cpu', 'meta')
    }
    if len(devices) > 1:
        raise DeviceMismatchError(
            f'The mmcv operator {name} got tensors of {", ".join(map(str, devices))} (used in '
            f'{_where()}). Place its operands on one device.'
        )
    return next(iter(devices), None)


def patch_mmcv_ops() -> None:
    """Let mmcv's operators work on an accelerator, and in a precision, without a kernel for it.

    Such an operator runs on the host, with its gradient. On the CPU tensors of half precision are
    computed in float32. A second call begins to count anew and changes nothing else.
    """
    restore_mmcv_ops()
    PROCESS.mmcv_ops = OperatorPatch()
    PROCESS.mmcv_ops.interception.install()


def restore_mmcv_ops() -> None:
    """Restore mmcv's operators."""
    if PROCESS.mmcv_ops is not None:
        PROCESS.mmcv_ops.interception.remove()
        PROCESS.mmcv_ops = None


def host_use() -> Dict[str, int]:
    """How often each operator ran on the host since mmcv's operators were patched."""
    return {} if PROCESS.mmcv_ops is None else dict(PROCESS.mmcv_ops.calls)

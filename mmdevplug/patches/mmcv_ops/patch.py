"""Patch mmcv's operators for devices that they have no kernel for.

All modules of ``mmcv.ops`` look a function up in the extension module at each call, so its
attributes are replaced. If mmcv is not imported yet, as before a runner has built its model, they
are replaced right after its import.
"""

import sys
from functools import partial, update_wrapper
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor

from mmdevplug.errors import DeviceMismatchError, ModelError, first_line
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.patching import OWN, Patch, patch_symbol

from .host_call import call_on_host, contiguous, is_reduced
from .kernels import HOST_ONLY, UNREGISTERED, called_for_vendor, find_kernels, lacks_kernel

EXTENSION = 'mmcv._ext'
_HOST = torch.device('cpu')


class OperatorPatch(MetaPathFinder):
    """Replaces mmcv's compiled operators; see :func:`patch_mmcv_ops`.

    Two small calls find out whether a build of mmcv has any kernel for a type of device. In a
    build that has some, such as a vendor's, each operator is called until it reports that it has
    none.
    """

    #: The one of this process.
    installed: 'Optional[OperatorPatch]' = None

    def __init__(self) -> None:
        #: How often each operator ran on the host.
        self.calls: Dict[str, int] = {}
        self.originals: Dict[str, Callable] = {}
        self._patches: List[Patch] = []
        #: By type of device: which of the two operators that were tried have a kernel.
        self._with_kernel: Dict[str, Set[str]] = {}
        self._lacking: Set[Tuple[str, str]] = set()
        module = sys.modules.get(EXTENSION)
        if module is not None:
            self._replace(module)
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Restore the functions."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for patch in self._patches:
            patch.restore()

    def _replace(self, module: ModuleType) -> None:
        for name, function in list(vars(module).items()):
            if callable(function) and not name.startswith('_'):
                self.originals[name] = function
                replacement = update_wrapper(partial(self._called, function), function)
                self._patches.append(patch_symbol(module, name, replacement, OWN))

    def find_spec(
        self, fullname: str, path: Any = None, target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        """Find the extension as other finders do, and replace its functions after it is loaded."""
        if fullname != EXTENSION:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._replace_after_loading(spec.loader)
                return spec
        return None

    def _replace_after_loading(self, loader: Any) -> None:
        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            loader.exec_module(module)
            if OperatorPatch.installed is self:
                self._replace(module)

        loader.exec_module = exec_module

    def _called(self, function: Callable, *args: object, **kwargs: object) -> object:
        return self.call(function, args, kwargs)

    def call(
        self, function: Callable, args: Sequence[object], kwargs: Dict[str, object]
    ) -> object:
        """Call a function of ``mmcv._ext`` where it has a kernel, with contiguous tensors.

        mmcv's kernels read memory as if every tensor was contiguous, on the CPU and on cards.
        """
        with contiguous(function, args, kwargs) as (args, kwargs):
            return self._call(function, args, kwargs)

    def _call(
        self, function: Callable, args: Sequence[object], kwargs: Dict[str, object]
    ) -> object:
        values = [*args, *kwargs.values()]
        name = function.__name__
        device = _device_of(name, values)
        if device is None:
            if any(map(is_reduced, values)):
                return call_on_host(function, args, kwargs, _HOST)
            return function(*args, **kwargs)
        if self._has_kernel(name, device):
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                if not lacks_kernel(error):
                    raise
                self._lacking.add((name, device.type))
        return self._call_on_host(function, args, kwargs, device)

    def _has_kernel(self, name: str, device: torch.device) -> bool:
        if name in HOST_ONLY:
            return False
        if device.type not in self._with_kernel:
            self._with_kernel[device.type] = find_kernels(device, self.originals)
        found = self._with_kernel[device.type]
        if name in UNREGISTERED:
            return 'nms' in found
        return bool(found) and (name, device.type) not in self._lacking

    def _call_on_host(
        self,
        function: Callable,
        args: Sequence[object],
        kwargs: Dict[str, object],
        device: torch.device,
    ) -> object:
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


def _device_of(name: str, values: Sequence[object]) -> Optional[torch.device]:
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
    OperatorPatch.installed = OperatorPatch()


def restore_mmcv_ops() -> None:
    """Restore mmcv's operators."""
    if OperatorPatch.installed is not None:
        OperatorPatch.installed.remove()
        OperatorPatch.installed = None


def host_use() -> Dict[str, int]:
    """How often each operator ran on the host since mmcv's operators were patched."""
    return {} if OperatorPatch.installed is None else dict(OperatorPatch.installed.calls)

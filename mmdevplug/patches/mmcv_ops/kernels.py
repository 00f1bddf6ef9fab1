"""Which operators of the installed mmcv have a kernel for a type of device: asked, not listed."""

import re
from typing import Any, Callable, Dict, Mapping, Set, Tuple

import torch

#: What mmcv says where it has no kernel for a device.
_NO_KERNEL = re.compile(
    r'implementation for device \S+ not found|not compiled with GPU support|'
    r'is not implemented on CPU',
    re.IGNORECASE,
)

#: Operators that ask no registry: with a device they do not know they read its memory as the
#: host's, which ends the process. They are taken to have a kernel where ``nms`` has one.
UNREGISTERED = ('nms_quadri', 'nms_rotated')
#: Those that are written for the host alone and do not ask where their tensors are.
HOST_ONLY = ('contour_expand', 'points_in_boxes_cpu_forward')

#: Operators that mmcv's Python calls with other arguments, such as degrees in the place of
#: radians, on the devices of vendors whose kernels want them so.
VENDOR_ARGUMENTS = dict(box_iou_rotated=('mlu', 'npu'), nms_rotated=('npu',))


def called_for_vendor(name: str, device: torch.device) -> bool:
    """Whether mmcv gives an operator arguments that only a vendor's kernel understands."""
    return device.type in VENDOR_ARGUMENTS.get(name, ())


def lacks_kernel(error: BaseException) -> bool:
    """Whether an error of mmcv says that there is no kernel for the device."""
    return isinstance(error, RuntimeError) and _NO_KERNEL.search(str(error)) is not None


class Kernels:
    """Knows which operators an mmcv has kernels for, by type of device.

    A build without any kernel for a device is recognized by two tiny calls, and is not called with
    its tensors again. In a build with kernels for it, such as a vendor's, each operator is called
    and believed when it says that it has none.
    """

    def __init__(self) -> None:
        self._with_kernel: Dict[str, Set[str]] = {}
        self._lacking: Set[Tuple[str, str]] = set()

    def has_kernel(
        self, name: str, device: torch.device, functions: Mapping[str, Callable]
    ) -> bool:
        """Whether an operator may be called with tensors of a device.

        Args:
            name (str): The operator.
            device (torch.device): Where the tensors are.
            functions (Mapping): Those of the extension.
        """
        if name in HOST_ONLY:
            return False
        if device.type not in self._with_kernel:
            self._with_kernel[device.type] = _probe(device, functions)
        found = self._with_kernel[device.type]
        if name in UNREGISTERED:
            return 'nms' in found
        return bool(found) and (name, device.type) not in self._lacking

    def note_lacking(self, name: str, device: torch.device) -> None:
        """Remember that an operator said that it has no kernel for a device."""
        self._lacking.add((name, device.type))


def _probe(device: torch.device, functions: Mapping[str, Callable]) -> Set[str]:
    """Of the two operators that every port of mmcv begins with, those with a kernel."""
    box = torch.zeros(1, 4, device=device)
    number = torch.zeros(1, device=device)
    trials: Dict[str, Tuple[Any, ...]] = dict(
        nms=(box, number, 0.5, 0),
        bbox_overlaps=(box, box, number.view(1, 1), 0, False, 0),
    )
    found = set()
    for name, args in trials.items():
        try:
            functions[name](*args)
        except (RuntimeError, KeyError) as error:
            if isinstance(error, KeyError) or lacks_kernel(error):
                continue
        found.add(name)
    return found

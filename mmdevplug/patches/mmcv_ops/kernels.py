"""Find out which operators of the installed mmcv have a kernel for a type of device."""

import re
from typing import Callable, Dict, Mapping, Set, Tuple

import torch

#: mmcv's errors where it has no kernel for a device.
_NO_KERNEL = re.compile(
    r'implementation for device \S+ not found|not compiled with GPU support|'
    r'is not implemented on CPU',
    re.IGNORECASE,
)

#: Operators that do not check their device: they read memory of an unknown device as the host's,
#: which crashes the process. They are assumed to have a kernel if ``nms`` has one.
UNREGISTERED = ('nms_quadri', 'nms_rotated')
#: Operators for the host only that do not check the device of their tensors.
HOST_ONLY = ('contour_expand', 'points_in_boxes_cpu_forward')

#: Operators that mmcv calls with other arguments, such as degrees in place of radians, on devices
#: of vendors whose kernels expect that.
VENDOR_ARGUMENTS = dict(box_iou_rotated=('mlu', 'npu'), nms_rotated=('npu',))


def called_for_vendor(name: str, device: torch.device) -> bool:
    """Whether mmcv passes arguments that only a vendor's kernel understands."""
    return device.type in VENDOR_ARGUMENTS.get(name, ())


def lacks_kernel(error: BaseException) -> bool:
    """Whether an error of mmcv says that there is no kernel for the device."""
    return isinstance(error, RuntimeError) and _NO_KERNEL.search(str(error)) is not None


def find_kernels(device: torch.device, functions: Mapping[str, Callable]) -> Set[str]:
    """Try two operators, the first that every port of mmcv has; return those with a kernel."""
    box = torch.zeros(1, 4, device=device)
    number = torch.zeros(1, device=device)
    trials: Dict[str, Tuple[object, ...]] = dict(
        nms=(box, number, 0.5, 0), bbox_overlaps=(box, box, number.view(1, 1), 0, False, 0)
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

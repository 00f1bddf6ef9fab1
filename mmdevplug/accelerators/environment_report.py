"""Describe the accelerators in the environment report at the start of a log."""

import os
import sys
from collections import defaultdict
from typing import Dict, List

from .base import Accelerator


def describe_devices(accelerator: Accelerator) -> Dict[str, str]:
    """Name all devices of an accelerator, as MMEngine's report names CUDA's.

    Examples:
        >>> from mmdevplug import get_accelerator
        >>> describe_devices(get_accelerator('gcu'))
        {'Accelerator': 'gcu', 'gcu 0,1': 'S60', 'torch_gcu': '2.5', 'TOPS_VISIBLE_DEVICES': '4,5'}
    """
    report = {'Accelerator': accelerator.name}
    by_name: Dict[str, List[str]] = defaultdict(list)
    for rank in range(accelerator.max_ranks()):
        device = accelerator.device(rank)
        by_name[accelerator.device_name(device)].append(str(device.index or 0))
    for name, indices in by_name.items():
        report[f'{accelerator.device_type} {",".join(indices)}'] = name
    package: object = sys.modules.get(accelerator.package or '')
    version = getattr(package, '__version__', None)
    if version is None and hasattr(package, 'get_version'):  # torch_gcu 1.10
        version = package.get_version()
    if version is not None:
        report[f'{accelerator.package}'] = version
    variable = accelerator.visible_devices_env
    if variable is not None:
        report[variable] = os.environ.get(variable, 'not set')
    return report

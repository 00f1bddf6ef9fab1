"""Describe the accelerators in the environment report at the start of a log."""

import os
import sys
from collections import defaultdict
from typing import Dict, List

from .base import Accelerator


def describe_devices(accelerator: Accelerator) -> Dict[str, str]:
    """Name all devices of an accelerator, as MMEngine's report names CUDA's.

    Args:
        accelerator (Accelerator): The one in use.

    Returns:
        dict: For example ``{'Accelerator': 'gcu', 'gcu 0,1': 'S60', 'torch_gcu': '2.5.1',
        'TOPS_VISIBLE_DEVICES': '4,5'}``.
    """
    told = {'Accelerator': accelerator.name}
    by_name: Dict[str, List[str]] = defaultdict(list)
    count = accelerator.device_count()
    for index in range(count):
        by_name[accelerator.device_name(accelerator.device(index))].append(str(index))
    for name, indices in by_name.items():
        told[f'{accelerator.device_type} {",".join(indices)}'] = name
    version = getattr(sys.modules.get(accelerator.package or ''), '__version__', None)
    if version is not None:
        told[f'{accelerator.package}'] = version
    variable = accelerator.visible_devices_env
    if variable is not None:
        told[variable] = os.environ.get(variable, 'not set')
    return told

"""Read the devices of a plan and what each may hold, as a user writes them."""

import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch

from mmdevplug.accelerators import Accelerator
from mmdevplug.errors import PlacementError
from mmdevplug.utils.byte_sizes import parse_bytes

Devices = Union[str, int, torch.device, Sequence[Union[str, int, torch.device]]]
Size = Union[int, str]

_DEVICE = re.compile(r'((?P<type>[a-z_]\w*):)?(?P<first>\d+)(-(?P<last>\d+))?\Z')
MOST_DEVICES = 4096


def parse_devices(
    devices: Optional[Devices], device_type: Optional[str] = None, exclude_cpu: bool = True
) -> List[str]:
    """Read a list of devices. None of them need be present.

    Args:
        devices (str, int, torch.device or list): ``'cuda:0-3'``, ``'cuda:0,2-3'``, a list of such,
            or a number of devices of ``device_type``.
        device_type (str, optional): What a bare index or number means where no type precedes it in
            its text.
        exclude_cpu (bool): Whether the host may hold nothing. If False, ``'cpu'`` comes last.

    Returns:
        List[str]: E.g. ``['cuda:0', 'cuda:1']``, ``'cpu'`` without an index.

    Raises:
        PlacementError: If the list is empty, unreadable, mixed, or names a device twice.
    """
    if isinstance(devices, bool) or devices is None:
        raise PlacementError(f"devices={devices!r}: expected e.g. 'cuda:0-3', a list or a number.")
    if isinstance(devices, Mapping):
        raise PlacementError(
            f'devices is of type {type(devices).__name__}: expected names of devices, e.g. '
            f"'cuda:0-3', not a device map; the plan makes one. Limits go into max_memory."
        )
    if isinstance(devices, int) and devices < 1:
        raise PlacementError(f'devices={devices}: expected at least 1 device.')
    parts: Any = f'0-{devices - 1}' if isinstance(devices, int) else devices
    parts = [parts] if isinstance(parts, (str, torch.device)) else parts
    names = [name for part in parts for name in _names(part, device_type)]
    if not names:
        raise PlacementError(f"devices={devices!r} names no device. Give e.g. 'cuda:0-3'.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PlacementError(f'devices={devices!r} names {", ".join(twice)} more than once.')
    types = list(dict.fromkeys(name.split(':')[0] for name in names if name != 'cpu'))
    if len(types) > 1:
        raise PlacementError(
            f'the devices are of different types: {", ".join(types)}. A plan spreads a model over '
            f'devices of one type; make one plan for each.'
        )
    if not types:
        return names
    if 'cpu' in names and exclude_cpu:
        raise PlacementError(
            "the devices name 'cpu' beside an accelerator, but exclude_cpu=True. Leave 'cpu' out, "
            'or allow it with exclude_cpu=False.'
        )
    names = [name for name in names if name != 'cpu']
    return names if exclude_cpu else [*names, 'cpu']


def _names(part: object, device_type: Optional[str]) -> List[str]:
    names: List[str] = []
    for text in str(part).replace(' ', '').split(','):
        found = _DEVICE.match(text)
        if text in ('cpu', 'cpu:0'):
            names.append('cpu')
        elif found and found['type'] in ('cpu', 'meta'):
            raise PlacementError(
                f'device {text!r}: expected TYPE:INDEX or TYPE:FIRST-LAST of an accelerator, e.g. '
                f"'cuda:0-1', which a plan does not need to be present. The host is one device, "
                f"'cpu', and takes what these cannot hold with exclude_cpu=False (--allow-cpu)."
            )
        elif found:
            first, last = int(found['first']), int(found['last'] or found['first'])
            if last - first >= MOST_DEVICES:
                raise PlacementError(f'devices {text!r}: expected at most {MOST_DEVICES} devices.')
            device_type = found['type'] or device_type
            if device_type is None:
                raise PlacementError(
                    f"device {text}: of which type? Write e.g. 'cuda:{text}', or give device_type."
                )
            if last < first:
                raise PlacementError(f'devices {text!r}: the range ends before it begins.')
            names += [f'{device_type}:{index}' for index in range(first, last + 1)]
        elif text:
            raise PlacementError(
                f'device {text!r}: expected TYPE:INDEX or TYPE:FIRST-LAST, e.g. '
                f"'cuda:0' or 'xla:0-7'."
            )
    return names


def parse_max_memory(
    max_memory: Union[None, str, Mapping[object, Size]], devices: Sequence[str]
) -> Dict[str, int]:
    """Parse the memory that each device may use.

    Args:
        max_memory (dict or str, optional): Device or its index to bytes, or
            ``'cuda:0=10GB,cuda:1=8GB'``.
        devices (Sequence[str]): Of the plan.

    Returns:
        Dict[str, int]: Bytes of the devices that were named.

    Raises:
        PlacementError: If a device is unknown or named twice, or a figure cannot be read.
    """
    pairs: List[Tuple[object, Size]] = []
    if isinstance(max_memory, str):
        for part in filter(None, max_memory.replace(' ', '').split(',')):
            name, equals, written = part.partition('=')
            if not equals:
                raise PlacementError(
                    f"max_memory {part!r}: expected DEVICE=SIZE, e.g. 'cuda:0=10GB'."
                )
            pairs.append((name, written))
    elif max_memory is None or isinstance(max_memory, Mapping):
        pairs = list((max_memory or {}).items())
    else:
        raise PlacementError(f'max_memory={max_memory!r}: expected a dict or a text.')
    limits: Dict[str, int] = {}
    for key, size in pairs:
        name = _device_named(str(key), devices)
        if name in limits:
            raise PlacementError(f'max_memory names {name} twice.')
        limits[name] = parse_bytes(size, f'max_memory[{name!r}]')
    return limits


def _device_named(text: str, devices: Sequence[str]) -> str:
    if text.isdigit():
        matches = [name for name in devices if name.endswith(f':{int(text)}')]
    else:
        matches = [name for name in devices if name in (text, text.replace('cpu:0', 'cpu'))]
    if not matches:
        hint = ' (allow it with exclude_cpu=False)' if text.startswith('cpu') else ''
        raise PlacementError(
            f'max_memory names {text!r}{hint}, which is none of the devices: {", ".join(devices)}.'
        )
    return matches[0]


def probe_capacities(devices: Sequence[str], accelerator: Accelerator) -> Dict[str, int]:
    """Measure the memory of the devices of this machine, for ``max_memory``.

    Args:
        devices (Sequence[str]): From :func:`parse_devices`.
        accelerator (Accelerator): Of their family.

    Returns:
        Dict[str, int]: Bytes of each; empty if the vendor does not report it for all of them.
    """
    if not accelerator.is_available():
        return {}
    found: Dict[str, int] = {}
    for name in devices:
        device = torch.device(name)
        if device.type != accelerator.device_type:
            continue
        if (device.index or 0) >= accelerator.device_count():
            return {}
        total = accelerator.memory_total(device)
        if total is None:
            return {}
        found[name] = total
    return found


def device_weights(
    devices: Sequence[str], capacities: Optional[Mapping[str, int]]
) -> Dict[str, float]:
    """Weigh devices by their capacities; one without a limit counts as the largest with one."""
    limits = [size for name, size in (capacities or {}).items() if name != 'cpu']
    largest = float(max(limits, default=0)) or 1.0
    return {name: float((capacities or {}).get(name, largest)) for name in devices}

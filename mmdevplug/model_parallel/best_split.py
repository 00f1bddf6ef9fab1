"""Fit blocks onto devices: the best split, or the figures of why there is none."""

from typing import Any, List, Mapping, NoReturn, Optional, Sequence, Tuple

from mmdevplug.errors import PlacementError
from mmdevplug.utils.byte_sizes import format_bytes

from .parse_devices import device_weights
from .partition import Partition
from .units import Group


def fit(
    groups: Sequence[Group], devices: Sequence[str], limits: Mapping[str, int], full: bool = True
) -> Tuple[List[str], List[str]]:
    """Split groups over devices as evenly as possible: a device for each, and remarks.

    The devices have ``'cpu'`` last, if at all; with ``full``, every device has to hold something.
    """
    accelerators = [name for name in devices if name != 'cpu'] or list(devices)
    useful = [name for name in accelerators if limits.get(name, 1) > 0]
    if full and useful != accelerators:
        empty = ', '.join(name for name in accelerators if name not in useful)
        raise PlacementError(
            f'max_memory gives {empty} no memory. Leave it out of the devices, or allow a device '
            f'to stay empty with force_balance=False (mmdevplug plan: --no-force-balance).'
        )
    if full and len(groups) < len(useful):
        raise PlacementError(
            f'{len(groups)} blocks for {len(useful)} devices: {", ".join(useful[len(groups) :])} '
            f'would stay empty. Give fewer devices, or allow it with force_balance=False '
            f'(mmdevplug plan: --no-force-balance).'
        )
    if not useful and 'cpu' not in devices[1:]:
        raise PlacementError(f'max_memory gives {", ".join(devices)} no memory. Give one some.')
    ends = _ends(groups, useful, limits, full)
    spilled: List[str] = []
    steps: List[str] = []
    if ends is None:
        if 'cpu' not in devices[1:]:
            _refuse(groups, useful, limits, full, host=False)
        count, ends = _largest_start(groups, useful, limits, full)
        spilled = ['cpu'] * (len(groups) - count)
        needed = sum(group.bytes for group in groups[count:])
        if needed > limits.get('cpu', needed):
            raise PlacementError(
                f'the devices are full and {format_bytes(needed)} are left for the host, which '
                f'may hold {format_bytes(limits["cpu"])}. Raise max_memory, or add devices.'
            )
        steps.append(
            f'the host holds {format_bytes(needed)} that the devices cannot, from '
            f'{groups[count].label} on.'
        )
    found = [name for name, a, b in zip(useful, [0, *ends], ends) for _ in range(b - a)]
    left_out = [name for name in accelerators if name not in found]
    if left_out:
        steps.append(f'left out: {", ".join(left_out)} (too small, or not needed).')
    return found + spilled, steps


def _ends(
    groups: Sequence[Group], devices: Sequence[str], limits: Mapping[str, int], full: bool
) -> Optional[List[int]]:
    if not devices:
        return None if groups else []
    weights = device_weights(devices, {n: s for n, s in limits.items() if n in devices})
    return Partition(
        [group.bytes for group in groups],
        [weights[name] for name in devices],
        [limits.get(name, float('inf')) for name in devices],
        [group.depth for group in groups],
        allow_empty=not full,
    ).best()


def _largest_start(
    groups: Sequence[Group], devices: Sequence[str], limits: Mapping[str, int], full: bool
) -> Tuple[int, List[int]]:
    """As many of the first blocks as the accelerators hold, and how."""
    low, high = len(devices) if full else 0, len(groups)
    best = _ends(groups[:low], devices, limits, full) if full else [0] * len(devices)
    while best is not None and high - low > 1:
        middle = (low + high) // 2
        ends = _ends(groups[:middle], devices, limits, full)
        low, high, best = (low, middle, best) if ends is None else (middle, high, ends)
    if best is None:
        _refuse(groups, devices, limits, full, host=True)
    return low, best


def _refuse(
    groups: Sequence[Group],
    devices: Sequence[str],
    limits: Mapping[str, int],
    full: bool,
    host: bool,
) -> NoReturn:
    """Raise with what is missing."""
    needed = sum(group.bytes for group in groups)
    allowed = {name: limits[name] for name in devices if name in limits}
    unlimited = len(allowed) < len(devices)
    limited = ', '.join(f'{name} {format_bytes(size)}' for name, size in allowed.items())
    largest = max(groups, key=lambda group: group.bytes)
    most = max(allowed.values(), default=0)
    if not unlimited and largest.bytes > most:
        raise PlacementError(
            f'{largest.label} needs {format_bytes(largest.bytes)} on one device, the largest '
            f'device may hold {format_bytes(most)} ({limited}). Raise max_memory by '
            f'{format_bytes(largest.bytes - most)}, or take a smaller dtype.'
        )
    sizes = [group.bytes for group in groups]
    search: Any = Partition(sizes, [1.0] * len(devices), allow_empty=True)
    free = max(search.loads(search.best()))
    total = sum(allowed.values())
    if not unlimited and needed > total:
        reason = f'{format_bytes(needed - total)} are missing'
    else:
        reason = 'no split of its blocks in order keeps the limits'
        if full and _ends(groups, devices, limits, full=False) is not None:
            reason += ' without leaving a device empty, which force_balance=False allows'
    hint = '' if host else ', or allow the host to take the rest with exclude_cpu=False'
    raise PlacementError(
        f'the model needs {format_bytes(needed)}, max_memory allows {limited}: {reason}. '
        f'It fits on {len(devices)} devices of {format_bytes(free)} each{hint}.'
    )

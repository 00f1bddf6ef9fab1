"""Write and read numbers of bytes with a unit."""

from contextlib import suppress
from typing import Union

from mmdevplug.errors import PlacementError

_SCALES = dict(GIB=2**30, MIB=2**20, KIB=2**10, GB=10**9, MB=10**6, KB=10**3)


def format_bytes(size: float) -> str:
    """Write a number of bytes in binary units, as PyTorch's messages do: ``'1.50 GiB'``."""
    for unit, scale in (('GiB', 2**30), ('MiB', 2**20), ('KiB', 2**10)):
        if size >= scale:
            return f'{size / scale:.2f} {unit}'
    return f'{size:.0f} bytes'


def parse_bytes(size: Union[int, str], where: str = 'size') -> int:
    """Read bytes as HF accelerate does: ``10**9``, ``'10GB'``, ``'9.5GiB'``, ``'80Gb'`` (bits).

    Raises:
        PlacementError: Naming ``where``, if they cannot be read or are negative.
    """
    found = -1
    if isinstance(size, int) and not isinstance(size, bool):
        found = size
    elif isinstance(size, str):
        text = size.strip()
        unit = next((unit for unit in _SCALES if text.upper().endswith(unit)), None)
        with suppress(ValueError, OverflowError):
            found = int(float(text[: -len(unit)]) * _SCALES[unit]) if unit else int(text)
        if unit and len(unit) == 2 and text.endswith('b'):
            found //= 8
    if found < 0:
        raise PlacementError(
            f"{where}={size!r}: expected a number of bytes or a figure with a unit, e.g. '10GB' "
            f"or '9.5GiB'."
        )
    return found

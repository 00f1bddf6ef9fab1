"""The option ``pad_to``: to which size the images of a batch are padded."""

from typing import Any, NamedTuple, Optional, Sequence, Tuple

from mmdevplug.errors import DevPlugError

Size = Tuple[int, int]
#: Pixels; an image of twice as many each way has 50 GB.
LONGEST = 1 << 16


class PadTo(NamedTuple):
    """The size of a batch: a multiple, or the first bucket (height, width) that holds it."""

    multiple: Optional[int] = None
    buckets: Tuple[Size, ...] = ()

    def size_for(self, sizes: Sequence[Size]) -> Size:
        """Return the size of a batch of images of some (height, width)."""
        height = max(height for height, _ in sizes)
        width = max(width for _, width in sizes)
        if self.multiple is not None:
            return round_up(height, self.multiple), round_up(width, self.multiple)
        for bucket in self.buckets:
            if bucket[0] >= height and bucket[1] >= width:
                return bucket
        enough = [*self.buckets, (round_up(height, 32), round_up(width, 32))]
        raise DevPlugError(
            f'pad_to={list(self.buckets)} has no size that holds a batch of images of (height, '
            f'width) {", ".join(map(str, dict.fromkeys(sizes)))}: it needs at least '
            f'{(height, width)}. Write pad_to={enough}, or resize such images in the pipeline of '
            f'the dataset.'
        )


def read_pad_to(value: Any, key: str = 'accelerator.pad_to') -> Optional[PadTo]:
    """Read the option; None and False are no padding.

    Examples:
        >>> read_pad_to([(512, 512), (512, 1024)]).size_for([(400, 600)])
        (512, 1024)
    """
    if value is None or value is False:
        return None
    if _is_length(value):
        return PadTo(multiple=value)
    if _is_size(value):
        return PadTo(buckets=(tuple(value),))
    if isinstance(value, (list, tuple)) and value and all(map(_is_size, value)):
        sizes = {tuple(size) for size in value}
        return PadTo(buckets=tuple(sorted(sizes, key=lambda size: (size[0] * size[1], size))))
    raise DevPlugError(
        f'{key}={value!r}: expected a number whose next multiple is taken (64), one size as '
        f'(height, width) (e.g. (512, 1024)), or a list of sizes of which the smallest is taken '
        f'that holds the batch ([(512, 512), (512, 1024)]), all of at most {LONGEST}; or None.'
    )


def round_up(length: int, multiple: int) -> int:
    """Return the next multiple of a number."""
    return -(-length // multiple) * multiple


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LONGEST


def _is_size(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_length, value))

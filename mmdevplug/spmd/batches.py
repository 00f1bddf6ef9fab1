"""Divide the batches of a model among the chips, and make them as large as those of N ranks."""

from typing import Any, Iterator, List, Mapping, Tuple

from mmengine.logging import print_log
from torch import Tensor, nn

from mmdevplug.errors import ModelError
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.logs import log_warning

from .partition import Chips, is_on_chips

#: Attributes of MMEngine's runner that hold configs of loaders until it builds them.
LOADERS = ('_train_dataloader', '_val_dataloader', '_test_dataloader')


def enlarge_batches(runner: AnyRunner, chips: int) -> None:
    """Make batches of the configs of loaders as large as those of ``chips`` ranks together.

    Outside of training a loader of one sample is left as it is: images of several sizes cannot be
    in one batch, or are padded, which changes what a model finds in them.

    Raises:
        ModelError: If the loader for training has no batch size in its config, or no config.
    """
    described: List[str] = []
    for name in LOADERS:
        loader = getattr(runner, name, None)
        if loader is None:
            continue
        key, size = name[1:], loader.get('batch_size') if isinstance(loader, Mapping) else None
        trains = name == LOADERS[0]
        if isinstance(size, int) and (size > 1 or trains):
            setattr(runner, name, dict(loader, batch_size=size * chips))
            described.append(f'{key} {size} x {chips} = {size * chips}')
        elif trains:
            raise ModelError(
                f'{key} has no batch_size, so the batch of {chips} chips is not known: found '
                f'{type(loader).__name__}. accelerator.spmd=True expects a dict with batch_size, '
                f'the samples of one chip.'
            )
        else:
            described.append(f'{key} {size}')
    print_log(f'Samples of a batch, for all chips together: {"; ".join(described)}.', 'current')


class SplitBatch:
    """Divides what a data preprocessor returns; registered as its forward hook.

    Tensors are divided along their first dimension, where the chips divide it. Others, such as the
    boxes of one image, are whole on each chip. The values are the same either way.
    """

    def __init__(self, chips: Chips) -> None:
        self.chips = chips
        self._warned = False

    def __call__(self, module: nn.Module, inputs: Tuple[object, ...], batch: object) -> None:
        """Divide the tensors of a batch."""
        fields = list(batch) if isinstance(batch, (list, tuple)) else [batch]
        tensors = [tensor for field in fields for tensor in _stacked(field)]
        divided = [tensor for tensor in tensors if len(tensor) % self.chips.count == 0]
        for tensor in divided:
            self.chips.split(tensor)
        if not divided and module.training and not self._warned:
            self._warned = True
            found = f'a batch of {len(tensors[0])}' if tensors else 'a batch that is not stacked'
            log_warning(
                f'{found} cannot be divided among {self.chips.count} chips: each computes the '
                f'whole batch, with the same results. For speed, use drop_last=True, and a data '
                f'preprocessor that stacks its inputs.'
            )


def _stacked(value: Any) -> Iterator[Tensor]:
    """The tensors of a batch, but for lists inside of it: they have one part for each sample."""
    if is_on_chips(value):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _stacked(part)

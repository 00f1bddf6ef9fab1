"""The accelerator that the tests look at, in the process of one of them."""

import re
from typing import List, NamedTuple, Optional, Sequence

import pytest
import torch
from mmengine.config import Config
from torch import Tensor

from mmdevplug.accelerators import Accelerator, get_accelerator
from mmdevplug.checks.accelerators import accelerator_options
from tests.difference import difference
from tests.ranks import RanksFailed, run_ranks

#: Relative to the largest expected value: of operations, and of losses and weights of a training.
TOLERANCE = 1e-3
#: The same where matrices are multiplied, which some devices do in bfloat16 or TF32.
PRODUCT_TOLERANCE = 1e-2
_MISSING_KERNEL = re.compile(
    r"Could not run '([\w:.]+)'|[Oo]perator '([\w:.]+)' is not currently implemented"
)


def missing_kernel(text: str) -> Optional[str]:
    """The operator for which the device has no kernel, if an error says that."""
    found = _MISSING_KERNEL.search(text)
    return None if found is None else found.group(1) or found.group(2)


class Asked(NamedTuple):
    """What ``--accelerator`` and ``--card-config`` ask for."""

    name: str
    config: Optional[str] = None
    stand_in: bool = False

    def run(self, check, *args, ranks=0, **options):
        """Call ``check(card, *args)`` in new processes; report one that hangs or dies."""
        environ = dict(FAKECARD_NAME=self.name, FAKECARD_COUNT='2') if self.stand_in else {}
        environ.update(options.pop('environ', {}))
        try:
            return run_ranks(_check, ranks, check, self, args, environ=environ, **options)
        except RanksFailed as failed:
            for kind, message, _ in failed.errors.values():
                kernel = missing_kernel(message)
                if kind == 'Skipped' or kernel is not None:
                    pytest.skip(message if kernel is None else f'no kernel for {kernel}')
            raise


def _check(check, asked, args):
    return check(Card(asked), *args)


class Card:
    """An accelerator in a process, with the config that brings it."""

    def __init__(self, asked: Asked) -> None:
        cfg = Config() if asked.config is None else Config.fromfile(asked.config)
        self.options = accelerator_options(cfg, asked.name)
        given = cfg.get('accelerator') or {}
        given = dict(type=given) if isinstance(given, str) else dict(given)
        self.key = dict(given, **self.options.device)  #: The config's key ``accelerator``.
        self.accelerator: Accelerator = get_accelerator(self.options.device)

    @property
    def device(self) -> torch.device:
        device = self.accelerator.device()
        self.accelerator.set_device(device)
        return device

    def fetch(self, tensors: Sequence[Tensor]) -> List[Tensor]:
        """Compute and copy tensors to the host."""
        self.accelerator.compilation.materialize(self.device, list(tensors))
        return self.accelerator.copies.to_host(list(tensors))


def assert_equal(found: Tensor, expected: Tensor, what: str) -> None:
    """Compare type, shape and bits."""
    kind = found.device.type, found.dtype, found.shape
    assert kind == ('cpu', expected.dtype, expected.shape), what
    assert torch.equal(found, expected), f'{what}: differs by {difference(found, expected):.2g}'

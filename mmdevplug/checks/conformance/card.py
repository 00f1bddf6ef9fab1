"""What every check gets and how it ends."""

from typing import Any, Callable, Dict, List, NoReturn, Sequence

import torch
from mmengine.config import Config
from torch import Tensor

from mmdevplug.accelerators import Accelerator, get_accelerator
from mmdevplug.checks.accelerators import accelerator_options, missing_kernel
from mmdevplug.config.accelerator import AcceleratorOptions

#: Relative to the largest expected value: of operations, and of losses and weights of a training.
TOLERANCE = 1e-3
#: The same where matrices are multiplied, which some devices do in bfloat16 or TF32.
PRODUCT_TOLERANCE = 1e-2


class Failed(Exception):
    """The device does something wrong; says what."""


class NotSupported(Exception):
    """A check has nothing to look at here; says why."""


def refuse(what: str) -> NoReturn:
    """Raise NotSupported if an operator without a kernel is the cause, else Failed."""
    operator = missing_kernel(what)
    if operator is not None:
        raise NotSupported(f'no kernel for {operator}')
    raise Failed(what)


class Card:
    """The accelerator that is checked; opened when a check first asks for it.

    Args:
        options (dict): ``accelerator``, its name; ``config``, a path or None; ``timeout`` in
            seconds; ``ranks``, how many ranks get a device of their own, None for any number.
        say (callable): Takes the step that begins.
    """

    def __init__(self, options: Dict[str, Any], say: Callable[[str], None]) -> None:
        self.asked, self.say = options, say
        path = options['config']
        self.cfg = Config() if path is None else Config.fromfile(path)
        self._accelerator: Any = None

    @property
    def options(self) -> AcceleratorOptions:
        """The options of the config, with the name that was asked for."""
        return accelerator_options(self.cfg, self.asked['accelerator'])

    @property
    def accelerator(self) -> Accelerator:
        if self._accelerator is None:
            self._accelerator = get_accelerator(self.options.device)
            self._accelerator.set_device(self._accelerator.device())
        return self._accelerator

    @property
    def device(self) -> torch.device:
        return self.accelerator.device()

    def need_ranks(self, ranks: int) -> None:
        """Raise NotSupported where ranks cannot have a device each, and cannot share one."""
        there = self.asked['ranks']
        if there is not None and there < ranks and self.options.backend != 'gloo':
            raise NotSupported(
                f'{ranks} ranks need {ranks} devices, and {there} is here; where ranks can share '
                f"one, give --config with accelerator = dict(backend='gloo')"
            )

    def fetch(self, tensors: Sequence[Tensor]) -> List[Tensor]:
        """Compute and copy tensors to the host."""
        self.accelerator.compilation.materialize(self.device, list(tensors))
        return self.accelerator.copies.to_host(list(tensors))


def require(found: float, tolerance: float, what: str) -> str:
    """Raise Failed if a difference is above its tolerance; else say how large it is."""
    if not found <= tolerance:
        raise Failed(f'{what} differ by {found:.2g}, tolerance {tolerance:g}')
    return f'{found:.1e} (tolerance {tolerance:g})'

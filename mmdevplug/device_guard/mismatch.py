"""Describe an operation whose operands are on different devices."""

from typing import NamedTuple, Optional, Tuple

import torch


class Operand(NamedTuple):
    """A tensor that an operation got."""

    role: str  #: The name of the argument, e.g. ``'weight'`` or ``'tensors[1]'``.
    device: torch.device  #: Where the tensor is.
    dtype: torch.dtype  #: Its type.
    shape: Tuple[int, ...]  #: Its sizes.
    #: Whether PyTorch accepts it on another device, e.g. a number on the CPU.
    left_alone: bool = False
    variable: str = ''  #: Its name on the user's line, where it has one.

    def __str__(self) -> str:
        shape = 'x'.join(map(str, self.shape)) or 'a number'
        dtype = str(self.dtype).replace('torch.', '')
        remark = ' (PyTorch takes it from there)' if self.left_alone else ''
        name = f'{self.variable} ({self.role})' if self.variable else self.role
        return f'{name}: {self.device}, {dtype}, {shape}{remark}'


class Source(NamedTuple):
    """A line of the user's own code."""

    file: str
    line: int
    code: str
    function: str = ''  #: The function that the line is in, e.g. ``'Trainer.compute_loss'``.

    def __str__(self) -> str:
        return f'{self.file}:{self.line}: {self.code}'


class Mismatch(NamedTuple):
    """An operation whose operands are on different devices."""

    operation: str  #: E.g. ``'torch.stack'``.
    operands: Tuple[Operand, ...]  #: One for each tensor.
    #: Path and class of the innermost module: ``'decode_head.conv_seg (Conv2d)'``; ``''`` outside.
    module: str
    backward: str  #: The graph node whose backward ran, or ``''``.
    source: Optional[Source]  #: The innermost line outside the libraries.

    @property
    def devices(self) -> Tuple[torch.device, ...]:
        """The devices of the operands that must be on one device."""
        return tuple(dict.fromkeys(each.device for each in self.operands if not each.left_alone))

    def where(self) -> str:
        """The place of the operation in the model, or else the function."""
        backward = f'the backward of {self.backward}' if self.backward else ''
        found = ', '.join(filter(None, (self.module, backward)))
        if not found and self.source is not None and self.source.function:
            return f'{self.source.function}()'
        return found or 'outside the model'

    def __str__(self) -> str:
        lines = [
            f'{self.operation} got operands on {", ".join(map(str, self.devices))}; '
            f'it takes one device.',
            *(f'  {operand}' for operand in self.operands),
            f'  in: {self.where()}',
            f'  at: {self.source or "no line of Python"}',
        ]
        return '\n'.join(lines)

"""The model of a config: built without memory where PyTorch can, counted, and weighed."""

import copy
from contextlib import nullcontext
from typing import Any, Dict, Iterator, Optional, Tuple

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, OPTIMIZERS
from torch import nn

from mmdevplug.device import Accelerator
from mmdevplug.errors import first_line

from .findings import Finding
from .setting import gigabytes

SECTION = 'config'

#: The largest part of a device's memory that what is counted may take, to leave room for the rest.
COMFORTABLE_PART = 0.5


def examine(cfg: Config, accelerator: Optional[Accelerator], ranks: int) -> Iterator[Finding]:
    """Build the model and predict what a device has to hold.

    Args:
        cfg (Config): With its default scope set.
        accelerator (Accelerator, optional): None if there is none.
        ranks (int): How many processes would train.
    """
    if cfg.get('model') is None:
        yield Finding(
            SECTION,
            'error',
            'the config has no model',
            'there is nothing to train.',
            "model = dict(type='...')",
        )
        return
    if not can_build_on_meta():
        yield Finding(
            SECTION,
            'note',
            f'torch {torch.__version__} cannot build a model without memory (torch 2.0 can); it '
            f'was not built',
        )
        return
    try:
        model, on_host = build(cfg)
    except Exception as error:
        # Models fail in as many ways as there are.
        yield Finding(
            SECTION,
            'error',
            f'building the model fails with {type(error).__name__}: {error}',
            'the job stops there.',
            'model = dict(...)  # correct what the message names',
        )
        return
    if on_host:
        yield Finding(
            SECTION,
            'note',
            'the model was built on the host, because it computes with tensors while it is built',
        )
    yield _weigh(model, cfg, accelerator, ranks)


def can_build_on_meta() -> bool:
    """Whether this PyTorch has a default device that holds shapes alone."""
    return hasattr(torch.device, '__enter__')


def build(cfg: Config) -> Any:
    """Build the model of a config without its weights' memory.

    Returns:
        tuple: The model, and whether it had to be built with memory after all.
    """
    try:
        with torch.device('meta'):
            return MODELS.build(copy.deepcopy(cfg.model)), False
    except (RuntimeError, NotImplementedError) as error:
        # Stochastic depth is often a list of numbers taken from a tensor.
        if 'meta' not in str(error):
            raise
    with nullcontext():
        return MODELS.build(copy.deepcopy(cfg.model)), True


def _weigh(
    model: nn.Module, cfg: Config, accelerator: Optional[Accelerator], ranks: int
) -> Finding:
    trained = [p for p in model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in model.parameters())
    trained_bytes = _bytes_of(trained)
    factor, unknown = state_factor(cfg)
    parts: Dict[str, float] = {
        'parameters': _bytes_of(model.parameters()),
        'buffers': _bytes_of(model.buffers()),
        'gradients': trained_bytes,
    }
    if factor is not None:
        parts['optimizer state'] = factor * trained_bytes
    needed = sum(parts.values())
    memory = None if accelerator is None else accelerator.memory_total(accelerator.device(0))
    if memory is not None and accelerator is not None and accelerator.shares_devices:
        memory //= ranks
    told = ', '.join(f'{name} {gigabytes(size)}' for name, size in parts.items())
    found = (
        f'the model has {count:,} parameters, of which {sum(p.numel() for p in trained):,} are '
        f'trained; each device holds {gigabytes(needed)} ({told}), activations not counted'
    )
    if factor is None:
        found += f'; the state of the optimizer is not known: {unknown}'
    found += '' if memory is None else f'; it has {gigabytes(memory)}'
    data = dict(
        parameters=count,
        trained=sum(p.numel() for p in trained),
        memory_parts=parts,
        memory_total=memory,
        state_factor=factor,
    )
    level, why, remedy = _judge(needed, memory)
    return Finding(SECTION, level, found, why, remedy, data)


def _judge(needed: float, memory: Optional[float]) -> Any:
    remedy = "optim_wrapper.optimizer = dict(type='SGD', lr=..., momentum=0)  # no state"
    if memory is None or needed <= COMFORTABLE_PART * memory:
        return 'ok', '', ''
    if needed > memory:
        return 'error', 'the device has less memory than that, even without activations.', remedy
    return 'warning', 'little is left for activations.', 'train_dataloader.batch_size = 1'


def _bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def state_factor(cfg: Config) -> Tuple[Optional[float], str]:
    """Bytes of optimizer state for each byte of parameters, found by a step of a small matrix.

    Args:
        cfg (Config): With ``optim_wrapper.optimizer``.

    Returns:
        tuple: The number, None if the optimizer cannot be tried alone, and why it cannot.
    """
    options = (cfg.get('optim_wrapper') or {}).get('optimizer')
    if not isinstance(options, dict) or 'type' not in options:
        return None, 'the config has no optim_wrapper.optimizer.type'
    weight = nn.Parameter(torch.zeros(64, 64, device='cpu'))
    weight.grad = torch.ones_like(weight)
    try:
        optimizer = OPTIMIZERS.build(dict(copy.deepcopy(options), params=[weight]))
        optimizer.step()
    except Exception as error:
        # Somebody's optimizer: a closure, a process group or a device may be what it misses.
        return None, f'tried alone it fails with {type(error).__name__}: {first_line(error)}'
    tensors = [v for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor)]
    return _bytes_of([t for t in tensors if t.numel() > 1]) / _bytes_of([weight]), ''

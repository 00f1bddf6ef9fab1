"""The model of a config: built without memory where PyTorch can, counted, and weighed."""

from typing import Any, Dict, Iterator, Optional

import torch
from mmengine.config import Config
from torch import nn

from mmdevplug.accelerators import Accelerator
from mmdevplug.config.model_parallel import ModelParallelOptions
from mmdevplug.environments.launch import LaunchEnv
from mmdevplug.errors import DevPlugError
from mmdevplug.model_parallel import DevicePlan
from mmdevplug.model_parallel.meta_build import build, can_build_on_meta
from mmdevplug.model_parallel.parallelism import Parallelism
from mmdevplug.model_parallel.sizes import state_factor
from mmdevplug.utils.byte_sizes import format_bytes

from .findings import Finding

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
        model, on_host = build(cfg.model)
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
    spread = None
    if accelerator is not None:
        try:
            spread = _spread(model, cfg, accelerator, ranks)
        except DevPlugError as error:
            yield Finding(
                SECTION,
                'error',
                f'the model cannot be spread over devices: {error}',
                'the job stops before the model is built.',
                'model_parallel = dict(enable=False)',
            )
    yield _weigh(model, cfg, accelerator, ranks, spread)
    if spread is not None:
        yield Finding(SECTION, 'ok', _describe(spread), data=dict(loads=spread.loads))


def _spread(
    model: nn.Module, cfg: Config, accelerator: Accelerator, ranks: int
) -> Optional[DevicePlan]:
    """The plan by which training would spread the model, None if it stays on one device."""
    options = ModelParallelOptions.from_config(cfg.get('model_parallel'))
    optimizer = (cfg.get('optim_wrapper') or {}).get('optimizer')
    parallelism = Parallelism(options, model, optimizer)
    if parallelism.wanted:
        env = LaunchEnv('pytorch', world_size=ranks, local_world_size=ranks)
        parallelism.choose_devices(accelerator, env)
    return parallelism.plan


def _describe(plan: DevicePlan) -> str:
    loads = ', '.join(f'{device} {format_bytes(load)}' for device, load in plan.loads.items())
    return f'the model is spread over devices, activations not counted: {loads}'


def _weigh(
    model: nn.Module,
    cfg: Config,
    accelerator: Optional[Accelerator],
    ranks: int,
    spread: Optional[DevicePlan],
) -> Finding:
    trained = [p for p in model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in model.parameters())
    trained_bytes = _bytes_of(trained)
    factor, unknown = state_factor((cfg.get('optim_wrapper') or {}).get('optimizer'))
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
    told = ', '.join(f'{name} {format_bytes(size)}' for name, size in parts.items())
    holder = 'device' if spread is None else 'group of devices'
    found = (
        f'the model has {count:,} parameters, of which {sum(p.numel() for p in trained):,} are '
        f'trained; each {holder} holds {format_bytes(needed)} ({told}), activations not counted'
    )
    if factor is None:
        found += f'; the state of the optimizer is not known: {unknown}'
    found += '' if memory is None else f'; it has {format_bytes(memory)}'
    data = dict(
        parameters=count,
        trained=sum(p.numel() for p in trained),
        memory_parts=parts,
        memory_total=memory,
        state_factor=factor,
    )
    level, why, remedy = ('ok', '', '') if spread else _judge(needed, memory)
    return Finding(SECTION, level, found, why, remedy, data)


def _judge(needed: float, memory: Optional[float]) -> Any:
    remedy = 'model_parallel = dict(enable=True)  # over several devices'
    if memory is None or needed <= COMFORTABLE_PART * memory:
        return 'ok', '', ''
    if needed > memory:
        return 'error', 'the device has less memory than that, even without activations.', remedy
    return 'warning', 'little is left for activations.', 'train_dataloader.batch_size = 1'


def _bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

"""Build the model of a config, without memory where PyTorch can, and add up what it takes."""

from typing import Dict, Iterator, Optional

import torch
from mmengine.config import Config
from torch import nn

from mmdevplug.accelerators import Accelerator
from mmdevplug.config.model_parallel import ModelParallelOptions
from mmdevplug.environments.launch import LaunchEnv
from mmdevplug.errors import DevPlugError
from mmdevplug.explanations.versions import explain_import
from mmdevplug.model_parallel import DevicePlan
from mmdevplug.model_parallel.apply_options import Parallelism
from mmdevplug.model_parallel.meta_build import build, can_build_on_meta
from mmdevplug.model_parallel.sizes import state_factor
from mmdevplug.utils.byte_sizes import format_bytes

from .findings import Finding, Section

section = Section('config')

#: The largest part of a device's memory for weights and states; the rest is for activations.
COMFORTABLE_PART = 0.5


def examine(cfg: Config, accelerator: Optional[Accelerator], ranks: int) -> Iterator[Finding]:
    """Build the model and predict what a device holds in a training of ``ranks`` processes."""
    if cfg.get('model') is None:
        text, why = 'the config has no model', 'there is nothing to train.'
        yield section.error(text, why, "model = dict(type='...')")
        return
    if not can_build_on_meta():
        text = f'torch {torch.__version__} cannot build a model without memory (torch 2.0 can)'
        yield section.note(f'{text}; it was not built')
        return
    try:
        model, on_host = build(cfg.model)
    except Exception as error:
        # A model may raise anything.
        problems = explain_import(error)
        yield section.error(
            f'building the model fails with {type(error).__name__}: {error}',
            'the job stops there.',
            problems[0].command
            if problems
            else 'model = dict(...)  # correct what the message names',
        )
        return
    if on_host:
        text = 'because it computes with tensors while it is built'
        yield section.note(f'the model was built on the host, {text}')
    spread = None
    if accelerator is not None:
        try:
            spread = _spread(model, cfg, accelerator, ranks)
        except DevPlugError as error:
            yield section.error(
                f'the model cannot be spread over devices: {error}',
                'the job stops before the model is built.',
                'model_parallel = dict(enable=False)',
            )
    yield _predict_memory(model, cfg, accelerator, ranks, spread)
    if spread is not None:
        each = (f'{device} {format_bytes(load)}' for device, load in spread.loads.items())
        text = f'the model is spread over devices, activations not counted: {", ".join(each)}'
        level = 'warning' if spread.warning else 'ok'
        yield section.finding(level, text, spread.warning, data=dict(loads=spread.loads))


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


def _predict_memory(
    model: nn.Module,
    cfg: Config,
    accelerator: Optional[Accelerator],
    ranks: int,
    spread: Optional[DevicePlan],
) -> Finding:
    trained = [p for p in model.parameters() if p.requires_grad]
    count, trained_count = (sum(p.numel() for p in one) for one in (model.parameters(), trained))
    factor, unknown = state_factor((cfg.get('optim_wrapper') or {}).get('optimizer'))
    held = dict(parameters=model.parameters(), buffers=model.buffers(), gradients=trained)
    parts: Dict[str, float] = {
        name: sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        for name, tensors in held.items()
    }
    if factor is not None:
        parts['optimizer state'] = factor * parts['gradients']
    needed = sum(parts.values())
    memory = None
    if accelerator is not None:
        memory = accelerator.memory_total(accelerator.device(0))
        if memory is not None and accelerator.shares_devices:
            memory //= ranks
    listed = ', '.join(f'{name} {format_bytes(size)}' for name, size in parts.items())
    holder = 'device' if spread is None else 'group of devices'
    found = (
        f'the model has {count:,} parameters, of which {trained_count:,} are trained; each '
        f'{holder} holds {format_bytes(needed)} ({listed}), activations not counted'
    )
    if factor is None:
        found += f'; the state of the optimizer is not known: {unknown}'
    if memory is not None:
        found += f'; it has {format_bytes(memory)}'
    level, why, remedy = 'ok', '', ''
    if spread is None and memory is not None and needed > memory:
        level, why = 'error', 'the device has less memory than that, even without activations.'
        remedy = 'model_parallel = dict(enable=True)  # over several devices'
    elif spread is None and memory is not None and needed > COMFORTABLE_PART * memory:
        level, why = 'warning', 'little memory remains for activations.'
        remedy = 'train_dataloader.batch_size = 1'
    data = dict(
        parameters=count,
        trained=trained_count,
        memory_parts=parts,
        memory_total=memory,
        state_factor=factor,
    )
    return section.finding(level, found, why, remedy, data)

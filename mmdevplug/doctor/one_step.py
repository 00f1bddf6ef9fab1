"""Train one step of a config, as a job of several ranks would, in a single process."""

import sys
import tempfile
from contextlib import redirect_stdout
from typing import Any, Iterator, Tuple

from mmengine.config import Config
from mmengine.optim import OptimWrapper
from mmengine.registry import RUNNERS

from mmdevplug.accelerators import Accelerator
from mmdevplug.errors import first_line
from mmdevplug.gradients.unused_parameters import REMEDY, describe_unused, listing_unused

from .findings import Finding, Section

section = Section('config')


def strip_config(cfg: Config) -> None:
    """Remove what writes, watches or resumes: only one step is trained."""
    for key in ('visualizer', 'custom_hooks', 'resume', 'load_from'):
        cfg.pop(key, None)
    cfg.default_hooks = dict(cfg.get('default_hooks') or {}, checkpoint=None)


def prepare_step(runner: Any) -> Tuple[Any, OptimWrapper]:
    """Get a batch and the optimizer, without initializing weights, which may be downloaded."""
    optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    optim_wrapper.initialize_count_status(runner.model, 0, 1)
    batch = next(iter(runner.build_dataloader(runner._train_dataloader, seed=0)))
    runner.model.train()
    return batch, optim_wrapper


def examine(cfg: Config, accelerator: Accelerator, ranks: int) -> Iterator[Finding]:
    """Look for parameters that get no gradient, which a job of several ranks refuses."""
    trains = cfg.get('train_dataloader') is not None
    if ranks == 1 or not trains or not describe_unused(['any'], cfg, accelerator, ''):
        return
    strip_config(cfg)
    cfg.launcher = 'none'
    cfg.runner_type = 'DeviceRunner'
    with tempfile.TemporaryDirectory() as cfg.work_dir, redirect_stdout(sys.stderr):
        try:
            runner = RUNNERS.build(cfg)
            batch, optim_wrapper = prepare_step(runner)
            with listing_unused(runner.model) as unused:
                runner.model.train_step(batch, optim_wrapper=optim_wrapper)
        except Exception as error:
            # Data may be missing here, and a model may raise anything.
            text = f'{type(error).__name__}: {first_line(error)}'
            yield section.note(f'one training step could not be tried: {text}')
            return
    found = describe_unused(unused(), cfg, accelerator, f'A job of {ranks} ranks')
    if found:
        why = f'if that is meant, {REMEDY}.'
        yield section.warning(found, why, 'find_unused_parameters = True')

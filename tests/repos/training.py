"""Real model repositories, trained from their own configs: by MMEngine's runner and by ours.

A :class:`Recipe` names a config of a repository and what shrinks it. :func:`train_stock` trains
it with MMEngine's own runner in one process on the CPU; :func:`train_ours` with a base config of
ours, in any number of ranks on any device. Both return what can be compared.
"""

import copy
import os
import runpy
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Dict, Tuple

import torch.distributed
from mmengine.config import Config
from mmengine.device import utils as mmengine_device
from mmengine.hooks import Hook
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from tests.jobs import base_config_of, install_card, trained_weights

#: Iterations of each training, half of which a resumed one does again.
ITERATIONS = 10


@dataclass(frozen=True)
class Recipe:
    """What to train.

    Attributes:
        base (str): A config of the repository, ``'mmseg::folder/name.py'``.
        changes (dict): Keys that the written config lays over it, as MMEngine inherits.
        batch (int): Samples of an iteration, of all ranks together.
        modules (tuple): Modules of tests to import first, with datasets and the like.
    """

    base: str
    changes: Dict[str, Any] = field(default_factory=dict)
    batch: int = 4
    modules: tuple = ()


def iteration_schedule() -> Dict[str, Any]:
    """Keys for a config with an iteration-based loop: checkpoints half way and at the end."""
    half = ITERATIONS // 2
    return dict(
        train_cfg=dict(max_iters=ITERATIONS, val_interval=ITERATIONS),
        default_hooks=dict(
            logger=dict(interval=1), checkpoint=dict(interval=half, save_best=None)
        ),
    )


def epoch_schedule() -> Dict[str, Any]:
    """The same for epochs; the dataset is to have ``batch * ITERATIONS / 2`` samples."""
    return dict(
        train_cfg=dict(max_epochs=2, val_interval=2),
        default_hooks=dict(logger=dict(interval=1), checkpoint=dict(interval=1, save_best=None)),
    )


def loader(batch: int, **changes: Any) -> Dict[str, Any]:
    """Keys for a data loader of this process's share, without workers and without shuffling."""
    share = batch // int(os.environ.get('WORLD_SIZE', 1))
    return dict(
        batch_size=share,
        num_workers=0,
        persistent_workers=False,
        sampler=dict(shuffle=False),
        **changes,
    )


def write_config(path: Path, recipe: Recipe, accelerator: str = '') -> Path:
    """Write a user's config: the repository's own, a base config of ours, and changes.

    Args:
        path (Path): The file.
        recipe (Recipe): What to train.
        accelerator (str): Which device, or nothing for a config without a word of ours.

    Returns:
        Path: The file.
    """
    lines = [f'{key} = {value!r}' for key, value in recipe.changes.items()]
    bases = repr(recipe.base)
    if accelerator:
        name = base_config_of(accelerator)
        bases += f", __import__('mmdevplug').base_config({name!r})"
        # Equal weights on all devices.
        lines.append(f"accelerator = dict(type={accelerator!r}, initial_weights='host')")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('\n'.join([f'_base_ = [{bases}]', *lines, '']))
    return path


@lru_cache(maxsize=None)
def read_config(path: Path) -> Config:
    """Read a config once: for ``mmdet::`` MMEngine reads an index of 400 files each time."""
    return Config.fromfile(str(path))


def load_config(path: Path, recipe: Recipe, work_dir: Path, **options: Any) -> Config:
    """Read a config as the repositories' ``tools/train.py`` do, for this process's variables."""
    cfg = copy.deepcopy(read_config(path))
    cfg.launcher = 'pytorch' if 'RANK' in os.environ else 'none'
    cfg.work_dir = str(work_dir)
    cfg.randomness = dict(seed=0)
    cfg.merge_from_dict(dict(train_dataloader=loader(recipe.batch)))
    for name in ('val_dataloader', 'test_dataloader'):
        if cfg.get(name) is None:
            continue
        cfg.merge_from_dict({name: loader(int(os.environ.get('WORLD_SIZE', 1)))})
    cfg.merge_from_dict(options)
    return cfg


def build_runner(cfg: Config) -> Runner:
    """Build the runner as the repositories' ``tools/train.py`` do."""
    return RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)


class Recorder(Hook):
    """Keeps what each iteration and each validation of a run told."""

    priority = 'VERY_LOW'

    def __init__(self):
        self.losses, self.metrics = [], []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.losses.append({name: value.item() for name, value in outputs.items()})

    def after_val_epoch(self, runner, metrics=None):
        # The metrics of mmagic are tensors.
        self.metrics.append(
            {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in metrics.items()}
        )


def train_stock(recipe: Recipe, folder: Path) -> Dict[str, Any]:
    """Train with MMEngine's own runner, in this process alone and on the CPU.

    Returns:
        dict: ``losses`` (for each iteration: name to figure), ``metrics`` of the validation,
        ``weights`` (name to array).
    """
    _prepare(recipe)
    path = write_config(folder / 'stock.py', recipe)
    runner = build_runner(load_config(path, recipe, folder / 'stock'))
    assert type(runner) is Runner
    return _train(runner)


def train_ours(recipe: Recipe, accelerator: str, folder: Path) -> Dict[str, Any]:
    """Train on a device, resume from half way, and test the last checkpoint.

    Returns:
        dict: As :func:`train_stock`, and ``device``, ``files`` (names of checkpoints),
        ``resumed`` (the losses of the run that began half way), ``tested`` (what the test loop
        told of the last checkpoint).
    """
    _prepare(recipe, accelerator)
    rank = os.environ.get('RANK', '0')
    path = write_config(folder / f'rank_{rank}' / 'ours.py', recipe, accelerator)
    runner = build_runner(load_config(path, recipe, folder / 'ours'))
    found = _train(runner)
    device = str(next(runner.model.parameters()).device)
    found.update(device=device, wrapper=type(runner.model).__name__)
    files = sorted((folder / 'ours').glob('*.pth'), key=lambda file: int(file.stem.split('_')[-1]))
    found['files'] = [file.name for file in files]
    del runner

    half = dict(resume=True, load_from=str(files[0]))
    runner = build_runner(load_config(path, recipe, folder / 'resumed', **half))
    found['resumed'] = _train(runner)['losses']
    del runner

    last = dict(load_from=str(files[-1]))
    runner = build_runner(load_config(path, recipe, folder / 'tested', **last))
    found['tested'] = dict(runner.test())
    return found


def train_by(runners: Tuple[str, ...], recipe: Recipe, folder: Path) -> Dict[str, Any]:
    """Train a recipe by several runners, one after the other in this process.

    Args:
        runners (tuple): ``'stock'`` for MMEngine's own on the CPU, or the name of an accelerator
            for ours.
        recipe (Recipe): What to train.
        folder (Path): Where each of them writes.

    Returns:
        dict: For each runner what :func:`train_stock` returns, and ``device``.
    """
    install_card('zeta')  # before the first backward, which counts the devices
    rank, found = os.environ.get('RANK'), {}
    for name in runners:
        stock = name == 'stock'
        path = folder / name / f'rank_{rank or 0}' / 'config.py'
        options: Dict[str, Any] = {}
        if stock and rank is not None:
            # MMEngine's own start and wrapper ask for a GPU.
            torch.distributed.init_process_group('gloo')
            options['model_wrapper_cfg'] = dict(type='MMDistributedDataParallel', device_ids=None)
        _prepare(recipe, 'cpu' if stock else name)
        cfg = load_config(
            write_config(path, recipe, '' if stock else name), recipe, folder / name, **options
        )
        runner = build_runner(cfg)
        assert (type(runner) is Runner) == stock
        found[name] = _train(runner)
        found[name]['device'] = str(next(runner.model.parameters()).device)
    return found


def _prepare(recipe: Recipe, accelerator: str = 'cpu') -> None:
    install_card(accelerator)
    if accelerator == 'cpu':
        # MMEngine's own runner takes a GPU where there is one, as it found at its import.
        os.environ['CUDA_VISIBLE_DEVICES'], mmengine_device.DEVICE = '', 'cpu'
    for module in recipe.modules:
        module = import_module(module)
        # As tools/train.py of a library does for registries that do not know their modules.
        if hasattr(module, 'register_all_modules'):
            module.register_all_modules(init_default_scope=False)


def _train(runner: Runner) -> Dict[str, Any]:
    recorder = Recorder()
    runner.register_hook(recorder)
    runner.train()
    return dict(
        losses=recorder.losses,
        metrics=recorder.metrics[-1] if recorder.metrics else {},
        weights=trained_weights(runner),
    )


def train_all(recipes: Dict[str, Recipe], accelerator: str, folder: Path) -> Dict[str, Any]:
    """Train several recipes one after the other in one job; ``'stock'`` is no accelerator."""
    found = {}
    for name, recipe in recipes.items():
        if accelerator == 'stock':
            found[name] = train_stock(recipe, folder / name)
        else:
            found[name] = train_ours(recipe, accelerator, folder / name)
    return found


def run_script(script: Path, arguments: list) -> None:
    """Run a training script of a repository in this process, as a launcher would."""
    before = sys.argv
    sys.argv = [str(script), *map(str, arguments)]
    try:
        runpy.run_path(str(script), run_name='__main__')
    finally:
        sys.argv = before


def run_tools(library: str, name: str, *arguments: Any) -> None:
    """Run a script of ``tools`` that a library brings along."""
    (folder,) = find_spec(library).submodule_search_locations
    run_script(Path(folder) / '.mim' / 'tools' / name, list(arguments))


def run_tools_train(library: str, config: Path, work_dir: Path, *options: str) -> None:
    """Train by a library's own script in a rank, with a batch of two and without shuffling."""
    arguments = [config, '--work-dir', work_dir, '--launcher', 'pytorch', '--cfg-options']
    arguments += ['train_dataloader.batch_size=2', 'train_dataloader.sampler.shuffle=False']
    run_tools(library, 'train.py', *arguments, 'randomness.seed=0', *options)


#: For configs whose loaders have workers that stay.
WITHOUT_WORKERS = [
    f'{split}_dataloader.{option}'
    for split in ('train', 'val')
    for option in ('num_workers=0', 'persistent_workers=False')
]


def mean_losses(ranks: list, name: str, key: str = 'losses', loss: str = 'loss') -> list:
    """For each iteration, a loss of a recipe averaged over ranks."""
    runs = [rank[name][key] for rank in ranks]
    return [sum(one[loss] for one in step) / len(runs) for step in zip(*runs)]

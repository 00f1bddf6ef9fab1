"""Collect what a runner has to save, as MMEngine does, without copies."""

import time
from functools import lru_cache
from typing import Any, Dict, Optional

import mmengine
from mmengine.optim import OptimWrapper
from mmengine.runner.checkpoint import get_state_dict
from mmengine.utils import get_git_hash

from mmdevplug.errors import CheckpointError
from mmdevplug.utils.model import unwrap_model


def collect_checkpoint(
    runner: Any,
    save_optimizer: bool = True,
    save_param_scheduler: bool = True,
    meta: Optional[Dict[str, Any]] = None,
    by_epoch: bool = True,
) -> Dict[str, Any]:
    """Collect what :meth:`mmengine.runner.Runner.save_checkpoint` writes, tensors where they are.

    Raises:
        CheckpointError: If there is no optimizer to save.
        TypeError: If ``meta`` is no dict.
    """
    if meta is not None and not isinstance(meta, dict):
        raise TypeError(f'meta should be a dict or None, but got {type(meta)}')
    checkpoint: Dict[str, Any] = {
        'meta': _meta(runner, dict(meta or {}), by_epoch),
        # Children may be wrapped, too; their names are saved without `module.`.
        'state_dict': get_state_dict(unwrap_model(runner.model)),
        'message_hub': runner.message_hub.state_dict(),
    }
    if save_optimizer:
        if not isinstance(runner.optim_wrapper, OptimWrapper):
            raise CheckpointError(
                f'the optimizer wrapper is of type {type(runner.optim_wrapper).__name__}; '
                f'expected an OptimWrapper or OptimWrapperDict. Save without it: '
                f'default_hooks.checkpoint.save_optimizer=False.'
            )
        checkpoint['optimizer'] = runner.optim_wrapper.state_dict()
    if save_param_scheduler and runner.param_schedulers is None:
        runner.logger.warning('There are no parameter schedulers, so none are saved.')
    elif save_param_scheduler:
        checkpoint['param_schedulers'] = _scheduler_states(runner.param_schedulers)
    runner.call_hook('before_save_checkpoint', checkpoint=checkpoint)
    return checkpoint


def _meta(runner: Any, meta: Dict[str, Any], by_epoch: bool) -> Dict[str, Any]:
    # MMEngine counts an epoch or an iteration only after the hooks that save it.
    meta.setdefault('epoch', runner.epoch + 1 if by_epoch else runner.epoch)
    meta.setdefault('iter', runner.iter if by_epoch else runner.iter + 1)
    meta.update(
        cfg=_pretty_text(runner.cfg),
        seed=runner.seed,
        experiment_name=runner.experiment_name,
        time=time.strftime('%Y%m%d_%H%M%S', time.localtime()),
        mmengine_version=_mmengine_version(),
    )
    if hasattr(runner.train_dataloader.dataset, 'metainfo'):
        meta['dataset_meta'] = runner.train_dataloader.dataset.metainfo
    return meta


@lru_cache(maxsize=None)
def _mmengine_version() -> str:
    return mmengine.__version__ + get_git_hash()  # which starts a process


_formatted: Dict[str, str] = {}


def _pretty_text(cfg: Any) -> str:
    """``cfg.pretty_text``, which takes a tenth of a second, once for each state of the config."""
    plain = repr(cfg)
    if plain not in _formatted:
        _formatted.clear()
        _formatted[plain] = cfg.pretty_text
    return _formatted[plain]


def _scheduler_states(schedulers: Any) -> Any:
    if isinstance(schedulers, dict):
        return {name: [each.state_dict() for each in some] for name, some in schedulers.items()}
    return [each.state_dict() for each in schedulers]

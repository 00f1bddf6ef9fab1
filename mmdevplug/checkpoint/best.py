"""Save the checkpoints with the best scores of a validation."""

from typing import Callable, Dict, Set

import numpy as np
import torch
from mmengine.hooks import CheckpointHook

from mmdevplug.utils.annotations import AnyRunner

#: Types of scores; a metric may return anything else besides.
NUMBERS = (bool, int, float, np.number, torch.Tensor)


class BestCheckpoints:
    """Saves a checkpoint for each key of ``save_best`` whose score is the best so far.

    Args:
        hook (CheckpointHook): With the keys, their rules and the names of files.
        resumable (bool): Whether a file holds what resuming needs.
    """

    def __init__(self, hook: CheckpointHook, resumable: bool) -> None:
        self._hook = hook
        self._options = dict(save_optimizer=resumable, save_param_scheduler=resumable)
        self._warned: Set[str] = set()

    def save(
        self, runner: AnyRunner, metrics: Dict[str, object], step: int, save: Callable[..., None]
    ) -> bool:
        """Save for the metrics of a validation; return whether anything was saved.

        Args:
            runner (Runner): With the best scores so far in its message hub.
            metrics (dict): By key.
            step (int): The epoch or iteration.
            save (callable): Takes a path, the paths to remove then, and the options of
                :meth:`.saving.CheckpointSaver.save`.
        """
        hook, hub, saved_any = self._hook, runner.message_hub, False
        rules = hook.rules
        if 'auto' in hook.key_indicators:
            try:
                hook._init_rule(rules, [next(iter(metrics))])
            except ValueError as error:
                hook.rules = rules
                self._warn(runner, f'{error} Set default_hooks.checkpoint.rule')
                return False
        single = len(hook.key_indicators) == 1
        for key, rule in zip(hook.key_indicators, hook.rules):
            score, suffix = metrics.get(key), '' if single else f'_{key}'
            if score != score or not isinstance(score, NUMBERS):
                said = f'{key!r} is {score!r}, with which nothing compares, of {sorted(metrics)}'
                self._warn(runner, said)
                continue
            best = hub.get_info(f'best_score{suffix}', hook.init_value_map[rule])
            if not hook.is_better_than[key](score, best):
                continue
            saved_any = True
            name = f'best_{key}_{hook.filename_tmpl.format(step)}'.replace('/', '_')
            path = hook.path_of(name)
            outdated = [hub.get_info(f'best_ckpt{suffix}', path)]
            hub.update_info(f'best_score{suffix}', score)
            hub.update_info(f'best_ckpt{suffix}', path)
            save(path, outdated, names_it=False, by_epoch=False, **self._options)
            if single:
                hook.best_ckpt_path = path
            else:
                hook.best_ckpt_path_dict[key] = path
            unit = 'epoch' if hook.by_epoch else 'iter'
            runner.logger.info(
                f'The best checkpoint with {score:0.4f} {key} at {step} {unit} is saved to {name}.'
            )
        return saved_any

    def _warn(self, runner: AnyRunner, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            runner.logger.warning(
                f'default_hooks.checkpoint.save_best={self._hook.save_best}: {why}. Training goes '
                f'on without a best checkpoint of it; correct the config and resume.'
            )

"""Refuse checkpoints from which training cannot go on as the config says, and say what to do."""

from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

from mmengine.hooks import EMAHook
from torch.optim import Optimizer

from mmdevplug.errors import CheckpointError
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.logs import log_warning

from .finding import newest_files
from .reading import read_checkpoint
from .states import stateful_hooks

#: Arguments that releases of PyTorch have added, and how the step is computed.
_OPTIONAL = {
    'capturable',
    'decoupled_weight_decay',
    'differentiable',
    'foreach',
    'fused',
    'maximize',
}
_LIKE_PARAMETERS = ('momentum_buffer', 'exp_avg', 'exp_avg_sq', 'square_avg')


def check_complete(
    checkpoint: Mapping[str, Any], filename: str, with_schedulers: bool, work_dir: str
) -> None:
    """Refuse a checkpoint without the state of the optimizer or of the schedulers.

    Args:
        checkpoint (dict): What was read.
        filename (str): Of which file.
        with_schedulers (bool): Whether it must hold states of schedulers.
        work_dir (str): The folder to look for a complete one in, besides that of the file.
    """
    lacking = _lacking(checkpoint, with_schedulers)
    if not lacking:
        return
    folders = [*dict.fromkeys([Path(filename).parent, Path(work_dir)])]
    complete = _newest_complete(folders, filename, with_schedulers)
    advice = f'Resume from the newest complete one, {complete}'
    if complete is None:
        advice = f'There is none in {" or ".join(map(str, folders))}: save the optimizer, too'
    if lacking == ['param_schedulers']:
        advice += "; or take the config's schedules, with --resume-settings config"
    raise CheckpointError(
        f'--resume {filename}: this checkpoint holds no {" and no ".join(lacking)}, so training '
        f'would start its optimizer and schedules over. Expected a complete checkpoint. {advice}; '
        f'or take the weights alone, without --resume: --cfg-options load_from={filename}. Files '
        f'of save_best are complete with default_hooks.checkpoint.resumable_best=True.'
    )


def _lacking(checkpoint: Mapping[str, Any], with_schedulers: bool) -> List[str]:
    keys = ['meta', 'message_hub', 'optimizer'] + ['param_schedulers'] * with_schedulers
    lacking = [key for key in keys if key not in checkpoint]
    meta = checkpoint.get('meta', dict.fromkeys(('epoch', 'iter')))
    return lacking + [f'meta.{key}' for key in ('epoch', 'iter') if key not in meta]


def _newest_complete(
    folders: Sequence[Path], refused: str, with_schedulers: bool
) -> Optional[Path]:
    for path in newest_files(folders):
        if path.resolve() == Path(refused).resolve():
            continue
        try:
            found = read_checkpoint(str(path))
        except (CheckpointError, OSError):
            continue
        if isinstance(found, dict) and not _lacking(found, with_schedulers):
            return path
    return None


# optimizers and schedulers ----------------------------------------------------------------------


def optimizer_states(
    checkpoint: Mapping[str, Any], names: Sequence[str], where: str
) -> List[Mapping[str, Any]]:
    """Return the state of each optimizer; refuse a checkpoint with others."""
    saved = checkpoint['optimizer']
    found = [''] if 'param_groups' in saved else sorted(saved)
    if found != sorted(names):
        raise CheckpointError(
            f'{where} holds {_several(found)}, and the config has {_several(names)}. '
            f'{_ways_out(where)}'
        )
    return [saved if name == '' else saved[name] for name in names]


def _several(names: Sequence[str]) -> str:
    return 'one optimizer' if list(names) == [''] else f'optimizers {", ".join(sorted(names))}'


def _ways_out(where: str) -> str:
    return (
        f'Expected the same; resume with the config of the checkpoint, or take its weights alone, '
        f'without --resume: --cfg-options load_from={where}.'
    )


def check_optimizer(
    optimizer: Optimizer,
    kind: str,
    saved: Mapping[str, Any],
    saved_kind: Optional[str],
    where: str,
) -> None:
    """Refuse the state of another optimizer, or of other groups of parameters.

    Args:
        optimizer (Optimizer): Of the config.
        kind (str): Its class.
        saved (dict): The state.
        saved_kind (str, optional): The class of which it is, unless any with its settings will do.
        where (str): The checkpoint.
    """
    groups, mine = saved['param_groups'], optimizer.param_groups
    lacking = sorted(set(optimizer.defaults) - _OPTIONAL - set(groups[0]))
    if (saved_kind is not None and saved_kind != kind) or lacking:
        states = sorted({name for one in saved['state'].values() for name in one})
        named = saved_kind or f'an optimizer with {", ".join(states) or "no state"}'
        raise CheckpointError(
            f'{where} holds the state of {named}, and optim_wrapper.optimizer of the config is '
            f'{kind}. {_ways_out(where)}'
        )
    sizes = [len(group['params']) for group in groups]
    own = [len(group['params']) for group in mine]
    if sizes != own:
        raise CheckpointError(
            f'{where} holds {_describe_groups(sizes)} of the optimizer {kind}, and the config has '
            f'{_describe_groups(own)} (paramwise_cfg, or what requires gradients). '
            f'{_ways_out(where)}'
        )
    numbers = [number for group in groups for number in group['params']]
    params = [param for group in mine for param in group['params']]
    for number, param in zip(numbers, params):
        state = saved['state'].get(number, {})
        for name in _LIKE_PARAMETERS:
            shape = getattr(state.get(name), 'shape', param.shape)
            if shape != param.shape:
                raise CheckpointError(
                    f'{where} holds {name} of shape {tuple(shape)} for parameter {number} of the '
                    f'optimizer, which has shape {tuple(param.shape)} in the model of the config. '
                    f'{_ways_out(where)}'
                )


def _describe_groups(sizes: List[int]) -> str:
    shown = ', '.join(map(str, sizes[:8])) + (', ...' if len(sizes) > 8 else '')
    return f'{len(sizes)} group(s) of {shown} parameter(s)'


def scheduler_kinds(
    saved: Sequence[Mapping[str, Any]], saved_kinds: Optional[Sequence[str]]
) -> List[str]:
    """Describe saved states of schedulers by their classes, or by what is in them."""
    if saved_kinds is not None and len(saved_kinds) == len(saved):
        return list(saved_kinds)
    names = ('param_name', 'begin', 'end')
    return [' '.join(f'{name}={one.get(name)}' for name in names) for one in saved]


def refuse_schedulers(saved: Sequence[str], configured: Sequence[str], where: str) -> None:
    """Refuse the states of other schedulers than those of the config."""
    raise CheckpointError(
        f'{where} holds the states of {len(saved)} scheduler(s) ({", ".join(saved)}), and '
        f'param_scheduler of the config has {len(configured)} ({", ".join(configured)}). Expected '
        f"the same; to take the config's, at the step that training has reached, resume with "
        f"--resume-settings config (accelerator.resume_settings='config')."
    )


# hooks ------------------------------------------------------------------------------------------


def adapt_to_hooks(runner: AnyRunner, checkpoint: Dict[str, Any], where: str) -> None:
    """Say which hooks have a state in the checkpoint or in the config alone.

    A checkpoint of EMAHook has the averaged weights in the place of the weights; without the hook,
    training goes on with the weights that were trained.
    """
    averages = any(isinstance(hook, EMAHook) for hook in runner.hooks)
    saved = checkpoint.get('ema_state_dict')
    begin_anew = [
        name
        for name in stateful_hooks(runner)
        if name not in checkpoint.get('mmdevplug', {}).get('hooks', [name])
    ]
    if begin_anew:
        log_warning(
            f'The config has hooks whose state {where} lacks, so they begin anew: '
            f'{", ".join(begin_anew)}. To start everything anew, take its weights alone, without '
            f'--resume: --cfg-options load_from={where}.'
        )
    if averages and saved is None:
        log_warning(
            f'The config has an EMAHook and {where} holds no averaged weights (ema_state_dict): '
            f"averaging begins with the checkpoint's weights. For averages from the beginning, "
            f'train anew, or take the weights alone, without --resume: '
            f'--cfg-options load_from={where}.'
        )
    elif saved is not None:
        weights = checkpoint['state_dict']
        names = [name[len('module.') :] for name in saved if name.startswith('module.')]
        lacking = [name for name in names if name not in weights]
        if lacking:
            raise CheckpointError(
                f'{where} holds averages (ema_state_dict) of {len(lacking)} weights that its '
                f'state_dict lacks, such as {lacking[0]}. Expected the same names; take its '
                f'weights alone, without --resume: --cfg-options load_from={where}.'
            )
        if not averages:
            for name in names:
                weights[name] = saved[f'module.{name}']
            log_warning(
                f'{where} holds averaged weights of an EMAHook, which the config lacks: training '
                f'goes on with the weights that were trained, and without averages. To keep them, '
                f"add custom_hooks=[dict(type='EMAHook')]."
            )

"""Refuse checkpoints from which training cannot go on as the config says, and say what to do."""

from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

from mmengine.hooks import EMAHook
from torch.optim import Optimizer

from mmdevplug.errors import CheckpointError
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.logs import log_warning

from .participants import stateful_hooks
from .reading import newest_files, read_checkpoint

#: Arguments that releases of PyTorch have added, and how the step is computed.
_OPTIONAL = {'capturable', 'decoupled_weight_decay', 'differentiable', 'foreach', 'fused'}
_OPTIONAL |= {'maximize'}


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
    advice = f'There is none in {" or ".join(map(str, folders))}: save the optimizer, too'
    for path in newest_files(folders):
        with suppress(CheckpointError, OSError):
            if not _lacking(read_checkpoint(str(path)), with_schedulers):
                advice = f'Resume from the newest complete one, {path}'
                break
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


def check_names(saved: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    """Refuse the states of other optimizers than those of the config, '' being a single one."""
    found = [''] if 'param_groups' in saved else sorted(saved)
    if found != sorted(names):
        raise _refusal(where, _several(found), _several(sorted(names)))


def _several(names: List[str]) -> str:
    return 'one optimizer' if names == [''] else f'optimizers {", ".join(names)}'


def _refusal(where: str, saved: str, configured: str) -> CheckpointError:
    return CheckpointError(
        f'{where} holds {saved}, and the config has {configured}. Expected the same; resume with '
        f'the config of the checkpoint, or take its weights alone, without --resume: '
        f'--cfg-options load_from={where}.'
    )


def check_optimizer(
    optimizer: Optimizer,
    kinds: Mapping[str, Any],
    saved: Mapping[str, Any],
    saved_kind: Optional[str],
    where: str,
) -> None:
    """Refuse the state of another optimizer, or of other groups of parameters.

    Args:
        optimizer (Optimizer): Of the config.
        kinds (dict): With the name of its class as ``'optimizer'``.
        saved (dict): The state.
        saved_kind (str, optional): The class of which it is, unless any with its settings will do.
        where (str): The checkpoint.
    """
    groups, mine, kind = saved['param_groups'], optimizer.param_groups, kinds['optimizer']
    if set(optimizer.defaults) - _OPTIONAL - set(groups[0]) or saved_kind not in (None, kind):
        states = sorted({name for one in saved['state'].values() for name in one})
        named = saved_kind or f'an optimizer with {", ".join(states) or "no state"}'
        raise _refusal(where, f'the state of {named}', f'optim_wrapper.optimizer {kind}')
    sizes, own = ([len(group['params']) for group in some] for some in (groups, mine))
    if sizes != own:
        unlike = f'{_groups(own)} (paramwise_cfg, or what requires gradients)'
        raise _refusal(where, f'{_groups(sizes)} of the optimizer {kind}', unlike)


def _groups(sizes: List[int]) -> str:
    shown = ', '.join(map(str, sizes[:8])) + (', ...' if len(sizes) > 8 else '')
    return f'{len(sizes)} group(s) of {shown} parameter(s)'


# hooks ------------------------------------------------------------------------------------------


def adapt_to_hooks(runner: AnyRunner, checkpoint: Dict[str, Any], where: str) -> None:
    """Say which hooks have a state in the checkpoint or in the config alone.

    A checkpoint of EMAHook has the averaged weights in the place of the weights; without the hook,
    training goes on with the weights that were trained.
    """
    saved = checkpoint.get('ema_state_dict')
    begin_anew = [
        name
        for name in stateful_hooks(runner)
        if name not in checkpoint.get('mmdevplug', {}).get('hooks', [name])
    ]
    anew = f'take its weights alone, without --resume: --cfg-options load_from={where}.'
    if begin_anew:
        log_warning(
            f'The config has hooks whose state {where} lacks, so they begin anew: '
            f'{", ".join(begin_anew)}. To start everything anew, {anew}'
        )
    if any(isinstance(hook, EMAHook) for hook in runner.hooks):
        if saved is None:
            log_warning(
                f'The config has an EMAHook and {where} holds no averaged weights '
                f"(ema_state_dict): averaging begins with the checkpoint's weights. For averages "
                f'from the beginning, train anew, or {anew}'
            )
    elif saved is not None:
        for name in saved:
            if name.startswith('module.'):
                checkpoint['state_dict'][name[len('module.') :]] = saved[name]
        log_warning(
            f'{where} holds averaged weights of an EMAHook, which the config lacks: training '
            f'goes on with the weights that were trained, and without averages. To keep them, '
            f"add custom_hooks=[dict(type='EMAHook')]."
        )

"""Load what fits of a checkpoint, and refuse one from which training cannot go on."""

import re
from collections import OrderedDict
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, Iterator, List, Mapping, Optional, Sequence, Tuple

from mmengine.hooks import EMAHook
from torch import nn
from torch.optim import Optimizer

from mmdevplug.config.fields import shortened
from mmdevplug.errors import CheckpointError, DevPlugError
from mmdevplug.patches.load_weights import load_state_dict
from mmdevplug.patches.torch_load import trust_classes
from mmdevplug.utils.annotations import AnyRunner, Checkpoint, SavedState
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.model import unwrap_model

from .reading import MapLocation, newest_files, read_checkpoint, read_for_model
from .refusals import refusal

#: Arguments that releases of PyTorch have added, and how the step is computed.
_OPTIONAL = {'capturable', 'decoupled_weight_decay', 'differentiable', 'foreach', 'fused'}
_OPTIONAL |= {'maximize'}


def load_checkpoint(
    runner: AnyRunner,
    filename: str,
    map_location: MapLocation,
    strict: bool,
    revise_keys: Sequence[Tuple[str, str]],
) -> Checkpoint:
    """Load a checkpoint into the model of a DeviceRunner without running code from it.

    Returns the checkpoint; arguments are those of :meth:`mmengine.runner.Runner.load_checkpoint`.
    """
    model, resume = unwrap_model(runner.model), runner.resume_state
    trust_classes(runner.cfg.get('checkpoint_classes') or ())  # another runner had its own
    checkpoint = read_for_model(filename, map_location, not runner.placement.whole, model)
    resume.check(runner, checkpoint, filename)
    # torch_gcu 1.10 keeps a model's first weights if it has not yet computed them.
    runner.device_context.materialize()
    # From here on as MMEngine's method.
    with runner.placement.loading():
        runner.call_hook('after_load_checkpoint', checkpoint=checkpoint)
        load_model(model, checkpoint, filename, strict, revise_keys, bool(resume.file))
    resume.compare(checkpoint, filename)
    runner.device_context.materialize()
    return checkpoint


def load_model(
    model: nn.Module,
    checkpoint: Checkpoint,
    filename: str,
    strict: bool,
    revise_keys: Sequence[Tuple[str, str]],
    resuming: bool = False,
) -> Optional[str]:
    """Load the weights of a checkpoint into a bare model.

    Args:
        model (nn.Module): Changed in place.
        checkpoint (dict): As read, with a ``state_dict``.
        filename (str): For messages.
        strict (bool): Whether to refuse a checkpoint that does not fit in full.
        revise_keys (sequence of tuple): Patterns and what replaces them in its keys.
        resuming (bool): Whether the optimizer's states follow: then all trained parameters have
            to fit. Defaults to False.

    Returns:
        str or None: What does not fit, which was also logged; None if everything does.

    Raises:
        CheckpointError: If nothing fits.
    """
    weights: Any = checkpoint['state_dict']
    releases = getattr(weights, '_metadata', None)  # of the modules that wrote it
    for pattern, replacement in revise_keys:
        weights = {re.sub(pattern, replacement, key): value for key, value in weights.items()}
    weights = OrderedDict(weights)
    weights._metadata = releases
    fit = load_state_dict(model, weights, strict, filename=filename)
    text = None if fit.complete else fit.describe(filename)
    lacking = {*fit.missing, *(refused.split(':')[0] for refused in fit.refused)}
    if resuming and lacking & {*fit.trained}:
        raise refusal(filename, f'Cannot resume: {text} The optimizer has no states for these.')
    return text


@contextmanager
def explaining_other_run(filename: str) -> Iterator[None]:
    """Explain errors of MMEngine and PyTorch when states of another run are restored."""
    try:
        yield
    except (KeyError, ValueError, RuntimeError) as error:
        of_states = not isinstance(error, RuntimeError) or 'state_dict' in str(error)
        if isinstance(error, DevPlugError) or not of_states:
            raise
        said = f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'
        other = 'It is of a run with another model, optimizer, schedule or other hooks.'
        said = f'Cannot resume from checkpoint {filename}: {said}. {other}'
        raise refusal(filename, said) from error


def check_complete(
    checkpoint: SavedState, filename: str, with_schedulers: bool, work_dir: str
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
    said = (
        f'--resume {filename}: this checkpoint holds no {" and no ".join(lacking)}, so training '
        f'would start its optimizer and schedules over. Expected a complete checkpoint, as those '
        f'of save_best are with default_hooks.checkpoint.resumable_best=True.'
    )
    raise refusal(filename, said, advice)


def _lacking(checkpoint: SavedState, with_schedulers: bool) -> List[str]:
    keys = ['meta', 'message_hub', 'optimizer'] + ['param_schedulers'] * with_schedulers
    lacking = [key for key in keys if key not in checkpoint]
    meta = checkpoint.get('meta', dict.fromkeys(('epoch', 'iter')))
    return lacking + [f'meta.{key}' for key in ('epoch', 'iter') if key not in meta]


def check_names(saved: Mapping[str, object], names: Sequence[str], where: str) -> None:
    """Refuse the states of other optimizers than those of the config, '' being a single one."""
    found, names = [''] if 'param_groups' in saved else sorted(saved), sorted(names)
    if found != names:
        one, other = (
            'one optimizer' if some == [''] else f'optimizers {", ".join(some)}'
            for some in (found, names)
        )
        raise refusal(where, f'{where} holds {one}, and the config has {other}.')


def follow_order(
    state: SavedState, saved: Sequence[str], names: Sequence[Sequence[str]], where: str
) -> Tuple[SavedState, List[int]]:
    """Return an optimizer's state with its parameters in the order that they have here.

    PyTorch knows them by their places, which follow the order of modules. That may be the order
    of keys in a config, which MMEngine sorts when it writes one to the work directory.

    Args:
        state (dict): The state.
        saved (list): The names of its parameters.
        names (list): The names in each group of the optimizer of the config.
        where (str): The checkpoint.

    Returns:
        tuple: The state, and the place that each of its groups has in the checkpoint.
    """
    groups, here = state['param_groups'], list(chain.from_iterable(names))
    as_saved = state, list(range(len(groups)))
    places = list(chain.from_iterable(group['params'] for group in groups))
    if here == list(saved) or len({*here}) < len(here) or len(places) != len(saved):
        return as_saved
    if {*here} != {*saved}:
        other = sorted({*here} ^ {*saved})
        log_warning(
            f'{where} is of an optimizer with other parameters: {shortened(other)} are in one of '
            f'both alone. States are taken by their places, which may be wrong: resume with the '
            f'config of the checkpoint, or take the weights alone, without --resume: '
            f'--cfg-options load_from={where}.'
        )
        return as_saved
    left = iter(saved)
    by_names = {frozenset(islice(left, len(each['params']))): n for n, each in enumerate(groups)}
    if by_names.keys() != {*map(frozenset, names)}:
        said = f'{where} has the parameters in other groups than the config (paramwise_cfg).'
        raise refusal(where, said)
    log_warning(
        f'{where} has the parameters of the optimizer in another order, in which {saved[0]} is '
        f'the first and not {here[0]}: each gets its own state, but sums over all of them may '
        f'round otherwise. Resume with your config, not with the one that MMEngine writes with '
        f'sorted keys, for the same order.'
    )
    place_of, state_of = dict(zip(saved, places)), state['state']
    order = {place_of[name]: number for number, name in enumerate(here)}
    moved = [by_names[frozenset(each)] for each in names]
    numbers = iter(range(len(here)))
    mine = [dict(groups[n], params=list(islice(numbers, len(groups[n]['params'])))) for n in moved]
    states = {order[place]: state_of[place] for place in state_of if place in order}
    return dict(state, state=states, param_groups=mine), moved


def check_optimizer(
    optimizer: Optimizer, kind: str, saved: SavedState, saved_kind: Optional[str], where: str
) -> None:
    """Refuse the state of another optimizer, or of other groups of parameters.

    Args:
        optimizer (Optimizer): Of the config.
        kind (str): The name of its class.
        saved (dict): The state.
        saved_kind (str, optional): The class of which it is, unless any with its settings will do.
        where (str): The checkpoint.
    """
    groups, mine = saved['param_groups'], optimizer.param_groups
    if set(optimizer.defaults) - _OPTIONAL - set(groups[0]) or saved_kind not in (None, kind):
        states = sorted({name for one in saved['state'].values() for name in one})
        named = saved_kind or f'an optimizer with {", ".join(states) or "no state"}'
        said = f'the state of {named}, and the config has optim_wrapper.optimizer {kind}'
        raise refusal(where, f'{where} holds {said}.')
    sizes = [[len(group['params']) for group in some] for some in (groups, mine)]
    if sizes[0] != sizes[1]:
        one, other = (
            f'{len(each)} group(s) of {shortened(each)[1:-1]} parameter(s)' for each in sizes
        )
        said = f'{one} of the optimizer {kind}, and the config has {other}'
        raise refusal(where, f'{where} holds {said} (paramwise_cfg, or what requires gradients).')


def adapt_to_hooks(runner: AnyRunner, checkpoint: Checkpoint, where: str) -> None:
    """Say whether averaged weights of an EMAHook are in the checkpoint or in the config alone.

    Such a checkpoint has the averages in the place of the weights; without the hook, training
    goes on with the weights that were trained.
    """
    saved = checkpoint.get('ema_state_dict')
    wanted = any(isinstance(hook, EMAHook) for hook in runner.hooks)
    if wanted and saved is None:
        log_warning(
            f'The config has an EMAHook and {where} holds no averaged weights (ema_state_dict): '
            f"averaging begins with the checkpoint's weights. For averages from the beginning, "
            f'train anew without --resume: --cfg-options load_from={where}.'
        )
    if saved is not None and not wanted:
        trained = {name[7:]: saved[name] for name in saved if name.startswith('module.')}
        checkpoint['state_dict'].update(trained)
        log_warning(
            f'{where} holds averaged weights of an EMAHook, which the config lacks: training '
            f'goes on with the weights that were trained, and without averages. To keep them, '
            f"add custom_hooks=[dict(type='EMAHook')]."
        )

"""Name the parameters that PyTorch's DDP waits for because they got no gradient."""

import re
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Tuple

from torch import distributed as torch_dist, nn

from mmdevplug.accelerators import Accelerator
from mmdevplug.accelerators.backend import resolve_backend, waits_for_backward
from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.errors import LaunchError, ModelError, first_line
from mmdevplug.model.place_model import wrapper_config

#: Names in one message; the rest is counted.
NAMED = 8
REMEDY = (
    'set find_unused_parameters=True, in model_wrapper_cfg, or as a key of the config if it has '
    'no model_wrapper_cfg; otherwise remove or freeze them'
)


def refuse_unreduced(model: nn.Module) -> None:
    """Raise if the last backward pass of a model left gradients that were not averaged.

    By itself PyTorch's DDP notices it in the next forward pass: one that may never come, because
    other ranks wait for these gradients, and names numbers. It costs a call into C++.

    Args:
        model (nn.Module): One that is wrapped in DDP, or whose children are; others are ignored.

    Raises:
        ModelError: With the names of the parameters.
    """
    for prefix, part in _averaged_by_ddp(model):
        reducer = part.reducer
        # Before PyTorch 2.1, what the next forward pass calls first, to the same effect.
        check = getattr(reducer, '_check_reducer_finalized', reducer._rebuild_buckets)
        try:
            check()
        except RuntimeError as error:
            raise ModelError(_describe(part, prefix, error)) from error


def trainable(module: nn.Module) -> Dict[str, nn.Parameter]:
    """The parameters that require a gradient, by their names."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def list_names(names: Iterable[str]) -> str:
    """The first names of a list, and how many more there are."""
    names = list(names)
    more = f' and {len(names) - NAMED} more' if len(names) > NAMED else ''
    return f'{", ".join(names[:NAMED])}{more}'


def _averaged_by_ddp(model: nn.Module) -> List[Tuple[str, Any]]:
    """What PyTorch's DDP wraps, a model or its children, with what precedes names in it."""
    inner = getattr(model, 'module', None)
    if vars(model).get('reducer') is not None:
        return [('', model)]
    children = [] if inner is None else inner.named_children()
    return [(f'{name}.', one) for name, one in children if vars(one).get('reducer') is not None]


def _averaged_names(ddp: Any, prefix: str) -> List[str]:
    ours = getattr(ddp, '_trainable', None)  # what the reducer was built for
    names = [name for name, _ in ours.named] if ours is not None else list(trainable(ddp.module))
    return [f'{prefix}{name}' for name in names if name not in ddp.parameters_to_ignore]


def _describe(ddp: nn.Module, prefix: str, error: RuntimeError) -> str:
    found = re.search(r'did not receive grad for rank \d+: ([\d ]+)', str(error))
    names = _averaged_names(ddp, prefix)
    missing = [int(index) for index in found[1].split()] if found else []
    if not missing or max(missing) >= len(names):
        return f'{first_line(error)} To go on, {REMEDY}.'
    listed = list_names(names[i] for i in missing)
    remedy = (
        f'If these may go unused in an iteration, on any rank, {REMEDY}.'
        if not ddp.find_unused_parameters
        else 'find_unused_parameters=True counts them as used, because an output of forward() '
        'depends on them that is no part of the loss: detach() it, or add it to the loss.'
    )
    return (
        f'parameters without a gradient on rank {torch_dist.get_rank()}: {listed}. '
        f"PyTorch's DDP waits for the gradients of all {len(names)}, on every rank. {remedy}"
    )


@contextmanager
def naming_parameters(model: nn.Module) -> Iterator[None]:
    """Say which parameters an error of PyTorch's DDP in a training step is about, and what to set.

    Args:
        model (nn.Module): See :func:`refuse_unreduced`.

    Raises:
        ModelError: For a sparse gradient that is missing, or one that is there twice.
    """
    try:
        yield
    except RuntimeError as error:
        twice = re.search(r'Parameter at index (\d+).* marked as ready twice', str(error))
        if twice is not None:
            lists = [_averaged_names(ddp, prefix) for prefix, ddp in _averaged_by_ddp(model)]
            listed = ' or '.join(each for names in lists for each in names[int(twice[1]) :][:1])
            raise ModelError(
                f'{listed} got its gradient twice in one backward pass: layers that several '
                f'reentrant checkpoints (with_cp) share, or that are used outside of forward(). '
                f'Set static_graph=True in model_wrapper_cfg if every iteration uses the same '
                f'layers, or pass use_reentrant=False to checkpoint().'
            ) from error
        if 'Expected sparse gradient to be defined' not in str(error):
            raise
        listed = list_names(
            f'{prefix}{name}.weight'
            for prefix, ddp in _averaged_by_ddp(model)
            for name, part in ddp.module.named_modules()
            if getattr(part, 'sparse', False) is True and part.weight.grad is None
        )
        raise ModelError(
            f'a sparse gradient is missing in this iteration, of one or more of {listed}: '
            f"PyTorch's DDP cannot fill it in, as find_unused_parameters=True does dense ones. "
            f'Set sparse=False for these layers, and take Adam instead of SparseAdam; or freeze '
            f'or remove what goes unused.'
        ) from error


# before a job, with one process -----------------------------------------------------------------


@contextmanager
def listing_unused(model: nn.Module) -> Iterator[Callable[[], List[str]]]:
    """Yield a function that lists the parameters which got no gradient inside this context."""
    trained, used = trainable(model), set()
    hooks = [p.register_hook(lambda _, name=name: used.add(name)) for name, p in trained.items()]
    yield lambda: [name for name in trained if name not in used]
    for hook in hooks:
        hook.remove()


def describe_unused(
    names: List[str], cfg: Mapping[str, Any], accelerator: Accelerator, ranks: str
) -> str:
    """Say what parameters without a gradient mean for a job of a config; '' if nothing."""
    forced = AcceleratorOptions.from_config(cfg.get('accelerator')).backend
    dist_cfg = (cfg.get('env_cfg') or {}).get('dist_cfg') or {}
    wrapper = wrapper_config(
        cfg.get('model_wrapper_cfg'), cfg.get('find_unused_parameters', False)
    )
    try:
        backend = resolve_backend(accelerator, forced, dist_cfg.get('backend'))
    except LaunchError:
        return ''  # there is no such job; another check says so
    staged = waits_for_backward(accelerator, backend)
    if not names or staged or wrapper.get('find_unused_parameters'):
        return ''
    return (
        f'parameters without a gradient in one training step: {list_names(names)}. {ranks} would '
        f"stop there, because PyTorch's DDP waits for all gradients."
    )

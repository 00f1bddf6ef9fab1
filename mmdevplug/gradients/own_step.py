"""Average gradients before each update of a model that has a ``train_step`` of its own.

Such a model calls its parts, backward and the optimizer as it likes, maybe several times for a
batch, so PyTorch's DDP cannot know which forward pass belongs to a backward. Here the gradients
are averaged when the model asks for an update.
"""

import zlib
from contextlib import ExitStack, contextmanager
from functools import partial, reduce, wraps
from typing import Any, Callable, Iterator, List, Sequence, Tuple, TypeVar

import torch
from mmengine.model import BaseModel
from torch import Tensor, distributed as torch_dist, nn

from mmdevplug.accelerators import Accelerator
from mmdevplug.accelerators.backend import group_device
from mmdevplug.accelerators.tensor_sums import tensor_sums
from mmdevplug.distributed.byte_exchange import gather_json, group_by_bytes
from mmdevplug.distributed.coalesced import MESSAGE_BYTES
from mmdevplug.distributed.nonfinite import FinitePolicy, names_of_nonfinite
from mmdevplug.errors import ModelError
from mmdevplug.utils.annotations import AnyGroup, AnyOptimWrapper
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.model import list_optim_wrappers

from .lazy_staging import SUMMED_IN
from .unused_parameters import list_names

Result = TypeVar('Result')


def has_own_step(module: nn.Module) -> bool:
    """Whether a model has a ``train_step`` other than MMEngine's."""
    found = getattr(module, 'train_step', None)
    return found is not None and getattr(found, '__func__', found) is not BaseModel.train_step


@contextmanager
def averaging_updates(
    optim_wrapper: AnyOptimWrapper, average: Callable[[], None], model: str
) -> Iterator[None]:
    """Average gradients whenever a model updates parameters through an optimizer wrapper.

    Args:
        optim_wrapper (OptimWrapper or OptimWrapperDict): What the model gets.
        average (Callable): Averages all gradients; all ranks call it.
        model (str): For messages.

    Raises:
        ModelError: If the model calls an optimizer by itself.
    """
    inside: List[bool] = []

    def update(step: Callable[..., Result], *args: object, **kwargs: object) -> Result:
        average()
        inside.append(True)
        try:
            return step(*args, **kwargs)
        finally:
            inside.pop()

    def check(step: Callable[..., Result], *args: object, **kwargs: object) -> Result:
        if not inside:
            raise ModelError(
                f'{model}.train_step calls step() of an optimizer, whose gradients are those of '
                f'this rank alone; expected step() or update_params() of its optim_wrapper, '
                f'before which they are averaged. Call one of these.'
            )
        return step(*args, **kwargs)

    with ExitStack() as stack:
        for one in list_optim_wrappers(optim_wrapper):
            stack.enter_context(_replaced_step(one, update))
            stack.enter_context(_replaced_step(one.optimizer, check))
        yield


@contextmanager
def _replaced_step(owner: Any, call: Callable[..., object]) -> Iterator[None]:
    before, own = owner.step, 'step' in vars(owner)
    # PyTorch's schedulers look for attributes of the method.
    owner.step = wraps(before)(partial(call, before))
    try:
        yield
    finally:
        if own:
            owner.step = before
        else:
            del owner.step


def compare_parameters(
    named: Sequence[Tuple[str, nn.Parameter]],
    accelerator: Accelerator,
    group: AnyGroup,
    model: str,
) -> bool:
    """Warn if ranks hold other values after updates, which were then no averages' updates.

    All ranks of a group call it. An optimizer of a repository may have further methods that
    update, as those for sharpness-aware minimization have, and nothing is averaged before these.

    Returns:
        bool: Whether all are equal.
    """
    sums = tensor_sums((parameter for _, parameter in named), accelerator)
    if len(set(gather_json(zlib.crc32(repr(sums).encode()), group))) == 1:
        return True
    by_parameter = zip(named, zip(*gather_json(sums, group)))
    names = [name for (name, _), values in by_parameter if len(set(values)) > 1]
    log_warning(
        f'{model}.train_step updates {list_names(names)} otherwise on each rank, so ranks train '
        f'models of their own: gradients are averaged before step() and update_params() of its '
        f'optim_wrapper, and not before other methods that update, of an optimizer or of a '
        f"wrapper of yours. Call the wrapper's step() for each update."
    )
    return False


def average_gradients(
    named: Sequence[Tuple[str, nn.Parameter]], group: AnyGroup, policy: FinitePolicy
) -> None:
    """Average the gradients that any rank of a group has; on the others they count as zero.

    Raises:
        ModelError: If gradients are not finite and the training is to stop then, or are sparse.
    """
    place, ranks = group_device(group), torch_dist.get_world_size(group)
    flags = torch.tensor([p.grad is not None for _, p in named], dtype=torch.int32, device=place)
    torch_dist.all_reduce(flags, group=group)
    used = [each for each, count in zip(named, flags.tolist()) if count]
    averages: List[Tensor] = []
    finite = True
    for part in group_by_bytes([_gradient(*each) for each in used], MESSAGE_BYTES):
        # Of several dtypes, half precision among them: all are added up in the widest.
        wire = reduce(torch.promote_types, [SUMMED_IN.get(g.dtype, g.dtype) for g in part])
        flat = torch.cat([gradient.reshape(-1).to(place, wire) for gradient in part])
        torch_dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat, group=group)
        flat.div_(ranks)
        finite = finite and not (policy.active and not bool(torch.isfinite(flat).all()))
        averages += flat.split([gradient.numel() for gradient in part])
    if not finite:
        policy.stop(names_of_nonfinite([(name, p.grad) for name, p in used]))
    with torch.no_grad():
        for (_, parameter), average in zip(used, averages):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            average = average.view_as(parameter)
            is_real = average.is_complex() and not parameter.is_complex()
            parameter.grad.copy_(average.real if is_real else average)


def _gradient(name: str, parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    if parameter.grad.is_sparse:
        raise ModelError(
            f'parameter {name!r} has a sparse gradient, which is not averaged for a model with a '
            f'train_step of its own; build its module with sparse=False.'
        )
    return parameter.grad.detach()

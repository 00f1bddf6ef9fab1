"""Load the weights of a checkpoint into the model of a runner, or refuse one of another model."""

import re
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Optional, Sequence, Tuple

from torch import nn

from mmdevplug.errors import CheckpointError, DevPlugError
from mmdevplug.patches.load_weights import Fit, load_weights
from mmdevplug.utils.logs import log_warning


def load_model(
    model: nn.Module,
    checkpoint: Dict[str, Any],
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
    weights = checkpoint['state_dict']
    metadata = getattr(weights, '_metadata', None)
    for pattern, replacement in revise_keys:
        weights = {re.sub(pattern, replacement, key): value for key, value in weights.items()}
    weights = _Weights(weights)
    weights._metadata = metadata
    fit = load_weights(model, weights)
    fit.refuse_if_nothing_fits(filename, weights)
    if fit.complete:
        return None
    text = fit.describe(filename)
    if strict:
        raise CheckpointError(f'{text} Expected all of it: strict=True.')
    if resuming:
        _refuse_other_parameters(model, fit, text, filename)
    log_warning(text)
    return text


class _Weights(dict):
    """A ``state_dict`` with the releases of the modules that wrote it."""

    _metadata: Any = None


def _refuse_other_parameters(model: nn.Module, fit: Fit, text: str, filename: str) -> None:
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    lacking = {*fit.missing, *(refused.split(':')[0] for refused in fit.refused)}
    if lacking & trained:
        raise CheckpointError(
            f'Cannot resume: {text} The optimizer has no states for these. Resume with the '
            f'config of the interrupted run; or train anew from the weights that fit: '
            f'load_from={filename!r}, without --resume.'
        )


@contextmanager
def explaining_other_run(filename: str) -> Iterator[None]:
    """Explain errors of MMEngine and PyTorch when states of another run are restored."""
    try:
        yield
    except (KeyError, ValueError, RuntimeError) as error:
        of_states = not isinstance(error, RuntimeError) or 'state_dict' in str(error)
        if isinstance(error, DevPlugError) or not of_states:
            raise
        said = ' '.join(str(error).split())[:300]
        raise CheckpointError(
            f'Cannot resume from checkpoint {filename}: {type(error).__name__}: {said}. It is of '
            f'a run with another model, optimizer, schedule or other hooks. Resume with the '
            f'config of that run; or train anew from its weights: load_from={filename!r}, '
            f'without --resume.'
        ) from error

"""The checks in their order, each run in a process of its own."""

from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional

from mmdevplug.checks import accelerators
from mmdevplug.checks.accelerators import missing_kernel
from mmdevplug.checks.findings import Finding
from mmdevplug.checks.isolated import Death, run_isolated
from mmdevplug.errors import first_line
from mmdevplug.utils.byte_sizes import format_bytes
from mmdevplug.utils.progress import show_progress

from . import operations, tensors, training
from .card import Card, Failed, NotSupported

PASSED, FAILED, NOT_SUPPORTED = 'passed', 'failed', 'not supported'
DETECTION = 'detection'
#: Added to the time that a check of ranks has for a step: the job of those ends first.
SLACK_SECONDS = 120.0
#: Characters of a row that did not pass.
MOST_TEXT = 240
_PROBED = 'every device computes a product, a convolution, sums and a softmax as the CPU does'
_NOT_FOUND = (
    "Look for the card with its maker's own tool. If it is there, give a --config that names the "
    "maker's package: accelerator = dict(type='acme', package='torch_acme')."
)


class Check(NamedTuple):
    """A row of the table."""

    run: Callable[[Card], str]  # returns what was measured; see card.py for how it ends otherwise
    remedy: str  # what to do when it fails
    ranks: int = 1


CHECKS: Dict[str, Check] = {
    'operations': Check(
        operations.check_operations,
        'Correct the kernels named; a fallback to the CPU is enough to begin with.',
    ),
    'copies': Check(
        tensors.check_copies,
        'Correct aten::_copy_from for that dtype and layout (strides, offset).',
    ),
    'random numbers': Check(
        tensors.check_random_numbers,
        'Correct manual_seed, save_rng and load_rng of the accelerator, or what they call of '
        'torch.<type>: manual_seed_all, get_rng_state, set_rng_state.',
    ),
    'mixed precision': Check(
        training.check_mixed_precision,
        'Register what autocast casts on the device, and torch.<type>.get_amp_supported_dtype, or '
        'override autocast and grad_scaler of the accelerator: accelerator.precision.',
    ),
    'checkpoint': Check(
        tensors.check_checkpoint,
        'Correct copies.to_host of the accelerator. For torch.save, call torch.utils.'
        'generate_methods_for_privateuse1_backend(for_storage=True).',
    ),
    'resume': Check(
        training.check_resume, 'Correct what fails above, then save_rng and load_rng.'
    ),
    'device guard': Check(
        tensors.check_device_guard, 'tensor.device has to have the type and the index of its card.'
    ),
    'collectives': Check(
        training.check_collectives,
        "Correct the backend, or go through the host: accelerator = dict(backend='gloo').",
        training.RANKS,
    ),
    'training on 2 ranks': Check(
        training.check_two_ranks, 'Correct operations, copies and collectives.', training.RANKS
    ),
    'synchronized batch norm': Check(
        training.check_sync_bn,
        "Correct all_gather of the backend, or set sync_bn='per_rank'.",
        training.RANKS,
    ),
}


def work(task: str, options: Dict[str, Any], say: Callable[[str], None]) -> Iterator[Finding]:
    """Run one check; see :mod:`mmdevplug.checks.isolated`."""
    check = CHECKS[task]
    try:
        yield Finding(task, PASSED, check.run(Card(options, say)))
    except NotSupported as reason:
        yield Finding(task, NOT_SUPPORTED, str(reason))
    except Failed as error:
        yield Finding(task, FAILED, str(error), remedy=check.remedy)
    except Exception as error:
        # A vendor's library may raise anything.
        operator = missing_kernel(f'{error} {error.__cause__}')
        if operator is not None:
            yield Finding(task, NOT_SUPPORTED, f'no kernel for {operator}')
            return
        if isinstance(error, AttributeError) and str(error).startswith("module 'torch."):
            yield Finding(task, NOT_SUPPORTED, f'{error}, which PyTorch asks for')
            return
        found = f'{type(error).__name__}: {first_line(error)}'
        yield Finding(task, FAILED, found, remedy=check.remedy)


def run_checks(
    accelerator: str,
    config: Optional[str] = None,
    timeout: float = 180.0,
    chosen: Iterable[str] = tuple(CHECKS),
) -> Iterator[Finding]:
    """Run detection and the chosen checks, each when the one before has ended.

    Args:
        accelerator (str): Its name.
        config (str, optional): The path of a config with ``custom_imports`` and ``accelerator``.
        timeout (float): Seconds that a step of a check may take. Defaults to 180.
        chosen (Iterable[str]): Names of :data:`CHECKS`. Defaults to all.

    Yields:
        Finding: ``section`` is the check and ``level`` how it ended.
    """
    options: Dict[str, Any] = dict(accelerator=accelerator, config=config)
    with show_progress(f'checking {DETECTION}'):
        detected = _detect(options, timeout)
    yield _shortened(detected)
    if detected.data is None:  # without a device
        return
    ranks = None if detected.data['shared'] else len(detected.data['devices'])
    options.update(ranks=ranks, timeout=timeout)
    for name in chosen:
        with show_progress(f'checking {name}'):
            seconds = timeout + (SLACK_SECONDS if CHECKS[name].ranks > 1 else 0)
            found = list(run_isolated(__name__, [name], options, seconds))
        for each in found:
            if isinstance(each, Death):
                each = Finding(name, FAILED, each.describe(), remedy=CHECKS[name].remedy)
            yield _shortened(each)


def _shortened(finding: Finding) -> Finding:
    """Cut what is said of a row that did not pass to two lines of a terminal."""
    text = ' '.join(finding.found.split())
    if finding.level == PASSED or len(text) <= MOST_TEXT:
        return finding
    return finding._replace(found=f'{text[: MOST_TEXT - 4]} ...')


def _detect(options: Dict[str, Any], timeout: float) -> Finding:
    """Let the doctor look at the accelerator, and compute on every device."""
    findings: List[Finding] = accelerators.examine(options, timeout)
    wrong = [finding for finding in findings if finding.level == 'error']
    data = next((f.data for f in findings if f.data is not None and 'devices' in f.data), None)
    lacking = [f.found for f in findings if f.level == 'warning' and 'no kernel for' in f.found]
    if wrong or data is None:
        remedy = next((finding.remedy for finding in wrong if finding.remedy), '')
        if ': --accelerator ' in remedy:  # the doctor's: another accelerator
            remedy = _NOT_FOUND
        found = '; '.join(finding.found for finding in wrong) or 'no device was found'
        return Finding(DETECTION, FAILED, found, remedy=remedy, data=data)
    first = data['devices'][0]
    memory = 'unknown' if first['memory'] is None else format_bytes(first['memory'])
    told = f'{len(data["devices"])} device(s): {first["name"]}, memory {memory}'
    if lacking:
        others = f', and {len(lacking) - 1} more device(s) lack it' if lacking[1:] else ''
        return Finding(DETECTION, NOT_SUPPORTED, f'{told}; {lacking[0]}{others}', data=data)
    notes = [finding.found for finding in findings if finding.level == 'note']
    return Finding(DETECTION, PASSED, '; '.join([told, *notes, _PROBED]), data=data)

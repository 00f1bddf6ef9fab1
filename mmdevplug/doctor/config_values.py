"""Check values of a config that are this plugin's, or that depend on the number of processes."""

from numbers import Real
from typing import Any, Dict, Iterator, List, Optional

from mmengine.config import Config

from mmdevplug.accelerators import Accelerator
from mmdevplug.accelerators.backend import resolve_backend
from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.config.model_wrapper import WrapperOptions
from mmdevplug.errors import DevPlugError
from mmdevplug.model.norm_layers import check_sync_bn
from mmdevplug.optim.adapt_config import describe_fp16

from .findings import Finding, Section

section = Section('config')

_WRAPPER_REMEDIES = dict(
    bucket_cap_mb=None, grad_compression='none', hierarchy='auto', nonfinite_grads='stop'
)


def examine(cfg: Config, accelerator: Optional[Accelerator], ranks: int) -> Iterator[Finding]:
    """Check values for a training of ``ranks`` processes."""
    kind = cfg.get('runner_type')
    if kind in (None, 'Runner'):
        yield section.note(
            f'runner_type={kind!r}: the config does not choose DeviceRunner',
            '`mmdevplug train` uses it where runner_type is missing; the tools of model libraries '
            "use MMEngine's own, which ignores the device keys.",
            "_base_ = [..., __import__('mmdevplug').base_config('auto')]",
        )
    wrong: List[DevPlugError] = []
    options = AcceleratorOptions()
    try:
        options = AcceleratorOptions.from_config(cfg.get('accelerator'), problems=wrong)
    except DevPlugError as error:
        wrong = [error]
    for error in wrong:
        yield _error(str(error), 'write what is expected there, or leave the option out')
    yield from _process_group(cfg, accelerator, options.backend)
    yield from _wrapper(cfg)
    if accelerator is not None:
        yield from _precision(cfg, accelerator)
    yield from _batch(cfg, ranks)
    yield from _intervals(cfg)


def _error(found: str, remedy: str, why: str = 'the job stops before it trains.') -> Finding:
    return section.error(found, why, remedy)


def _dict_at(cfg: Any, *keys: str) -> Dict[str, Any]:
    """Get what is at a path of keys, an empty dict if nothing is."""
    for key in keys:
        cfg = cfg.get(key) if hasattr(cfg, 'get') else None
    return cfg if isinstance(cfg, dict) else {}


def _process_group(
    cfg: Config, accelerator: Optional[Accelerator], forced: Optional[str]
) -> Iterator[Finding]:
    dist_cfg = _dict_at(cfg, 'env_cfg', 'dist_cfg')
    timeout = dist_cfg.get('timeout')
    number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout > 0):
        yield _error(
            f'env_cfg.dist_cfg.timeout={timeout!r}: expected a number of seconds above 0',
            'env_cfg = dict(dist_cfg=dict(timeout=1800))',
        )
    if accelerator is None:
        return
    try:
        backend = resolve_backend(accelerator, forced, dist_cfg.get('backend'))
    except DevPlugError as error:
        yield _error(str(error), f"accelerator = dict(type={accelerator.name!r}, backend='auto')")
        return
    staged = ', by way of the host' if backend == 'staged' else ''
    found = f'accelerator {accelerator.name!r} with backend {backend!r}: gradients are averaged'
    yield section.ok(found + staged)


def _wrapper(cfg: Config) -> Iterator[Finding]:
    wrapper = _dict_at(cfg, 'model_wrapper_cfg')
    for name, remedy in _WRAPPER_REMEDIES.items():
        try:
            WrapperOptions.read({name: wrapper[name]} if name in wrapper else {})
        except DevPlugError as error:
            yield _error(str(error), f'model_wrapper_cfg.{name} = {remedy!r}')
    try:
        check_sync_bn(cfg.get('sync_bn'))
    except DevPlugError as error:
        yield _error(str(error), "sync_bn = 'auto'")


def _precision(cfg: Config, accelerator: Accelerator) -> Iterator[Finding]:
    no_effect = describe_fp16(cfg)
    if no_effect is not None:
        why = 'training has the precision of optim_wrapper.'
        yield section.warning(no_effect, why, "optim_wrapper.type = 'AmpOptimWrapper'")
    optim_wrapper = _dict_at(cfg, 'optim_wrapper')
    if 'Amp' not in str(optim_wrapper.get('type')):
        return
    try:
        accelerator.precision.autocast()
    except DevPlugError as error:
        yield _error(str(error), "optim_wrapper.type = 'OptimWrapper'")
        return
    dtype = str(optim_wrapper.get('dtype') or accelerator.precision.dtype)
    if dtype in ('float16', 'torch.float16'):
        try:
            accelerator.precision.grad_scaler()
        except DevPlugError as error:
            remedy = "optim_wrapper.dtype = 'bfloat16'"
            yield _error(f'optim_wrapper.dtype={dtype!r}: {error}', remedy)


def _batch(cfg: Config, ranks: int) -> Iterator[Finding]:
    loader = _dict_at(cfg, 'train_dataloader')
    batch = loader.get('batch_size')
    if not isinstance(batch, int) or batch < 1:
        return
    accumulated = _accumulative_counts(cfg)
    how = f'{batch} on each of {ranks} rank(s)'
    how += f', accumulated {accumulated} times' if accumulated > 1 else ''
    count = batch * ranks * accumulated
    yield section.ok(f'an update of the weights sees {count} samples: {how}')
    length = _dict_at(loader, 'dataset').get('indices')
    if isinstance(length, int) and 0 < length < batch * ranks:
        yield _error(
            f'the dataset has {length} samples (indices={length}), fewer than '
            f'batch_size={batch} times {ranks} rank(s)',
            f'train_dataloader.batch_size = {max(1, length // ranks)}',
            'with drop_last an epoch has no iteration; without, ranks see samples twice.',
        )
    scaling = _dict_at(cfg, 'auto_scale_lr')
    base = scaling.get('base_batch_size')
    if isinstance(base, int) and batch * ranks != base and not scaling.get('enable'):
        yield section.warning(
            f'auto_scale_lr.base_batch_size={base}, but {batch * ranks} samples make a batch '
            f'({how})',
            'the learning rate is meant for the other batch size and is not scaled.',
            'mmdevplug train CONFIG --auto-scale-lr  # or: auto_scale_lr.enable = True',
        )


def _accumulative_counts(cfg: Config) -> int:
    counts = _dict_at(cfg, 'optim_wrapper').get('accumulative_counts', 1)
    return counts if isinstance(counts, int) and counts > 0 else 1


def _intervals(cfg: Config) -> Iterator[Finding]:
    counts = _accumulative_counts(cfg)
    checkpoint = _dict_at(cfg, 'default_hooks', 'checkpoint')
    interval = None if checkpoint.get('by_epoch', True) else checkpoint.get('interval')
    for key, value, level, why in (
        (
            'default_hooks.checkpoint.interval',
            interval,
            'warning',
            'a checkpoint in the middle of an accumulation does not hold the gradients so far.',
        ),
        (
            'train_cfg.max_iters',
            _dict_at(cfg, 'train_cfg').get('max_iters'),
            'note',
            'the last update sees fewer samples than the others.',
        ),
    ):
        if isinstance(value, int) and value > 0 and value % counts:
            yield section.finding(
                level,
                f'{key}={value} is no multiple of optim_wrapper.accumulative_counts={counts}',
                why,
                f'{key} = {-(-value // counts) * counts}',
            )

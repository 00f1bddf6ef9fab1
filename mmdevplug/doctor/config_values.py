"""Values of a config that are this plugin's, or that a job of several processes depends on."""

from numbers import Real
from typing import Any, Dict, Iterator, List, Optional, Tuple

from mmengine.config import Config

from mmdevplug.accelerators import Accelerator
from mmdevplug.accelerators.backend import resolve_backend
from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.errors import DevPlugError
from mmdevplug.explanations.cuda_settings import cuda_settings
from mmdevplug.gradients.compression import KINDS
from mmdevplug.gradients.nonfinite import check_policy
from mmdevplug.model.norm_layers import check_sync_bn

from .findings import Finding

SECTION = 'config'
HALF = ('float16', 'torch.float16')


def examine(cfg: Config, accelerator: Optional[Accelerator], ranks: int) -> Iterator[Finding]:
    """Look at values.

    Args:
        cfg (Config): The config.
        accelerator (Accelerator, optional): None if there is none.
        ranks (int): How many processes would train.
    """
    options, wrong = _accelerator_options(cfg)
    yield from _runner(cfg)
    yield from _backend(cfg, accelerator, options.backend)
    yield from _wrapper(cfg)
    for error in wrong:
        yield _error(str(error), 'write what is expected there, or leave the option out')
    yield from _precision(cfg, accelerator)
    yield from _batch(cfg, ranks)
    yield from _intervals(cfg)
    if accelerator is not None:
        yield from _for_cuda(cfg, accelerator)


def _accelerator_options(cfg: Config) -> Tuple[AcceleratorOptions, List[DevPlugError]]:
    wrong: List[DevPlugError] = []
    try:
        return AcceleratorOptions.from_config(cfg.get('accelerator'), problems=wrong), wrong
    except DevPlugError as error:
        return AcceleratorOptions(), [error]


def _for_cuda(cfg: Config, accelerator: Accelerator) -> Iterator[Finding]:
    for setting in cuda_settings(cfg, accelerator.device_type):
        found = f'{setting.path}={setting.value!r}: {setting.why}'
        yield Finding(SECTION, setting.level, found, _FOLLOWS[setting.level], setting.write)


_FOLLOWS = dict(
    error='the job stops where it is used.',
    warning='the job may stop where it is used.',
    note='training goes on without it.',
)


def _error(found: str, remedy: str, why: str = 'the job stops before it trains.') -> Finding:
    return Finding(SECTION, 'error', found, why, remedy)


def _dict_at(cfg: Any, *keys: str) -> Dict[str, Any]:
    """What is at a path of keys, an empty dict where nothing is."""
    for key in keys:
        cfg = cfg.get(key) if hasattr(cfg, 'get') else None
    return cfg if isinstance(cfg, dict) else {}


def _runner(cfg: Config) -> Iterator[Finding]:
    kind = cfg.get('runner_type')
    if kind in (None, 'Runner'):
        yield Finding(
            SECTION,
            'note',
            f'runner_type={kind!r}: the config does not ask for DeviceRunner',
            '`mmdevplug train` takes it where nothing is said; the tools of model libraries take '
            "MMEngine's own, for which the device keys are without effect.",
            "_base_ = [..., __import__('mmdevplug').base_config('auto')]",
        )


def _backend(
    cfg: Config, accelerator: Optional[Accelerator], forced: Optional[str]
) -> Iterator[Finding]:
    dist_cfg = _dict_at(cfg, 'env_cfg', 'dist_cfg')
    timeout = dist_cfg.get('timeout')
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, Real) or not timeout > 0
    ):
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
    staged = '' if accelerator.takes_tensors(backend) else ', by way of the host'
    yield Finding(
        SECTION,
        'ok',
        f'accelerator {accelerator.name!r} with backend {backend!r}: gradients are averaged'
        f'{staged}',
    )


def _wrapper(cfg: Config) -> Iterator[Finding]:
    wrapper = _dict_at(cfg, 'model_wrapper_cfg')
    compression = wrapper.get('grad_compression', 'none')
    kind = compression.get('type') if isinstance(compression, dict) else compression
    if kind not in KINDS:
        yield _error(
            f'model_wrapper_cfg.grad_compression={compression!r}: expected one of '
            f'{", ".join(map(repr, KINDS))}',
            "model_wrapper_cfg.grad_compression = 'none'",
        )
    hierarchy = wrapper.get('hierarchy', 'auto')
    if not (hierarchy == 'auto' or isinstance(hierarchy, bool)):
        yield _error(
            f"model_wrapper_cfg.hierarchy={hierarchy!r}: expected 'auto', True or False",
            "model_wrapper_cfg.hierarchy = 'auto'",
        )
    try:
        if wrapper.get('nonfinite_grads') is not None:
            check_policy(wrapper['nonfinite_grads'])
    except DevPlugError as error:
        yield _error(str(error), "model_wrapper_cfg.nonfinite_grads = 'stop'")
    try:
        check_sync_bn(cfg.get('sync_bn'))
    except DevPlugError as error:
        yield _error(str(error), "sync_bn = 'auto'")


def _precision(cfg: Config, accelerator: Optional[Accelerator]) -> Iterator[Finding]:
    optim_wrapper = _dict_at(cfg, 'optim_wrapper')
    if accelerator is None or 'Amp' not in str(optim_wrapper.get('type')):
        return
    dtype = str(optim_wrapper.get('dtype') or accelerator.amp_dtype)
    if dtype not in HALF:
        return
    try:
        accelerator.grad_scaler()
    except DevPlugError as error:
        yield _error(f'optim_wrapper.dtype={dtype!r}: {error}', "optim_wrapper.dtype = 'bfloat16'")


# batches ----------------------------------------------------------------------------------------


def _batch(cfg: Config, ranks: int) -> Iterator[Finding]:
    loader = _dict_at(cfg, 'train_dataloader')
    batch = loader.get('batch_size')
    if not isinstance(batch, int) or batch < 1:
        return
    accumulated = _accumulative_counts(cfg)
    together = batch * ranks * accumulated
    how = f'{batch} on each of {ranks} rank(s)'
    how += f', accumulated {accumulated} times' if accumulated > 1 else ''
    yield Finding(SECTION, 'ok', f'an update of the weights sees {together} samples: {how}')
    length = _dict_at(loader, 'dataset').get('indices')
    if isinstance(length, int) and 0 < length < batch * ranks:
        yield _error(
            f'the dataset has {length} samples (indices={length}), fewer than '
            f'batch_size={batch} times {ranks} rank(s)',
            f'train_dataloader.batch_size = {max(1, length // ranks)}',
            'with drop_last an epoch has no iteration; without, ranks see samples twice.',
        )
    base = _dict_at(cfg, 'auto_scale_lr').get('base_batch_size')
    enabled = bool(_dict_at(cfg, 'auto_scale_lr').get('enable'))
    if isinstance(base, int) and batch * ranks != base and not enabled:
        yield Finding(
            SECTION,
            'warning',
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
    interval, by_epoch = checkpoint.get('interval'), checkpoint.get('by_epoch', True)
    loop = _dict_at(cfg, 'train_cfg')
    if not isinstance(interval, int) or interval < 1 or counts == 1:
        return
    if not by_epoch and interval % counts:
        yield Finding(
            SECTION,
            'warning',
            f'default_hooks.checkpoint.interval={interval} is no multiple of '
            f'optim_wrapper.accumulative_counts={counts}',
            'a checkpoint in the middle of an accumulation does not hold the gradients so far.',
            f'default_hooks.checkpoint.interval = {-(-interval // counts) * counts}',
        )
    iterations = loop.get('max_iters')
    if isinstance(iterations, int) and iterations % counts:
        yield Finding(
            SECTION,
            'note',
            f'train_cfg.max_iters={iterations} is no multiple of '
            f'optim_wrapper.accumulative_counts={counts}',
            'the last update sees fewer samples than the others.',
            f'train_cfg.max_iters = {-(-iterations // counts) * counts}',
        )

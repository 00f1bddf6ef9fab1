"""Jobs that tests run in the processes of a job: small trainings of real parts."""

import logging
import os
from contextlib import contextmanager
from pathlib import Path

import mmengine
import pytest
import torch
import torch.utils.checkpoint
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import RUNNERS
from mmengine.utils import digit_version

import mmdevplug

ROOT = Path(__file__).parents[1]


def torch_before(release):
    """Whether PyTorch is older than a release."""
    return digit_version(torch.__version__) < digit_version(release)


def checkpoint(function, *args, use_reentrant, **options):
    """PyTorch's, which before 1.11 has one way, the reentrant one, and no name for it."""
    if not torch_before('1.11.0'):
        options['use_reentrant'] = use_reentrant
    return torch.utils.checkpoint.checkpoint(function, *args, **options)


def load_file(path, weights_only=False, **options):
    """``torch.load``, which has ``weights_only`` from PyTorch 1.13 on."""
    if not torch_before('1.13.0'):
        options['weights_only'] = weights_only
    return torch.load(path, **options)


needs_later_loops = pytest.mark.skipif(
    digit_version(mmengine.__version__) < digit_version('0.10.7'),
    reason='MMEngine 0.10.0 does not validate at the end, nor skip what it was trained on',
)
needs_modes = pytest.mark.skipif(
    not hasattr(torch.overrides, 'TorchFunctionMode'),
    reason='DeviceGuard needs PyTorch 1.13, which has TorchFunctionMode',
)

needs_scaler = pytest.mark.skipif(
    not hasattr(getattr(torch, 'amp', None), 'GradScaler'),
    reason='PyTorch before 2.3 has no gradient scaler for the CPU',
)


needs_safe_loading = pytest.mark.skipif(
    torch_before('2.6.0'), reason='PyTorch before 2.6 loads checkpoints as MMEngine does'
)


def cpu_pools_bfloat16():
    """Whether the CPU computes all layers of the digits example in bfloat16."""
    try:
        torch.nn.functional.max_pool2d(torch.ones(1, 1, 2, 2, dtype=torch.bfloat16), 2)
    except RuntimeError:
        return False
    return True


needs_bfloat16 = pytest.mark.skipif(
    not cpu_pools_bfloat16(), reason="the CPU's max_pool2d of PyTorch 1.10 takes no bfloat16"
)

#: Folders for a process that starts afresh: without transformers, which takes long, and with few
#: garbage collections.
LEAN = [str(ROOT / 'standins' / name) for name in ('lean', 'quick')]
#: PYTHONPATH of a process that starts afresh; what this one has may be where MMEngine is.
PATHS = os.pathsep.join(
    [str(ROOT), *LEAN, str(ROOT / 'standins' / 'lazy')]
    + [path for path in [os.environ.get('PYTHONPATH')] if path]
)


#: Why a test with the marker ``operators`` is skipped.
WITHOUT_OPERATORS = "needs mmcv's compiled operators"


def need_mmcv_operators():
    """Skip where mmcv has no compiled operators, which model libraries import."""
    pytest.importorskip('mmcv.ops', reason=WITHOUT_OPERATORS)


def need_peft():
    """Skip where there is no peft, as with PyTorch before 1.13; otherwise return it."""
    return pytest.importorskip('peft', reason='needs peft, which needs PyTorch 1.13')


def need_card():
    """Skip where PyTorch cannot have the stand-in card."""
    import card

    if card.MISSING:
        pytest.skip(card.MISSING)


def base_config_of(accelerator):
    """The base config for this process's job on an accelerator; 'auto' where it has none."""
    from tests.columns import backend_of

    if accelerator == 'cuda' and backend_of(accelerator) == 'gloo':
        return 'cuda_gloo'
    there = Path(mmdevplug.base_config('cpu')).with_name(f'{accelerator}.py').exists()
    return accelerator if there else 'auto'


def digits_config(accelerator, work_dir, **options):
    """The digits example on an accelerator, for this process's launch variables."""
    cfg = Config.fromfile(str(ROOT / 'configs' / 'digits' / 'digits.py'))
    cfg.merge_from_dict({key.replace('__', '.'): value for key, value in options.items()})
    base = Config.fromfile(mmdevplug.base_config(base_config_of(accelerator)))
    base.accelerator.type = accelerator
    base.accelerator.initial_weights = 'host'  # equal on all devices
    for key, value in base.items():
        cfg.setdefault(key, value)
    cfg.work_dir = str(work_dir)
    cfg.launcher = 'pytorch' if 'RANK' in os.environ else 'none'
    return cfg


def install_card(accelerator):
    """Install the PrivateUse1 stand-in, unless the device is there, real or of ``tests.native``.

    A GPU computes as exactly as it can, and the same each time.
    """
    if accelerator == 'cuda':
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
    if accelerator not in ('xla', 'gcu', 'lazy') and not hasattr(torch, accelerator):
        import card

        card.install(accelerator)


def start(accelerator='cpu', timeout=60):
    """Start the process group of a job on an accelerator; return this rank's context."""
    from mmdevplug import init_device
    from tests.columns import backend_of

    install_card(accelerator)
    backend = backend_of(accelerator)
    return init_device('pytorch', accelerator, forced_backend=backend, timeout=timeout)


def train_digits(accelerator, work_dir, global_batch=128, **options):
    """Train the digits example.

    Returns:
        dict: ``accuracy`` in percent, ``weights`` (name → host tensor), ``device``, ``wrapper``,
        ``norms`` (of the gradients, as logged).
    """
    install_card(accelerator)
    options['train_dataloader__batch_size'] = global_batch // int(os.environ.get('WORLD_SIZE', 1))
    runner = RUNNERS.build(digits_config(accelerator, work_dir, **options))
    runner.train()
    scalars = runner.message_hub.log_scalars
    accuracy, norms = scalars.get('val/accuracy'), scalars.get('train/grad_norm')
    return dict(
        accuracy=None if accuracy is None else float(accuracy.current()),
        weights=trained_weights(runner),
        norms=None if norms is None else norms.data[0].tolist(),
        device=str(next(runner.model.parameters()).device),
        wrapper=type(runner.model).__name__,
        staged=getattr(runner.model, 'staging', None) is not None,
    )


def train_two_epochs(accelerator, work_dir):
    """Train two epochs of the digits example over gloo; what can be compared between ranks."""
    found = train_digits(
        accelerator,
        work_dir,
        accelerator__type=accelerator,
        accelerator__backend='gloo',
        train_cfg__max_epochs=2,
        train_cfg__val_interval=2,
        default_hooks__checkpoint=None,
    )
    return {key: found[key] for key in ('accuracy', 'device', 'wrapper', 'staged')}


#: Without batch normalization, whose statistics depend on how a batch is split.
PLAIN = dict(
    model__norm=False,
    train_cfg__max_epochs=2,
    train_cfg__val_interval=100,
    default_hooks__checkpoint__interval=100,
)


def train_plain(accelerator, work_dir):
    """Train the digits example without batch normalization; see :func:`train_digits`."""
    return train_digits(accelerator, work_dir, **PLAIN)


def weights_of(model):
    """The state dict as arrays, which travel between processes by value."""
    # NumPy has no bfloat16.
    return {
        name: (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
        for name, value in model.state_dict().items()
    }


def trained_weights(runner):
    """The weights of a runner's model, without its wrapper; see :func:`weights_of`."""
    return weights_of(getattr(runner.model, 'module', runner.model))


def largest_difference(one, other):
    """Between two dicts of tensors or arrays."""
    assert one.keys() == other.keys()
    pairs = [(torch.as_tensor(one[k]).double(), torch.as_tensor(other[k]).double()) for k in one]
    return max((a - b).abs().max().item() for a, b in pairs)


def ranks_of(work_dir):
    """The number of ranks that saved the newest checkpoint of a work directory."""
    path = (Path(work_dir) / 'last_checkpoint').read_text()
    return len(load_file(path)['mmdevplug']['ranks'])


def log_of(work_dir):
    """The text log of the only run in a folder."""
    (path,) = Path(work_dir).glob('*/*.log')
    return path.read_text()


def note(runner, place, look):
    """Call a function as hooks are called, after all others.

    Args:
        runner (Runner): The runner.
        place (str): The method of hooks, such as ``'after_train_iter'``.
        look (callable): Gets what that method gets: the runner, and the rest by name.

    Returns:
        list: What it has returned each time.
    """
    noted, hook = [], Hook()
    setattr(hook, place, lambda *args, **kwargs: noted.append(look(*args, **kwargs)))
    runner.register_hook(hook, 'LOWEST')
    return noted


@contextmanager
def messages_of(logger, level=logging.NOTSET):
    """Collect what is logged meanwhile, from a level on."""
    messages, handler = [], logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)

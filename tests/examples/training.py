"""Trainings of the Llama example, small enough for a test."""

from pathlib import Path

from mmengine.config import Config
from mmengine.registry import RUNNERS

import mmdevplug
from tests.jobs import ROOT, note

FOLDER = ROOT / 'configs' / 'llama_lora'
SMALL = {
    'model.config.hidden_size': 32,
    'model.config.intermediate_size': 48,
    'train_dataloader.batch_size': 8,
    'val_dataloader.dataset.indices': 32,
    'default_hooks.checkpoint.interval': 1000,
}
#: What is computed alike on every kind of device: without the scaling of AdamW, which makes of a
#: rounding error in a small gradient a step as large as any.
TEN_STEPS = {
    'optim_wrapper.optimizer': dict(_delete_=True, type='SGD', lr=0.1),
    'train_cfg.max_iters': 10,
    'train_cfg.val_interval': 10,
}


def llama_config(accelerator, work_dir, name='llama_lora.py', **options):
    """A config of the folder on an accelerator, with a smaller model and less data."""
    cfg = Config.fromfile(str(FOLDER / name))
    cfg.merge_from_dict(SMALL)
    cfg.merge_from_dict(options)
    for key, value in Config.fromfile(mmdevplug.base_config('auto')).items():
        cfg.setdefault(key, value)
    cfg.accelerator.type = accelerator
    cfg.work_dir = str(Path(work_dir))
    cfg.launcher = 'none'
    return cfg


def weights_of(model):
    """The state dict as arrays of their own, which training leaves as they are."""
    return {name: value.cpu().float().numpy().copy() for name, value in model.state_dict().items()}


def train_llama(accelerator, work_dir, name='llama_lora.py', options=None):
    """Train.

    Returns:
        dict: ``losses``, ``bits_per_byte``, ``before`` and ``after`` (weights on the host), and
        for each tensor of the model ``devices`` and ``dtypes``.
    """
    runner = RUNNERS.build(llama_config(accelerator, work_dir, name, **(options or {})))
    before = weights_of(runner.model)
    scalars = runner.message_hub
    losses = note(
        runner, 'after_train_iter', lambda *_, **__: scalars.get_scalar('train/loss').current()
    )
    runner.train()
    named = [*runner.model.named_parameters(), *runner.model.named_buffers()]
    return dict(
        losses=losses,
        bits_per_byte=runner.message_hub.get_scalar('val/bits_per_byte').current(),
        before=before,
        after=weights_of(runner.model),
        devices={name: str(tensor.device) for name, tensor in named},
        dtypes={name: str(tensor.dtype) for name, tensor in named},
    )

"""Jobs of one process that drives several chips of torch_xla."""

import os

from mmengine.hooks import Hook

from tests.features.rows import row_config, train_config
from tests.xla.executions import Counts, differences

CHIPS = 2
#: For a process that drives that many.
TWO_CHIPS = dict(environ=dict(PJRT_DEVICE='CPU', CPU_NUM_DEVICES=str(CHIPS)), timeout=280)
#: The changes of a row that is saved half way.
SAVED = dict(
    default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=10, by_epoch=False))
)


class Shares(Hook):
    """Notes what part of the weights and of the optimizer's states the first chip holds."""

    priority = 'LOWEST'

    def after_train(self, runner):
        states = runner.optim_wrapper.optimizer.state.values()
        self.weights = share_of(list(runner.model.parameters()))
        self.states = share_of([v for s in states for v in s.values() if getattr(v, 'ndim', 0)])


def share_of(tensors):
    """The bytes of tensors on the first chip, over all of theirs."""
    import torch_xla

    shards = torch_xla._XLAC._get_local_shards(tensors)
    first = [of_tensor[0][0] for of_tensor in shards]
    return sum(map(_bytes, first)) / sum(map(_bytes, tensors))


def _bytes(tensor):
    return tensor.numel() * tensor.element_size()


def spmd_config(name, folder, **changes):
    """The config of a row of the feature table, for all chips of one process."""
    cfg = row_config(name, 'xla', folder)
    cfg.accelerator.spmd = True
    cfg.train_dataloader.batch_size //= CHIPS
    for key in changes:
        cfg.pop(key, None)  # an update would merge
    cfg.update(changes)
    return cfg


def train_rows_on_chips(names, folder, **changes):
    """Train rows one after the other.

    Returns:
        dict: For each row what :func:`train_config` returns, ``executions``, and ``shares`` of
        weights and states.
    """
    os.chdir(folder)
    found = {}
    for name in names:
        counts, shares = Counts(), Shares()
        found[name] = train_config(spmd_config(name, folder, **changes), counts, shares)
        executions, compilations = (differences(kind[11:17]) for kind in zip(*counts.counted))
        found[name].update(
            executions=list(zip(executions, compilations)), shares=(shares.weights, shares.states)
        )
    return found


def train_row_from(name, accelerator, folder, path, **changes):
    """Train a row from a checkpoint on; ``accelerator`` may be ``'spmd'``."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    changes.update(load_from=str(path), resume=True)
    if accelerator == 'spmd':
        return train_config(spmd_config(name, folder, **changes))
    cfg = row_config(name, accelerator, folder)
    cfg.update(changes)
    return train_config(cfg)


def train_saving(name, accelerator, folder):
    """Train a row, which is saved half way, in one process of another kind."""
    cfg = row_config(name, accelerator, folder)
    cfg.update(SAVED)
    return train_config(cfg)

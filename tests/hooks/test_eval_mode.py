"""Training goes on in the modes from before a validation inside an epoch."""

from mmengine.hooks import Hook
from mmengine.registry import HOOKS, RUNNERS

from tests.jobs import digits_config
from tests.ranks import run_ranks


@HOOKS.register_module()
class Halfway(Hook):
    """Keeps one layer in eval mode, validates after some iterations, and notes the modes."""

    def __init__(self):
        self.modes = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        model = getattr(runner.model, 'module', runner.model)
        if batch_idx == 0:
            model.backbone[0].eval()
        self.modes.append([model.training, model.backbone[0].training, model.head.training])

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if batch_idx in (2, 5):
            runner.val_loop.run()


def train(work_dir):
    cfg = digits_config('cpu', work_dir, train_cfg__max_epochs=2)
    cfg.custom_hooks = [dict(type='Halfway')]
    runner = RUNNERS.build(cfg)
    runner.train()
    return next(hook.modes for hook in runner.hooks if isinstance(hook, Halfway))


def test_training_goes_on_in_the_modes_before(tmp_path):
    for modes in run_ranks(train, 2, tmp_path):
        assert len(modes) == 22
        assert all(each == [True, False, True] for each in modes)

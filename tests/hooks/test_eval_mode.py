"""Training goes on in the modes from before a validation inside an epoch."""

import inspect

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


@HOOKS.register_module()
class Part(Halfway):
    """Leaves a part of the model in eval mode."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if batch_idx == 2:
            getattr(runner.model, 'module', runner.model).head.eval()


def train(work_dir, hook='Halfway'):
    cfg = digits_config('cpu', work_dir, train_cfg__max_epochs=2)
    cfg.custom_hooks = [dict(type=hook)]
    runner = RUNNERS.build(cfg)
    runner.train()
    return next(hook.modes for hook in runner.hooks if isinstance(hook, Halfway))


def test_training_goes_on_in_the_modes_before(tmp_path):
    for modes in run_ranks(train, 2, tmp_path):
        assert len(modes) == 22
        assert all(each == [True, False, True] for each in modes)
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert log.count('The model was in eval mode before iteration 4') == 1
    line = inspect.getsourcelines(Halfway.after_train_iter)[1] + 2
    assert log.count(f'the validation at {__file__}:{line} has left it so') == 1


def test_a_part_that_a_hook_leaves_in_eval_mode_is_named(tmp_path):
    modes = run_ranks(train, 0, tmp_path, 'Part')[0]
    assert [head for *_, head in modes] == ([True] * 3 + [False] * 19) * 2
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert log.count('A hook has put head (1 modules) in eval mode before iteration 4') == 1

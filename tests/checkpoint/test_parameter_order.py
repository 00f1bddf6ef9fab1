"""Resuming with parameters in another order: that of keys in a config, which MMEngine sorts."""

import pytest
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from torch import nn
from torch.nn.functional import cross_entropy

from mmdevplug.checkpoint.load_model import follow_order
from mmdevplug.errors import CheckpointError
from mmdevplug.runner import DeviceRunner
from tests.jobs import digits_config, largest_difference, log_of, messages_of, weights_of


@MODELS.register_module()
class HeadsByName(BaseModel):
    """Linear heads of one shape, in the order of the config."""

    def __init__(self, heads):
        super().__init__()
        self.scales = heads
        self.heads = nn.ModuleDict({name: nn.Linear(64, 10) for name in heads})

    def forward(self, inputs, labels, mode='loss'):
        x = inputs.flatten(1)
        losses = (cross_entropy(self.heads[n](x) * s, labels) for n, s in self.scales.items())
        return dict(loss=sum(losses))


HEADS = dict(zebra=1.0, apple=0.3)


def train(work_dir, paramwise_cfg, as_written=False, **options):
    cfg = digits_config('cpu', work_dir, **options)
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    cfg.model = dict(type='HeadsByName', heads=HEADS)
    cfg.optim_wrapper = dict(
        type='OptimWrapper', optimizer=dict(type='Adam', lr=1e-3), paramwise_cfg=paramwise_cfg
    )
    cfg.param_scheduler = dict(type='CosineAnnealingLR', T_max=4, eta_min_ratio=0.5)
    cfg.train_cfg.max_epochs = 3
    cfg.default_hooks.checkpoint.update(interval=1, max_keep_ckpts=-1)
    cfg.experiment_name = str(work_dir)  # each has a log
    if as_written:
        work_dir.mkdir()
        cfg.dump(work_dir / 'config.py')
        cfg = Config.fromfile(work_dir / 'config.py')
    runner = DeviceRunner.from_cfg(cfg)
    runner.train()
    return weights_of(runner.model)


#: One group, or one for each parameter.
@pytest.mark.parametrize('paramwise_cfg', [None, dict(custom_keys=dict(zebra=dict(lr_mult=3.0)))])
def test_each_parameter_gets_its_own_state(tmp_path, paramwise_cfg):
    expected = train(tmp_path / 'whole', paramwise_cfg)
    first = dict(load_from=str(tmp_path / 'whole' / 'epoch_1.pth'), resume=True)
    found = train(tmp_path / 'again', paramwise_cfg, as_written=True, **first)
    assert largest_difference(found, expected) <= 1e-6
    said = 'in another order, in which heads.zebra.weight is the first and not heads.apple.weight'
    assert said in log_of(tmp_path / 'again')


def test_other_groups_are_refused():
    state = dict(state={}, param_groups=[dict(params=[0, 1]), dict(params=[2])])
    with pytest.raises(CheckpointError, match='a.pth has the parameters in other groups'):
        follow_order(state, ['a', 'b', 'c'], [['a', 'c'], ['b']], 'a.pth')


def test_other_parameters_are_named():
    state = dict(state={}, param_groups=[dict(params=[0, 1])])
    with messages_of(MMLogger.get_current_instance()) as told:
        assert follow_order(state, ['a', 'b'], [['a', 'c']], 'a.pth') == (state, [0])
    assert "['b', 'c'] are in one of both alone" in told[0]
    assert 'load_from=a.pth' in told[0]

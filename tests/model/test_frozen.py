"""Validating models that have nothing to train, on one rank and on two."""

import pytest
from mmengine.model import BaseModel
from mmengine.registry import MODELS, RUNNERS

from mmdevplug.errors import ModelError
from mmdevplug.examples.digits import DigitsClassifier
from tests.jobs import digits_config, install_card
from tests.ranks import run_ranks


@MODELS.register_module()
class FrozenDigits(DigitsClassifier):
    """A classifier whose parameters are all frozen."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.requires_grad_(False)


@MODELS.register_module()
class DigitsByMean(BaseModel):
    """Guess a digit by the mean of the picture, without parameters."""

    def forward(self, inputs, labels=None, mode='tensor'):
        guesses = (inputs.mean((1, 2, 3)) * 5 + 5).long()
        return [dict(pred=guess, label=label) for guess, label in zip(guesses, labels)]


def validate(accelerator, work_dir, kind, wrapper):
    install_card(accelerator)
    cfg = digits_config(accelerator, work_dir)
    cfg.model.update(type=kind, init_cfg=None)
    cfg.model_wrapper_cfg = wrapper
    runner = RUNNERS.build(cfg)
    found = runner.val()
    if cfg.launcher == 'pytorch':
        with pytest.raises(ModelError, match='no parameter that requires a gradient'):
            runner.train()
    return found


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
@pytest.mark.parametrize(
    ('kind', 'wrapper'),
    [('FrozenDigits', None), ('DigitsByMean', dict(type='MMSeparateDistributedDataParallel'))],
)
def test_two_ranks_validate_as_one(tmp_path, accelerator, kind, wrapper):
    (expected,) = run_ranks(validate, 0, accelerator, tmp_path / 'one', kind, wrapper)
    assert expected['accuracy'] > 0
    found = run_ranks(validate, 2, accelerator, tmp_path / 'two', kind, wrapper)
    assert found[0] == expected

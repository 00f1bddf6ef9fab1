"""Adapters whose ranks differ are warned of, or refused."""

import pytest
from mmengine.logging import MMLogger
from torch import nn

from mmdevplug.errors import ModelError
from mmdevplug.model_parallel.lora_check import check_r_consistency
from tests.jobs import need_peft


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.value = nn.Linear(8, 8)
        self.tokens = nn.Embedding(5, 8)


def adapted(**options):
    model = nn.Sequential(Block(), Block())
    peft = need_peft()
    config = peft.LoraConfig(r=4, target_modules=['query', 'value', 'tokens'], **options)
    return peft.get_peft_model(model, config)


@pytest.fixture
def warnings(monkeypatch):
    """What is logged."""
    said = []
    logger = MMLogger.get_current_instance()
    monkeypatch.setattr(logger, 'handle', lambda record: said.append(record))
    return said


def test_one_rank_is_silent(warnings):
    found = check_r_consistency(adapted(), strict=True)
    blocks = ('base_model.model.0', 'base_model.model.1')
    assert found == {4: [f'{b}.{part}' for b in blocks for part in ('query', 'value', 'tokens')]}
    assert warnings == []


@pytest.mark.parametrize('model', [nn.Linear(2, 2), nn.Sequential(Block())])
def test_no_adapters(model, warnings):
    assert check_r_consistency(model, strict=True) == {}
    assert warnings == []


def test_ranks_that_differ_between_layers(warnings):
    model = adapted(rank_pattern={'1.value': 2})
    found = check_r_consistency(model)
    assert found[2] == ['base_model.model.1.value']
    assert len(found[4]) == 5
    (record,) = warnings
    assert record.levelname == 'WARNING'
    for words in ('2 different', 'r=2 in base_model.model.1.value;', 'and 2 more', 'rank_pattern'):
        assert words in record.getMessage()
    with pytest.raises(ModelError, match=r'r=2 in base_model\.model\.1\.value; r=4 in'):
        check_r_consistency(model, strict=True)


def test_ranks_that_differ_between_adapters():
    model = adapted()
    model.add_adapter('second', need_peft().LoraConfig(r=8, target_modules=['query']))
    found = check_r_consistency(model)
    assert sorted(found) == [4, 8]
    assert found[8][0] == "base_model.model.0.query (adapter 'second')"
    with pytest.raises(ModelError, match="adapter 'second'"):
        check_r_consistency(model, strict=True)


def test_adapters_that_are_not_of_peft():
    class Layer(nn.Module):
        def __init__(self, r):
            super().__init__()
            self.r = r
            self.lora_A = nn.Parameter(nn.Linear(2, r).weight)

    with pytest.raises(ModelError, match='r=1 in 0; r=3 in 1'):
        check_r_consistency(nn.Sequential(Layer(1), Layer(3)), strict=True)

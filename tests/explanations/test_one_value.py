"""Layers that get one value per channel: the layer, the rank and what to change."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from torch import nn

from mmdevplug.errors import ModelError
from mmdevplug.explanations.one_value import explain_one_value
from tests.explanations.jobs import build


class Functional(nn.Module):
    def forward(self, x):
        return F.batch_norm(x, None, None, training=True)


LAYERS = dict(
    BatchNorm2d=(nn.BatchNorm2d(4), (1, 4, 1, 1)),
    BatchNorm1d=(nn.BatchNorm1d(4), (1, 4)),
    InstanceNorm2d=(nn.InstanceNorm2d(4), (2, 4, 1, 1)),
    GroupNorm=(nn.GroupNorm(4, 4), (1, 4, 1, 1)),
    Functional=(Functional(), (1, 4)),
)
WAYS = dict.fromkeys(LAYERS, 'train_dataloader.batch_size is 2, and this is the rest of an epoch')
WAYS.update(InstanceNorm2d='take larger inputs', GroupNorm='Set num_groups below')


def message_of(kind, batch_size):
    layer, shape = LAYERS[kind]
    model = nn.Sequential(nn.Sequential(layer))
    runner = SimpleNamespace(
        rank=3, model=model, _train_dataloader=dict(batch_size=batch_size), cfg={}
    )
    with pytest.raises(ModelError) as caught, explain_one_value(runner, 'train'):
        model(torch.ones(shape))
    return str(caught.value)


@pytest.mark.parametrize('kind', LAYERS)
def test_the_layer_and_the_way_out_are_named(kind):
    message = message_of(kind, 2)
    assert message.startswith(f'rank 3, train: layer 0.0 ({kind}) got an input of shape (')
    assert WAYS[kind] in message
    assert '\n' not in message


def test_a_batch_size_of_one_is_named():
    message = message_of('BatchNorm2d', 1)
    for part in ('(1, 4, 1, 1)', 'batch_size is 1: set it to 2', 'drop_last=True', 'eval mode'):
        assert part in message


def test_other_errors_stay():
    with pytest.raises(ValueError, match='expected 4D input'):
        with explain_one_value(SimpleNamespace(), 'train'):
            nn.BatchNorm2d(4)(torch.ones(4))


@MODELS.register_module(force=True)
class NormalizesPixels(BaseModel):
    def __init__(self, norm='SyncBatchNorm'):
        super().__init__()
        self.norm, self.net = getattr(nn, norm)(8), nn.Linear(8, 1)

    def forward(self, inputs, mode='tensor'):
        outputs = self.net(self.norm(inputs))
        return dict(loss=outputs.mean()) if mode == 'loss' else [dict()] * len(outputs)


@pytest.mark.parametrize('norm', ['SyncBatchNorm', 'BatchNorm1d'])
def test_the_last_batch_of_an_epoch(norm, tmp_path):
    model, dataset = dict(type='NormalizesPixels', norm=norm), dict(count=9)
    runner = build(tmp_path, 'cpu', model, dataset=dataset, epochs=1)
    with pytest.raises(ModelError, match=r'rank 0, train: layer norm \(.*batch_size is 4, and'):
        runner.train()
    build(
        tmp_path / 'dropped',
        'cpu',
        model,
        dataset=dataset,
        epochs=1,
        train_dataloader=dict(drop_last=True),
    ).train()

"""Tensors that nobody registered, on devices that each have words of their own for it."""

import re

import numpy as np
import pytest
import torch
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.registry import MODELS
from torch import nn

from mmdevplug import init_device
from mmdevplug.device_guard.explain import explain_mixed_devices
from mmdevplug.errors import DeviceMismatchError
from tests.columns import CUDA, NATIVE, XLA
from tests.data.jobs import build
from tests.jobs import install_card
from tests.ranks import in_ranks


class Plain(nn.Module):
    """Computes with a tensor on the host, which is in another place each time."""

    def __init__(self):
        super().__init__()
        self.layer = nn.MSELoss()
        self.table = dict(pair=[torch.ones(4, 2)])
        self.scale = (lambda weight: lambda x: torch.maximum(x, weight))(torch.ones(4, 2))

    def forward(self, x, place):
        if place == 'init':
            return torch.maximum(x, self.table['pair'][0])
        if place == 'table':
            table = self.table
            return table['pair'][0].t() @ x
        if place == 'closure':
            return self.scale(x)
        if place == 'made':
            return (2 * torch.maximum(x, torch.ones(4, 2))).mean()
        if place == 'numpy':
            return torch.maximum(x, torch.from_numpy(np.ones((4, 2), 'float32')))
        if place == 'variable':
            try:
                raise KeyError(place)  # which PyTorch's error then comes after
            except KeyError:
                mask = torch.eye(4)
                return mask @ x
        if place == 'method':
            return torch.zeros(2, 4).matmul(x)
        return self.layer(x, torch.zeros(4, 2))


#: What each message names.
NAMED = dict(
    init="self.table['pair'][0]: cpu, float32, 4x2",
    table="table['pair'][0]: cpu, float32, 4x2",
    closure='weight: cpu, float32, 4x2',
    made='a tensor that is made in this line on the cpu',
    numpy='a tensor that is made in this line on the cpu',
    variable='mask: cpu, float32, 4x4',
    method='a tensor that is made in this line on the cpu',
    module='target: cpu, float32, 4x2',
)


@pytest.mark.parametrize('accelerator', ['zeta', NATIVE, XLA, CUDA])
@in_ranks()
def test_the_line_and_the_tensor_are_named(accelerator):
    install_card(accelerator)
    device = init_device('none', accelerator).device
    model, x, lines = Plain().to(device), torch.ones(4, 2).to(device), {}

    def run(function):
        with explain_mixed_devices(model, [device], 'rank 0, train'):
            float(function().sum())

    for place, named in NAMED.items():
        with pytest.raises(DeviceMismatchError) as raised:
            run(lambda place=place: model(x, place))
        message = str(raised.value)
        assert named in message
        assert f'expected on {device}' in message
        assert '\n' not in message
        lines[place] = int(re.search(r'test_explain\.py:(\d+), in (?:layer )?\(\w+\)', message)[1])
    assert len(set(lines.values())) == len(NAMED)
    assert lines['closure'] < lines['init'] < lines['table'] < lines['made'] < lines['numpy']
    # Errors that are about something else.
    with pytest.raises(RuntimeError) as raised:
        run(lambda: x[torch.tensor([0, 1])].view(3, 5))  # indices on the host are right
    assert raised.type is RuntimeError
    with pytest.raises(KeyError):
        run(lambda: model.table['nothing'])


class Preprocessor(BaseDataPreprocessor):
    def __init__(self, fails=False):
        super().__init__()
        self.fails, self.mean = fails, torch.ones(8)

    def forward(self, data, training=False):
        data = self.cast_data(data)
        if self.fails:
            data['inputs'] = torch.maximum(data['inputs'], self.mean.expand(4, 8))
        return data


@MODELS.register_module(force=True)
class PlainInAJob(BaseModel):
    def __init__(self, place):
        super().__init__(Preprocessor(fails=place == 'preprocessor'))
        self.net, self.place = nn.Linear(8, 1), place

    def forward(self, inputs, mode='tensor'):
        outputs = self.net(inputs)
        if mode == self.place:
            outputs = torch.maximum(outputs, torch.zeros(4, 1))
        if mode == 'predict':
            return [dict(value=1.0)] * len(outputs)
        return dict(loss=outputs.mean())


@in_ranks()
def test_jobs_say_so_in_training_in_validation_and_in_the_preprocessor(tmp_path):
    install_card('zeta')
    for place in ('loss', 'predict', 'preprocessor'):
        runner = build(tmp_path / place, 'zeta', dict(type='PlainInAJob', place=place))
        with pytest.raises(DeviceMismatchError, match='^rank 0, train: ') as raised:
            runner.train()
        made = 'a tensor that is made in this line on the cpu'
        named = 'self.mean: cpu' if place == 'preprocessor' else made
        message = str(raised.value)
        assert named in message
        assert ('data_preprocessor (Preprocessor)' in message) == (place == 'preprocessor')

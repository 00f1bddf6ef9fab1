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
from tests.columns import CUDA, NATIVE, job_of
from tests.data.jobs import build
from tests.jobs import install_card
from tests.ranks import run_ranks

PLACES = ('init', 'table', 'closure', 'made', 'numpy', 'variable', 'method', 'module')


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


def explain(accelerator):
    """What is said in each place, and of errors that are about something else."""
    install_card(accelerator)
    device = init_device('none', accelerator).device
    model = Plain().to(device)
    x = torch.ones(4, 2).to(device)

    def say(function):
        try:
            with explain_mixed_devices(model, [device], 'rank 0, train'):
                float(function().sum())
        except Exception as error:
            return type(error).__name__, str(error)
        return None, 'no error'

    def view_of_indices_on_the_host():
        return x[torch.tensor([0, 1])].view(3, 5)

    found = {place: say(lambda place=place: model(x, place)) for place in PLACES}
    others = [say(view_of_indices_on_the_host), say(lambda: model.table['nothing'])]
    return str(device), found, others


@pytest.mark.parametrize(
    'accelerator', ['zeta', NATIVE, pytest.param('xla', marks=pytest.mark.xla), CUDA]
)
def test_the_line_and_the_tensor_are_named(accelerator):
    ((device, found, others),) = run_ranks(explain, 0, accelerator, **job_of(accelerator))
    lines = {}
    for place, (kind, message) in found.items():
        assert kind == 'DeviceMismatchError', (place, kind, message)
        assert NAMED[place] in message, message
        assert f'expected on {device}' in message
        assert '\n' not in message
        lines[place] = int(re.search(r'test_explain\.py:(\d+), in (?:layer )?\(\w+\)', message)[1])
    assert len(set(lines.values())) == len(PLACES)
    assert lines['closure'] < lines['init'] < lines['table'] < lines['made'] < lines['numpy']
    assert [kind for kind, _ in others] == ['RuntimeError', 'KeyError']


# jobs --------------------------------------------------------------------------------------------


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


def run_jobs(folder):
    install_card('zeta')
    messages = {}
    for place in ('loss', 'predict', 'preprocessor'):
        runner = build(folder / place, 'zeta', dict(type='PlainInAJob', place=place))
        with pytest.raises(RuntimeError) as caught:
            runner.train()
        messages[place] = f'{caught.type.__name__}: {caught.value}'
    return messages


def test_jobs_say_so_in_training_in_validation_and_in_the_preprocessor(tmp_path):
    (messages,) = run_ranks(run_jobs, 0, tmp_path)
    for place, message in messages.items():
        assert message.startswith('DeviceMismatchError: rank 0, train: '), message
        made = 'a tensor that is made in this line on the cpu'
        named = 'self.mean: cpu' if place == 'preprocessor' else made
        assert named in message
        assert ('data_preprocessor (Preprocessor)' in message) == (place == 'preprocessor')

"""Moving modules, and initializing them on the host while they are on a device."""

import torch
from mmengine.model import BaseDataPreprocessor, BaseModel
from torch import nn

from tests.jobs import install_card
from tests.ranks import run_ranks


class Model(BaseModel):
    def __init__(self):
        super().__init__(data_preprocessor=BaseDataPreprocessor())
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer('mean', torch.ones(4))
        self.register_buffer('same_mean', self.mean)

    def forward(self, inputs, mode='tensor'):
        return self.second(self.first(inputs))


def move_and_initialize():
    install_card('zeta')
    from mmdevplug.accelerators import get_accelerator
    from mmdevplug.model.move import misplaced_tensors, move_module, weights_on_host

    accelerator = get_accelerator('zeta')
    device = accelerator.device(2)
    holder = nn.ModuleDict(dict(model=Model()))  # whose `to` does not reach preprocessors
    before = misplaced_tensors(holder, device)
    move_module(holder, device)
    model = holder['model']
    assert not misplaced_tensors(holder, device)
    assert model.second.weight is model.first.weight
    assert model.same_mean is model.mean
    assert model.data_preprocessor.device == device
    parameter = model.first.weight
    with weights_on_host(holder, accelerator):
        assert model.first.weight.device.type == 'cpu'
        assert model.second.weight is model.first.weight
        torch.manual_seed(3)
        nn.init.normal_(model.first.weight)
        model.mean.zero_()
    assert model.first.weight is parameter
    torch.manual_seed(3)
    assert torch.equal(parameter.cpu(), nn.init.normal_(torch.empty(4, 4)))
    assert model.mean.cpu().tolist() == [0.0] * 4
    return sorted(before)


def test_sharing_and_preprocessors_survive():
    (names,) = run_ranks(move_and_initialize, 0)
    assert 'model.first.weight' in names
    assert 'model.data_preprocessor (data preprocessor)' in names
    assert 'model.mean' in names

"""Models of point clouds on a lazy device: what depends on the number of voxels is on the host."""

import pytest
import torch
from mmengine.model import BaseDataPreprocessor, BaseModel
from torch import nn

from mmdevplug import init_device
from mmdevplug.lazy.losses import point_encoders
from mmdevplug.model.place_model import place_model
from tests.columns import needs_lazy
from tests.ranks import in_ranks

SIDE = 4


class Encoder(nn.Module):
    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.norm = norm(3)
        self.got = []

    def forward(self, voxels, coors):
        self.got.append(voxels.device.type)
        return self.norm(self.linear(voxels))


class Scatter(nn.Module):
    def forward(self, features, coors, batch_size):
        image = features.new_zeros(3, SIDE * SIDE)
        image[:, coors] = features.t()
        return image.view(1, 3, SIDE, SIDE)


class Head(nn.Module):
    def loss_by_feat(self, outputs):
        return dict(loss=outputs[outputs > 0].sum())


class Model(BaseModel):
    def __init__(self, encoder, scatter):
        super().__init__(BaseDataPreprocessor())
        self.pts_voxel_encoder, self.pts_middle_encoder = encoder, scatter
        self.backbone, self.pts_bbox_head = nn.Conv2d(3, 2, 3, padding=1), Head()

    def forward(self, voxels, places, mode='loss'):
        image = self.pts_middle_encoder(self.pts_voxel_encoder(voxels, places), places, 1)
        return self.pts_bbox_head.loss_by_feat(self.backbone(image))


@pytest.mark.parametrize(
    ('norm', 'scatter', 'expected'),
    [
        (nn.BatchNorm1d, Scatter(), True),
        (nn.SyncBatchNorm, Scatter(), False),
        (nn.BatchNorm1d, nn.Linear(1, 1), False),
        (nn.BatchNorm1d, None, False),
    ],
)
def test_which_models_encode_on_the_host(norm, scatter, expected):
    model = Model(Encoder(norm), scatter)
    parts = (model.pts_voxel_encoder, model.pts_middle_encoder) if expected else None
    assert point_encoders(model) == parts


def train(kind):
    torch.manual_seed(0)
    model = place_model(Model(Encoder(), Scatter()), init_device('none', kind)).train()
    losses = []
    for count in (5, 9, 7):
        data = dict(voxels=torch.rand(count, 2), places=torch.randperm(SIDE * SIDE)[:count])
        loss, _ = model.parse_losses(model(**model.data_preprocessor(data)))
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
    gradients = {name: p.grad.cpu().numpy() for name, p in model.named_parameters()}
    state = {name: value.cpu().numpy() for name, value in model.named_buffers()}
    assert {p.device.type for p in model.parameters()} == {kind}
    return losses, {**gradients, **state}, set(model.pts_voxel_encoder.got)


@needs_lazy
@in_ranks()
def test_losses_gradients_and_statistics_are_those_of_the_host():
    host, lazy = train('cpu'), train('lazy')
    assert lazy[0] == pytest.approx(host[0], abs=1e-5)
    for name, value in host[1].items():
        assert lazy[1][name] == pytest.approx(value, abs=1e-5), name
    assert lazy[2] == {'cpu'}

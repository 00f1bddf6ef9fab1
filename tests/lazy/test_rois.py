"""Detectors of two stages on a lazy device: their networks there, all between them on the host."""

import types

import pytest
import torch
from mmengine.model import BaseModel
from torch import nn

from mmdevplug import init_device
from mmdevplug.errors import ModelError
from mmdevplug.lazy.losses import two_stage_detectors
from mmdevplug.lazy.rois import split_stages
from mmdevplug.model.place_model import place_model
from tests.columns import needs_lazy
from tests.ranks import in_ranks

pytestmark = needs_lazy
IMAGES, SAMPLED = 2, 9


class FirstStage(nn.Module):
    """Each position with more than the mean score is a proposal."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 1)

    def forward(self, x):
        return self.conv(x)

    def loss_by_feat(self, scores):
        return dict(loss_rpn=scores.square().mean())

    def predict_by_feat(self, scores):
        return [(each[0] > each.mean()).nonzero() for each in scores]


class Extractor(nn.Module):
    def forward(self, x, rois):
        return torch.cat([each[:, i[:, 0], i[:, 1]].t() for each, i in zip(x, rois)])


class SecondStage(nn.Module):
    """A head that notes what its network gets, with a loss that reads a buffer and writes it."""

    def __init__(self, norm=False, flat=False):
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3) if norm else None
        self.flat, self.got = flat, []
        self.register_buffer('calls', torch.zeros(1))

    def forward(self, rois):
        self.got.append((len(rois), rois.device.type))
        outputs = self.layer(rois)
        outputs = outputs if self.norm is None else self.norm(outputs)
        return outputs.mean() if self.flat else outputs

    def loss_and_target(self, outputs):
        self.calls += 1
        return dict(loss_box=(outputs * self.calls).square().mean())


class LearningExtractor(nn.Module):
    """An extractor with weights: it gets the features, which are on the device, beside RoIs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.got = []

    def forward(self, x, places):
        self.got.append((len(places), places.device.type))
        return self.layer(x.permute(0, 2, 3, 1).reshape(-1, 2)[places])


class RoIHead(nn.Module):
    def __init__(self, inside=False, **kwargs):
        super().__init__()
        self.bbox_roi_extractor = Extractor()
        self.bbox_head = SecondStage(**kwargs)
        self.second_head = SecondStage()
        self.learning = LearningExtractor()
        self.bbox_sampler = types.SimpleNamespace(num=SAMPLED, pos_fraction=0.5)
        self.inside = inside

    def loss(self, x, rois, samples):
        features = self.bbox_roi_extractor(x, rois)
        if self.inside:
            return dict(loss=self.bbox_head.layer(features).sum())
        losses = self.bbox_head.loss_and_target(self.bbox_head(features))
        # What has been on the device goes back to it with gradients, and features stay here.
        further = self.second_head(self.second_head(features)[:, :2] + features)
        places = [9 * i + 3 * each[:, 0] + each[:, 1] for i, each in enumerate(rois)]
        losses['loss_learning'] = self.learning(x, torch.cat(places)).square().mean()
        return dict(losses, loss_again=further.abs().mean() + features.square().mean())

    def predict(self, x, rois, samples):
        return self.bbox_head(self.bbox_roi_extractor(x, rois)).softmax(1)


class Detector(BaseModel):
    def __init__(self, **kwargs):
        super().__init__()
        self.backbone = nn.Conv2d(1, 2, 3)
        self.rpn_head = FirstStage()
        self.roi_head = RoIHead(**kwargs)
        self.test_cfg = dict(rpn=dict(max_per_img=SAMPLED), rcnn=dict(max_per_img=1))

    def extract_feat(self, inputs):
        return self.backbone(inputs)

    def loss(self, inputs, samples):
        x = self.extract_feat(inputs)
        scores = self.rpn_head(x)
        losses = self.rpn_head.loss_by_feat(scores)
        rois = self.rpn_head.predict_by_feat(scores.detach())
        return dict(losses, **self.roi_head.loss(x, rois, samples))

    def predict(self, inputs, samples):
        x = self.extract_feat(inputs)
        rois = self.rpn_head.predict_by_feat(self.rpn_head(x))
        return self.roi_head.predict(x, rois, samples)

    def forward(self, inputs, samples=None, mode='loss'):
        return self.loss(inputs, samples) if mode == 'loss' else self.predict(inputs, samples)


def run(kind, host_losses='auto', iterations=3, **kwargs):
    """Train without changing weights, then predict: losses, gradients, and what heads got."""
    torch.manual_seed(0)
    model = place_model(Detector(**kwargs), init_device('none', kind), host_losses=host_losses)
    device = model.backbone.weight.device
    samples = [None] * IMAGES
    shown = []
    for _ in range(iterations):
        losses = model(torch.rand(IMAGES, 1, 5, 5).to(device), samples)
        loss, values = model.parse_losses(losses)
        model.zero_grad()
        loss.backward()
        shown.append({name: value.item() for name, value in values.items()})
    learned = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert {gradient.device for gradient in learned.values()} <= {device}
    roi_head = model.roi_head
    heads = [roi_head.bbox_head, roi_head.second_head, roi_head.learning]
    trained = [list(head.got) for head in heads]
    heads[0].got.clear()
    with torch.no_grad():
        found = model(torch.rand(IMAGES, 1, 5, 5).to(device), samples, mode='predict')
    return dict(
        losses=shown,
        gradients={name: gradient.cpu().numpy() for name, gradient in learned.items()},
        trained=trained,
        predicted=(heads[0].got, found.device.type, found.cpu().numpy()),
        calls=heads[0].calls.item(),
    )


def assert_same(one, other):
    for expected, found in zip(one['losses'], other['losses']):
        assert found == pytest.approx(expected, abs=1e-5)
    assert set(one['gradients']) == set(other['gradients'])
    for name, gradient in one['gradients'].items():
        assert other['gradients'][name] == pytest.approx(gradient, abs=1e-4), name
    assert other['predicted'][2] == pytest.approx(one['predicted'][2], abs=1e-5)
    assert one['calls'] == other['calls'] == len(one['losses'])


@in_ranks()
def test_networks_get_a_fixed_number_of_rois():
    host, lazy = run('cpu'), run('lazy')
    assert_same(host, lazy)
    counts = {count for got in host['trained'] for count, _ in got}
    assert len(counts) > 1
    assert max(counts) < IMAGES * SAMPLED
    rows = {count for got in lazy['trained'] for count, _ in got}
    assert rows <= {IMAGES * SAMPLED, IMAGES * (SAMPLED // 2)}
    assert {kind for got in lazy['trained'] for _, kind in got} == {'lazy'}
    assert lazy['predicted'][:2] == ([(IMAGES * SAMPLED, 'lazy')], 'cpu')


@in_ranks()
def test_predictions_are_finished_on_the_host_always():
    host, lazy = run('cpu', iterations=0), run('lazy', host_losses=False, iterations=0)
    assert_same(host, lazy)
    assert lazy['predicted'][:2] == ([(IMAGES * SAMPLED, 'lazy')], 'cpu')


@pytest.mark.parametrize('losses', [True, False])
def test_which_methods_are_replaced(losses):
    model = Detector()
    split_stages(model, losses)
    for part in (model, model.roi_head):
        assert ('loss' in vars(part)) == losses
        assert 'predict' in vars(part)
    assert ('loss_and_target' in vars(model.roi_head.bbox_head)) == losses
    assert two_stage_detectors(nn.Sequential(model, nn.Identity())) == [model]


@in_ranks()
def test_rows_that_would_change_statistics_are_not_added():
    host, lazy = run('cpu', norm=True), run('lazy', norm=True)
    assert_same(host, lazy)
    assert [count for count, _ in lazy['trained'][0]] == [count for count, _ in host['trained'][0]]


@in_ranks()
def test_what_cannot_be_split_is_refused():
    with pytest.raises(ModelError, match=r'SecondStage.forward .*shape \(\).*host_losses=False'):
        run('lazy', flat=True)
    with pytest.raises(ModelError, match=r'RoIHead.loss .*as modules.*host_losses=False'):
        run('lazy', inside=True)

"""Which losses a lazy device leaves to the host, and their gradients."""

import copy

import pytest
import torch
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.structures import BaseDataElement
from torch import nn

from mmdevplug import init_device
from mmdevplug.errors import ModelError
from mmdevplug.lazy.losses import compute_losses_on_host
from mmdevplug.model.place_model import place_model
from tests.columns import needs_lazy
from tests.ranks import in_ranks


class Further(nn.Module):
    """A loss beside that of the outputs, as of queries that are no results."""

    def loss(self, outputs):
        self.device = outputs.device.type
        return outputs[outputs > 0.5].sum()


class Head(nn.Module):
    """A head whose loss chooses with a mask, and reads a parameter, a buffer and tensors."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer('calls', torch.zeros(1))
        self.further, self.kept = Further(), {}

    def loss(self, features):
        self.shift = features.detach().mean()
        self.kept.update(shifts=[self.shift * 2], count=1)
        outputs = self.conv(features)
        further = self.further.loss(outputs.sigmoid())
        return dict(self.loss_by_feat([outputs], positive=0.1), loss_further=further)

    def loss_by_feat(self, outputs, positive):
        self.calls += 1
        chosen = outputs[0][outputs[0] > positive]
        shift = self.shift + self.kept['shifts'][0]
        self.kept['count'] += 1
        return dict(loss=(chosen * self.scale + shift).sum(), count=chosen.detach().sum())


class Model(BaseModel):
    def __init__(self, **parts):
        super().__init__()
        self.backbone = nn.Conv2d(1, 2, 3)
        self.head = Head()
        for name, part in parts.items():
            setattr(self.head, name, part)

    def forward(self, inputs, mode='loss'):
        features = self.backbone(inputs)
        return dict(self.head.loss(features), loss_of_features=features.square().mean())


class Boxes(Head):
    """A head that keeps what its loss has chosen, for another head."""

    def loss_by_feat(self, outputs, positive):
        self.chosen = outputs[0][outputs[0] > positive]
        return super().loss_by_feat(outputs, positive)

    def get_positive_infos(self):
        chosen, self.chosen = self.chosen, None
        return [chosen]


class Masks(nn.Module):
    """A head with two networks, which combines the output of one with what was chosen."""

    def __init__(self):
        super().__init__()
        self.prototypes, self.segments = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 1, 1)

    def forward(self, features, positive_infos):
        masks = self.prototypes(features).flatten()[:, None] * positive_infos[0]
        return masks, self.segments(features)

    def loss(self, features, positive_infos):
        return self.loss_by_feat(*self(features, positive_infos))

    def loss_by_feat(self, masks, segments):
        assert masks.device == segments.device
        return dict(loss_masks=masks.square().mean(), loss_segments=segments[segments > 0].sum())


class Instances(Model):
    """A model of one stage with boxes and masks of them."""

    def __init__(self):
        super().__init__()
        del self.head
        self.bbox_head, self.mask_head = Boxes(), Masks()

    def forward(self, inputs, mode='loss'):
        features = self.backbone(inputs)
        losses = self.bbox_head.loss(features)
        infos = self.bbox_head.get_positive_infos()
        return dict(losses, **self.mask_head.loss(features, positive_infos=infos))


class Teacher(nn.Module):
    """A head that assigns boxes for another."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)

    def get_label_assignment(self, outputs):
        assert outputs.device.type == 'cpu'
        return outputs[outputs > 0]


class Taught(Model):
    """A model with a teacher, which is no part of it, as those of mmdet."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, 'teacher', Teacher())

    def to(self, *args, **kwargs):
        self.teacher.to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def forward(self, inputs, mode='loss'):
        outputs = self.teacher.conv(self.backbone(inputs)).detach()
        assigned = self.teacher.get_label_assignment(outputs)
        return dict(super().forward(inputs), assigned=assigned.sum())


class Decoded(nn.Module):
    def __init__(self, avg_non_ignore):
        super().__init__()
        self.avg_non_ignore = avg_non_ignore


@pytest.mark.parametrize(
    ('parts', 'wanted', 'expected'),
    [
        ({}, 'auto', True),
        ({}, False, False),
        (dict(roi_head=nn.Identity()), 'auto', False),
        (dict(mask_head=nn.Identity()), 'auto', True),
        (dict(roi_head=nn.Identity()), True, True),
        (dict(loss_decode=Decoded(False), sampler=None), 'auto', False),
        (dict(loss_decode=Decoded(False), sampler=object()), 'auto', True),
        (dict(loss_decode=Decoded(True), sampler=None), 'auto', True),
        (dict(loss_decode=nn.ModuleList([Decoded(False), Decoded(True)])), 'auto', True),
        (dict(loss_decode=Decoded(False), sampler=None), True, True),
    ],
)
def test_which_heads_compute_on_the_host(parts, wanted, expected):
    model = Model(**parts)
    assert compute_losses_on_host(model, wanted) == ([model.head] if expected else [])


def test_a_model_without_such_a_head_stays_as_it_is():
    model = nn.Sequential(nn.Linear(1, 1))
    before = [dict(vars(part)) for part in model.modules()]
    assert compute_losses_on_host(model, True) == []
    assert [dict(vars(part)) for part in model.modules()] == before


def train(kind, built):
    torch.manual_seed(0)
    model = place_model(built(), init_device('none', kind))
    head = model.bbox_head if built is Instances else model.head
    device = model.backbone.weight.device
    shown = []
    for _ in range(3):
        loss, values = model.parse_losses(model(torch.rand(1, 1, 5, 5).to(device)))
        model.zero_grad()
        loss.backward()
        shown.append({name: (value.item(), value.device.type) for name, value in values.items()})
    assert all(p.grad.device == device for p in model.parameters())
    gradients = {name: p.grad.cpu().numpy() for name, p in model.named_parameters()}
    assert head.further.device == 'cpu'
    assert head.kept['shifts'][0].device == device
    assert head.kept['count'] == 2
    assert type(head._parameters['scale']) is nn.Parameter
    assert {part.device for part in head._buffers.values()} == {device}
    copied = copy.deepcopy(model)  # no head holds a graph of gradients
    assert [p.tolist() for p in copied.parameters()] == [p.tolist() for p in model.parameters()]
    return shown, gradients, head.calls.item()


@needs_lazy
@pytest.mark.parametrize('built', [Model, Instances, Taught])
@in_ranks()
def test_losses_and_gradients_are_those_of_the_host(built):
    host, lazy = train('cpu', built), train('lazy', built)
    for one, other in zip(host[0], lazy[0]):
        for name, (value, _) in one.items():
            assert other[name] == (pytest.approx(value, abs=1e-5), 'cpu')
    for name, gradient in host[1].items():
        assert lazy[1][name] == pytest.approx(gradient, abs=1e-5), name
    assert host[2] == lazy[2] == 3


class CallsAgain(Masks):
    def forward(self, features, positive_infos):
        masks, segments = super().forward(features, positive_infos)
        return masks, self.segments(segments.expand(-1, 2, -1, -1))


@needs_lazy
@in_ranks()
def test_a_mask_head_that_calls_a_network_with_what_was_fetched_is_refused():
    model = Instances()
    model.mask_head = CallsAgain()
    model = place_model(model, init_device('none', 'lazy'))
    with pytest.raises(ModelError, match=r'CallsAgain.forward cannot be .*host_losses=False'):
        model(torch.rand(1, 1, 5, 5).to(model.backbone.weight.device))


class Scaling(BaseDataPreprocessor):
    """Scale the boxes of samples in place, as augmentations of a batch do."""

    def forward(self, data, training=False):
        data = super().forward(data, training)
        for sample in data['data_samples']:
            sample.boxes[:] *= 2
            sample.set_metainfo(dict(scaled=True))
        return data


class Counting(Head):
    """A head that looks at its samples."""

    def loss(self, features, samples):
        self.seen = [(sample.boxes.device.type, sample.boxes.tolist()) for sample in samples]
        self.metainfo = [sample.metainfo for sample in samples]
        return super().loss(features)


@needs_lazy
@pytest.mark.parametrize(('changes', 'boxes'), [(False, [2.0, 4.0]), (True, [3.0, 5.0])])
@in_ranks()
def test_heads_get_samples_of_the_host_as_the_model_has_them(changes, boxes):
    """Samples that the model changes on the device, or does not."""
    model = Model()
    model.data_preprocessor, model.head = Scaling(), Counting()
    model = place_model(model, init_device('none', 'lazy'))
    sample = BaseDataElement(boxes=torch.tensor([1.0, 2.0]), metainfo=dict(number=0))
    data = model.data_preprocessor(dict(inputs=[torch.rand(1)], data_samples=[sample]), True)
    (sent,) = data['data_samples']
    assert sent.boxes.device.type == 'lazy'
    sent.set_metainfo(dict(number=1))
    if changes:
        sent.boxes += 1
    model.head.loss(torch.rand(1, 2, 5, 5).to(sent.boxes.device), data['data_samples'])
    assert model.head.seen == [('cpu', boxes)]
    assert model.head.metainfo == [dict(number=1, scaled=True)]
    truth = vars(model.head)['loss'].truth
    assert (truth.of([sent])[0] is truth._sent[id(sent)][1]) is not changes


class Painting(BaseDataPreprocessor):
    """Make truth from images, as masks of colors."""

    def forward(self, data, training=False):
        data = super().forward(data, training)
        (image,) = data['inputs']
        self.devices = image.device.type, self.device.type
        (sample,) = data['data_samples']
        sample.colors = image + sample.boxes.to(self.device)
        return data


@needs_lazy
@in_ranks()
def test_a_preprocessor_that_makes_truth_from_images_goes_to_the_host():
    """Where a preprocessor works, and what the model gets of it, in each of three batches."""
    model = Model()
    model.data_preprocessor = Painting()
    model = place_model(model, init_device('none', 'lazy'))
    seen = []
    for number in range(3):
        sample = BaseDataElement(boxes=torch.tensor([1.0, 2.0]))
        data = dict(inputs=[torch.tensor([number])], data_samples=[sample])
        data = model.data_preprocessor(data, True)
        (sent,) = data['data_samples']
        found = {tensor.device.type for tensor in (data['inputs'][0], sent.boxes, sent.colors)}
        seen.append((model.data_preprocessor.devices, found, sent.colors.tolist()))
    assert [devices for devices, _, _ in seen] == [('lazy',) * 2, ('cpu',) * 2, ('cpu',) * 2]
    assert [colors for _, _, colors in seen] == [[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]]
    assert all(found == {'lazy'} for _, found, _ in seen)

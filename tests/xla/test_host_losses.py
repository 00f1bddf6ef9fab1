"""Losses of detectors on the host, behind a network on a lazy device."""

import copy
import functools

import pytest
import torch
from mmengine.logging import MessageHub

from tests.jobs import need_mmcv_operators
from tests.ranks import in_ranks, run_ranks
from tests.xla.loss_jobs import (
    batch,
    denoising_detector,
    largest_difference,
    predict_detector,
    train_detector,
    trained_detector,
    two_stage_detector,
)

pytestmark = pytest.mark.xla

HEADS = ['GFLHead', 'YOLOXHead']
ITERATIONS = 10
#: Boxes of the two pictures of a batch: none, many, and other numbers.
UNUSUAL = [(0, 3), (0, 0), (2000, 1), (3, 2), (1, 0), (700, 0)]
FEW = [(0, 3), (0, 0), (40, 1), (3, 2), (1, 0), (2, 2), (5, 0), (1, 30), (4, 4), (0, 1)]
#: At most as many as make no more denoising queries than the config says.
FEW_QUERIES = [(1, 2), (4, 4), (0, 3), (5, 1), (0, 0), (3, 2)]
#: Of detectors of two stages, and of one with masks, in an iteration, and in a prediction. Three
#: of an iteration, four with masks of one stage, are gradients of upsampling.
EXECUTIONS = dict(
    boxes=(7, 2),
    masks=(8, 3),
    cascade=(9, 4),
    semantic=(28, 8),
    scoring=(10, 4),
    panoptic=(15, 4),
    proposals=(24, 7),
    sparse=(9, 3),
    instances=(7, 2),
)


def learning_scale():
    """Build a class whose loss reads a parameter and writes a buffer of the head."""
    from mmdet.models import RetinaHead
    from mmdet.registry import MODELS

    @MODELS.register_module(force=True)
    class ScaledHead(RetinaHead):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.scale = torch.nn.Parameter(torch.ones(2))
            self.register_buffer('seen', torch.zeros(1))

        def loss_by_feat(self, cls_scores, *args, **kwargs):
            self.seen[:] += 1
            assert self.scale.device.type == cls_scores[0].device.type == 'cpu'
            losses = super().loss_by_feat(cls_scores, *args, **kwargs)
            losses['loss_cls'] = [loss * self.scale.prod() for loss in losses['loss_cls']]
            return losses

    made = trained_detector('RetinaHead')
    made['bbox_head']['type'] = 'ScaledHead'
    return made


def calling_again(model):
    """Let the loss call the first layer of the head's neighbour, the neck."""
    loss_by_feat = type(model.bbox_head).loss_by_feat

    class Calls(type(model.bbox_head)):
        def loss_by_feat(self, cls_scores, *args, **kwargs):
            model.neck.lateral_convs[0](cls_scores[0][:, :4])
            return loss_by_feat(self, cls_scores, *args, **kwargs)

    model.bbox_head.__class__ = Calls


def resized():
    """A detector whose data preprocessor resizes batches, boxes too, to two sizes in turn."""
    from mmdet.models import BatchSyncRandomResize
    from mmdet.registry import MODELS

    @MODELS.register_module(force=True)
    class InTurn(BatchSyncRandomResize):
        def forward(self, inputs, data_samples):
            self._input_size = (96, 96) if self._input_size == (64, 64) else (64, 64)
            return super().forward(inputs, data_samples)

    made = trained_detector('YOLOXHead')
    made['data_preprocessor']['batch_augments'] = [
        dict(type='InTurn', random_size_range=(64, 96), interval=1000)
    ]
    return made


def train_one_stage():
    """Train each detector of one stage on both devices; see :func:`train_detector`."""
    batches = [batch(number) for number in range(ITERATIONS)]
    found = {}
    for name in HEADS:
        config = trained_detector(name)
        found[name] = [train_detector(kind, config, batches) for kind in ('cpu', 'xla')]
    unusual = [batch(number, boxes) for number, boxes in enumerate(UNUSUAL)]
    config = learning_scale()
    found['scaled'] = [train_detector(kind, config, unusual) for kind in ('cpu', 'xla')]
    config = resized()
    found['resized'] = [
        train_detector(kind, config, copy.deepcopy(batches), prepare=at_the_start)
        for kind in ('cpu', 'xla')
    ]
    return found


def train_two_stages(name):
    """Train a detector of two stages on both devices, and let it find boxes there."""
    config = two_stage_detector(name)
    masks = 'mask_head' in config.get('roi_head', config)
    least = int(name == 'sparse')  # its loss is divided by the number of boxes
    counts = [(max(one, least), max(other, least)) for one, other in FEW]
    pictures = [batch(i, boxes, masks=masks) for i, boxes in enumerate(counts)]
    trained = [train_detector(kind, config, pictures) for kind in ('cpu', 'xla')]
    state = trained[0]['state']
    predicted = [predict_detector(kind, config, pictures, state) for kind in ('cpu', 'xla')]
    return trained, predicted


def at_the_start(_):
    """Set the number of iterations that this augmentation reads, as a runner does."""
    MessageHub.get_current_instance().update_info('iter', 0)


@pytest.fixture(scope='module')
def trained(mmcv_operators):
    (found,) = run_ranks(train_one_stage, 0, environ=dict(CPU_NUM_DEVICES='1'))
    return found


@functools.lru_cache(maxsize=None)
def two_stages(name):
    """Return what training and prediction gave, of the detectors that a test asks for."""
    need_mmcv_operators()
    (found,) = run_ranks(train_two_stages, 0, name, environ=dict(CPU_NUM_DEVICES='1'))
    return found


@pytest.mark.parametrize('name', [*HEADS, 'scaled', 'resized'])
def test_losses_are_those_of_the_host(trained, name):
    expected, found = trained[name]
    assert largest_difference(expected, found) <= 1e-4
    for key, value in expected['state'].items():
        if not key.endswith('running_var'):  # biased where no runner patches torch_xla
            assert torch.allclose(found['state'][key], value, atol=1e-4), key


@pytest.mark.parametrize('name', [*HEADS, 'scaled'])
def test_few_executions_and_no_compilation_after_the_first_iterations(trained, name):
    """The gradient of the neck's nearest upsampling, which torch_xla lacks, is one of them."""
    _, found = trained[name]
    assert set(found['executions'][2:]) == {3}
    assert not any(found['compilations'][2:])


@pytest.mark.operators
@pytest.mark.parametrize('name', list(EXECUTIONS))
def test_detectors_train_as_on_the_host(name):
    (expected, found), _ = two_stages(name)
    assert largest_difference(expected, found) <= 1e-3
    for key, value in expected['state'].items():
        if not key.endswith('running_var'):
            assert torch.allclose(found['state'][key], value, atol=1e-4), key
    assert set(found['executions'][2:]) == {EXECUTIONS[name][0]}
    assert not any(found['compilations'][2:])


@pytest.mark.operators
@pytest.mark.parametrize('name', list(EXECUTIONS))
def test_detectors_predict_as_on_the_host(name):
    _, (expected, found) = two_stages(name)
    for here, there in zip(found['predictions'], expected['predictions']):
        if 'sem_seg' in there:
            assert (here.sem_seg == there.sem_seg).float().mean() > 0.999
            continue
        assert len(there.bboxes) > 0
        assert here.labels.tolist() == there.labels.tolist()
        assert torch.allclose(here.bboxes, there.bboxes, atol=1e-3)
        assert torch.allclose(here.scores, there.scores, atol=1e-4)
        if 'masks' in there:
            assert (here.masks == there.masks).float().mean() > 0.999
    assert set(found['executions'][1:]) == {EXECUTIONS[name][1]}
    assert not any(found['compilations'][1:])


@pytest.mark.operators
@in_ranks(environ=dict(CPU_NUM_DEVICES='1'))
def test_denoising_queries_change_no_graph():
    batches = [batch(number, boxes) for number, boxes in enumerate(FEW_QUERIES)]
    config = denoising_detector()
    expected, found = [train_detector(kind, config, batches) for kind in ('cpu', 'xla')]
    assert largest_difference(expected, found) <= 1e-3
    assert not any(found['compilations'][2:])


def test_each_size_of_batches_is_compiled_twice_whatever_the_number_of_boxes(trained):
    _, found = trained['resized']
    assert any(found['compilations'][:4])
    assert not any(found['compilations'][4:])


def test_parameters_and_buffers_of_the_head(trained):
    for found in trained['scaled']:
        assert found['state']['bbox_head.seen'].item() == len(UNUSUAL)
        assert found['state']['bbox_head.scale'].ne(1).all()


@pytest.mark.operators
@in_ranks(environ=dict(CPU_NUM_DEVICES='1'))
def test_a_loss_that_calls_the_network_again_is_refused():
    from mmdevplug.errors import ModelError

    batches = [batch(0)]
    config = trained_detector('RetinaHead')
    with pytest.raises(ModelError, match=r'calls Conv2d.*host_losses=False'):
        train_detector('xla', config, batches, prepare=calling_again)


@pytest.mark.operators
@in_ranks(environ=dict(CPU_NUM_DEVICES='1'))
def test_mixed_precision_and_accumulation():
    from mmdevplug.optim import DeviceAmpOptimWrapper, DeviceOptimWrapper

    def accumulating(optimizer):
        return DeviceOptimWrapper(optimizer=optimizer, accumulative_counts=2)

    config = trained_detector('RetinaHead')
    batches = [batch(number) for number in range(6)]
    found = {
        name: [train_detector(kind, config, batches, wrapper=wrapper) for kind in ('cpu', 'xla')]
        for name, wrapper in dict(bf16=DeviceAmpOptimWrapper, accumulated=accumulating).items()
    }
    assert largest_difference(*found['accumulated']) <= 1e-4
    assert largest_difference(*found['bf16']) <= 0.05
    assert not any(found['bf16'][1]['compilations'][2:])

"""Settings of real configs that are for CUDA, where a run computes elsewhere."""

import importlib

import pytest
import torch
from mmengine.config import Config

from mmdevplug.accelerators import get_accelerator
from mmdevplug.doctor import config_values
from mmdevplug.explanations.cuda_settings import _ONLY_CUDA, cuda_settings
from tests.hooks.memory_jobs import log_of
from tests.jobs import need_mmcv_operations
from tests.ranks import RanksFailed, run_ranks

from . import jobs

WRITTEN = dict(
    device='cuda',
    fp16=dict(loss_scale=512.0),
    accelerator=dict(type='cuda'),
    env_cfg=dict(cudnn_benchmark=True, dist_cfg=dict(backend='nccl')),
    train_dataloader=dict(pin_memory=True, num_workers=2),
    val_dataloader=dict(pin_memory=False),
    optim_wrapper=dict(type='ApexOptimWrapper'),
    model=dict(
        init_cfg=dict(type='Pretrained', checkpoint='x.pth', map_location='cuda:0'),
        norm_cfg=dict(type='SyncBN'),
        with_cp=True,
        neck=dict(upsample_cfg=dict(type='carafe')),
        roi_head=[dict(roi_layer=dict(type='RoIPool')), dict(roi_layer=dict(type='RoIAlign'))],
        head=dict(anchors=dict(device=torch.device('cuda', 1))),
        text='cuda is a word',
    ),
)


def test_each_is_named_with_key_value_and_what_to_write():
    found = {each.path: each for each in cuda_settings(Config(WRITTEN), 'cpu')}
    assert {path: each.level for path, each in found.items()} == {
        'device': 'note',
        'fp16': 'warning',
        'env_cfg.cudnn_benchmark': 'note',
        'train_dataloader.pin_memory': 'note',
        'optim_wrapper.type': 'error',
        'model.init_cfg.map_location': 'error',
        'model.neck.upsample_cfg.type': 'error',
        'model.roi_head[0].roi_layer.type': 'error',
        'model.head.anchors.device': 'warning',
    }
    assert all(each.path in each.describe() for each in found.values())
    assert "='cuda:0'" in found['model.init_cfg.map_location'].describe()
    for path, write in {
        'fp16': 'AmpOptimWrapper',
        'optim_wrapper.type': "'AmpOptimWrapper'",
        'model.init_cfg.map_location': "map_location = 'cpu'",
        'model.roi_head[0].roi_layer.type': "'RoIAlign'",
        'model.head.anchors.device': "device = 'cpu'",
    }.items():
        assert write in found[path].write


def test_nothing_is_said_on_cuda():
    assert list(cuda_settings(Config(WRITTEN), 'cuda')) == []


def test_doctor_tells_them():
    findings = list(config_values.examine(Config(WRITTEN), get_accelerator('cpu'), 1))
    told = {f.found.split('=')[0]: f for f in findings if ' for ' in f.found or 'CUDA' in f.found}
    found = told['model.roi_head[0].roi_layer.type']
    assert found.level == 'error'
    assert 'RoIAlign' in found.remedy
    assert told['env_cfg.cudnn_benchmark'].level == 'note'


def call_without_kernel():
    """What mmcv says of its operators for CUDA alone, on the CPU."""
    from mmcv import ops

    ones = torch.ones(1, 4, 8, 8)
    rois = torch.tensor([[0.0, 0, 0, 4, 4]])
    calls = dict(
        RoIPool=lambda: ops.RoIPool((2, 2))(ones, rois),
        PrRoIPool=lambda: ops.PrRoIPool((2, 2))(ones, rois),
        DeformRoIPool=lambda: ops.DeformRoIPool((2, 2))(ones, rois),
        CARAFEPack=lambda: ops.CARAFEPack(4, 2)(ones),
        CARAFE=lambda: ops.CARAFE(3, 1, 2)(ones, torch.ones(1, 9, 16, 16)),
        BorderAlign=lambda: ops.BorderAlign(2)(ones, torch.ones(1, 64, 4)),
        Correlation=lambda: ops.Correlation()(ones, ones),
        RiRoIAlignRotated=lambda: ops.RiRoIAlignRotated((2, 2), 1.0, num_orientations=2)(
            ones, torch.ones(1, 6)
        ),
        SigmoidFocalLoss=lambda: ops.SigmoidFocalLoss(2.0, 0.25)(
            torch.ones(2, 3), torch.tensor([0, 1])
        ),
        SoftmaxFocalLoss=lambda: ops.SoftmaxFocalLoss(2.0, 0.25)(
            torch.ones(2, 3), torch.tensor([0, 1])
        ),
        RoIAlign=lambda: ops.RoIAlign((2, 2))(ones, rois),
    )
    said = {}
    for name, function in calls.items():
        try:
            function()
        except Exception as error:
            said[name] = f'{type(error).__name__}: {error}'
    return said


def test_list_of_parts_for_cuda_alone_is_what_mmcv_says():
    need_mmcv_operations()
    (said,) = run_ranks(call_without_kernel, 0)
    assert set(said) <= set(_ONLY_CUDA)
    assert set(_ONLY_CUDA) - set(said) == {
        'DeformRoIPoolPack',
        'ModulatedDeformRoIPoolPack',
        'carafe',
    }
    other = {k: v for k, v in said.items() if 'implementation for device cpu not found' not in v}
    assert other == {}
    assert importlib.import_module('mmcv.ops').CARAFEPack  # registered as 'carafe' too


def train_with(work_dir, options):
    jobs.train(work_dir, **options)
    return log_of(work_dir)


def test_run_warns_of_them_and_goes_on_where_it_can(tmp_path):
    options = dict(
        fp16=dict(loss_scale=512.0),
        env_cfg=dict(cudnn_benchmark=True),
        train_dataloader=dict(pin_memory=True),
        extra=dict(device='cuda:0'),
    )
    (log,) = run_ranks(train_with, 0, tmp_path, options)
    warned = [line for line in log.splitlines() if 'WARNING' in line]
    assert any("fp16={'loss_scale': 512.0}: MMEngine reads no such key" in one for one in warned)
    assert any("extra.device='cuda:0': whatever is built" in one for one in warned)
    assert not any('cudnn_benchmark' in one or 'pin_memory' in one for one in warned)


def train_from_pretrained(work_dir):
    torch.save({'net.weight': torch.ones(1, 8), 'net.bias': torch.ones(1)}, work_dir / 'x.pth')
    weights = dict(type='Pretrained', checkpoint=str(work_dir / 'x.pth'), map_location='cuda:0')
    jobs.train(work_dir, model=dict(init_cfg=weights))


@pytest.mark.skipif(torch.cuda.is_available(), reason='is about hosts without CUDA')
def test_weights_that_are_to_be_read_onto_cuda(tmp_path):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(train_from_pretrained, 0, tmp_path)
    kind, message, _ = failed.value.errors[0]
    assert kind == 'ModelError', message
    assert "model.init_cfg.map_location='cuda:0'" in message
    assert "Write model.init_cfg.map_location = 'cpu'" in message


def train_with_mmcv_operator(work_dir):
    from mmengine.registry import MODELS

    @MODELS.register_module(force=True)
    class Pools(jobs.AsksForCuda):
        def forward(self, inputs, mode='tensor'):
            from mmcv.ops import RoIPool

            RoIPool((2, 2))(torch.ones(1, 4, 8, 8), torch.tensor([[0.0, 0, 0, 4, 4]]))

    jobs.train(work_dir, model=dict(type='Pools'))


def test_operator_without_kernel_is_named_with_the_line(tmp_path):
    need_mmcv_operations()
    with pytest.raises(RanksFailed) as failed:
        run_ranks(train_with_mmcv_operator, 0, tmp_path)
    kind, message, _ = failed.value.errors[0]
    assert kind == 'ModelError', message
    assert 'roi_pool_forward' in message
    assert 'has no kernel for cpu' in message

"""mmcv's operators on devices without a kernel for them, beside the CPU.

With ``MMDEVPLUG_RESULTS=<folder>`` what was found is written there as JSON.
"""

import json
import os
import signal
import subprocess
import sys
from functools import lru_cache
from importlib import import_module
from math import isfinite
from pathlib import Path

import pytest
import torch

from mmdevplug import init_device
from mmdevplug.patches.mmcv_ops import host_use, restore_mmcv_ops
from mmdevplug.patches.mmcv_ops.host_call import OUTPUTS
from tests.columns import GCU, XLA, job_of
from tests.jobs import install_card, needs_bfloat16
from tests.patches.mmcv_ops import checks, jobs
from tests.patches.mmcv_ops.cases import CASES
from tests.patches.mmcv_ops.detector import train_detector
from tests.ranks import check_errors, errors_of_ranks, in_ranks, run_ranks

#: Layers that compute on the device too, which rounds in its own way.
ON_THE_DEVICE = ('saconv', 'multi_scale_deformable_attention')
#: mmcv brings the operands of these to the host by itself, on every device.
GIVEN_HOST_TENSORS = {'softnms', 'nms_match'}
#: torch_xla 2.9 aborts the process before mmcv's operator is reached: `index_select` with indices
#: that `sort` has not computed yet.
ABORTS_ON_XLA = ('nms_rotated', 'nms_quadri')
#: ``gcu`` differs from ``xla`` in how it copies: lists of tensors, integers, tensors that are
#: written to, and layers that compute on the device too. The table wants all cases.
OF_GCU = ['nms', 'roi_align', 'deform_conv2d', 'hard_voxelize', 'pixel_group', 'saconv']


def is_run(name, accelerator):
    return accelerator != 'gcu' or name in OF_GCU or 'MMDEVPLUG_RESULTS' in os.environ


pytestmark = pytest.mark.operators


@lru_cache(maxsize=None)
def found_on(accelerator):
    """The cases on a device."""
    names = [
        name
        for name in CASES
        if accelerator == 'zeta' or (name not in ABORTS_ON_XLA and is_run(name, accelerator))
    ]
    job = job_of(accelerator, 0)
    (found,) = run_ranks(jobs.compare_cases, 0, accelerator, names, timeout=280, **job)
    _write(accelerator, same=_same_bits(found))
    return found


def _same_bits(cases):
    """For each operator that ran on the host, whether all of its results had the CPU's bits."""
    same = {}
    for name, case in cases.items():
        for operator in case['uses'] if name not in ON_THE_DEVICE else ():
            same[operator] = same.get(operator, True) and case['same']
    return dict(sorted(same.items()))


def _write(accelerator, **results):
    folder = os.environ.get('MMDEVPLUG_RESULTS')
    if folder:
        path = Path(folder) / f'{accelerator}.json'
        path.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(path.read_text()) if path.exists() else {}
        import mmcv

        known.update(results, torch=torch.__version__, mmcv=mmcv.__version__)
        path.write_text(json.dumps(known, indent=1) + '\n')


@pytest.mark.parametrize(
    ('name', 'accelerator'),
    [
        pytest.param(name, *param.values, marks=param.marks)
        for param in (pytest.param('zeta'), XLA, GCU)
        for name in CASES
        if is_run(name, *param.values)
    ],
)
def test_results_and_gradients_are_those_of_the_cpu(accelerator, name):
    if accelerator != 'zeta' and name in ABORTS_ON_XLA:
        assert name not in found_on(accelerator)
        return
    found = found_on(accelerator)[name]
    expected, got = found['sizes']
    assert expected == got
    if name in ON_THE_DEVICE and accelerator != 'zeta':
        assert found['difference'] <= 1e-5
    else:
        assert found['same'], found['difference']


def test_every_operator_has_a_case_or_no_kernel_for_the_cpu():
    covered = {name for case in found_on('zeta').values() for name in case['uses']}
    covered |= GIVEN_HOST_TENSORS
    (messages,) = run_ranks(jobs.try_without_a_case, 0, 'zeta', covered)
    _write('zeta', lacking=sorted(messages))
    assert covered == set(OUTPUTS)
    assert len(messages) >= 60
    assert {'roi_pool_forward', 'sigmoid_focal_loss_forward', 'carafe_forward'} <= set(messages)
    wrong = {
        name: error
        for name, error in messages.items()
        if error[0] != 'ModelError' or 'none for the CPU either' not in error[1]
    }
    assert not wrong


@pytest.mark.parametrize('accelerator', [XLA, GCU])
def test_a_forward_is_one_execution(accelerator):
    (found,) = run_ranks(jobs.count_executions, 0, accelerator, **job_of(accelerator, 0))
    assert len(found) == 5
    assert set(found.values()) == {1}, found


#: What `nms_rotated` and `nms_quadri` do before they call their operator.
SELECT_SORTED = """
import torch, torch_xla
_, order = torch.rand(4).to('xla:0').sort(0, descending=True)
torch.rand(4, 5).to('xla:0').index_select(0, order)
"""


@pytest.mark.xla
def test_torch_xla_still_aborts_before_two_operators():
    """Else nothing is left that keeps them from being tried."""
    done = subprocess.run([sys.executable, '-c', SELECT_SORTED], capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT, done.stderr


@pytest.fixture(scope='module')
def checked():
    (found,) = run_ranks(jobs.run_checks, 0, 'zeta', operators=False)
    return found


@pytest.mark.parametrize('name', checks.CHECKS)
def test_check(checked, name):
    assert checked[name] is None, checked[name]


def test_all_ranks_stop_together():
    errors = errors_of_ranks(jobs.stop_where_one_rank_needs_the_host, 2, together=True)
    told = 'roi_pool_forward has no kernel for zeta:1'
    check_errors({1: errors.pop(1)}, 'ModelError', told)
    check_errors(errors, 'RankFailedError', told)


class Hidden:
    """Finds no compiled operators, as with mmcv-lite."""

    def find_spec(self, name, path=None, target=None):
        if name == 'mmcv._ext':
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)


@in_ranks(operators=False)
def test_without_the_extension_nothing_changes():
    assert 'mmcv._ext' not in sys.modules
    sys.meta_path.insert(0, Hidden())
    install_card('zeta')
    context = init_device('none', 'zeta')
    layer = import_module('mmcv.cnn').ConvModule(3, 4, 1).to(context.device)
    layer(torch.zeros(1, 3, 4, 4, device=context.device)).sum().backward()
    assert layer.conv.weight.grad is not None
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="^No module named 'mmcv._ext'$"):
            import_module('mmcv.ops')
        restore_mmcv_ops()
    assert host_use() == {}


@pytest.fixture(scope='module')
def detector_on_cpu(tmp_path_factory):
    pytest.importorskip('mmdet')
    (found,) = run_ranks(train_detector, 0, 'cpu', tmp_path_factory.mktemp('cpu'))
    assert found['uses'] == {}
    return found


@needs_bfloat16
def test_faster_rcnn_trains_on_the_cpu_in_bfloat16(tmp_path):
    pytest.importorskip('mmdet')
    (found,) = run_ranks(train_detector, 0, 'cpu', tmp_path, 'AmpOptimWrapper')
    assert all(isfinite(value) for losses in found['losses'] for value in losses.values())
    assert [len(boxes) for boxes in found['boxes']] == [5, 5]


@pytest.mark.long
@pytest.mark.timeout(600)  # torch_xla compiles many graphs
@pytest.mark.parametrize('accelerator', ['zeta', XLA])
def test_faster_rcnn_trains_and_detects_as_on_the_cpu(accelerator, detector_on_cpu, tmp_path):
    job = job_of(accelerator, 0)
    (found,) = run_ranks(train_detector, 0, accelerator, tmp_path, timeout=580, **job)
    for expected, got in zip(detector_on_cpu['losses'], found['losses']):
        assert got == pytest.approx(expected, abs=1e-4)
    assert len(found['losses']) == 2
    for name in ('boxes', 'scores'):
        for expected, got in zip(detector_on_cpu[name], found[name]):
            assert len(got) > 0
            assert got == pytest.approx(expected, abs=1e-2)
    uses = found['uses']
    if accelerator == 'xla':  # all between its networks is on the host, from one fetch
        assert uses == {}
        return
    # A picture has one nms of proposals, in training and in detection, and one of boxes.
    assert uses['roi_align_forward'] == uses['roi_align_backward'] + 1 == 3
    assert uses['nms'] == 4 + 2 + 2
    assert found['log'].count('The mmcv operator nms has no kernel') == 1
    assert 'roi_head.bbox_roi_extractor.roi_layers.0 (RoIAlign)' in found['log']

"""Training where the collective backend takes tensors of its own device alone."""

from functools import lru_cache

import pytest

from tests.commands import CLI, python, run
from tests.jobs import PLAIN, ROOT, largest_difference, log_of, train_digits
from tests.native import CARDS, native_environment, needs_native, run_native
from tests.parallel_jobs import train as train_spread
from tests.ranks import run_ranks

pytestmark = [needs_native, pytest.mark.timeout(600)]


def digits(accelerator, work_dir, collect_device):
    """Train two epochs, and the second one again from the checkpoint of the first."""
    options = dict(
        PLAIN,
        train_cfg__val_interval=1,
        val_evaluator__collect_device=collect_device,
        default_hooks__checkpoint__interval=1,
        default_hooks__checkpoint__max_keep_ckpts=3,
    )
    # Runners of one name that start in the same second write to one log.
    whole = train_digits(accelerator, work_dir / 'whole', experiment_name='whole', **options)
    first = str(work_dir / 'whole' / 'epoch_1.pth')
    options.update(experiment_name='resumed', resume=True, load_from=first)
    resumed = train_digits(accelerator, work_dir / 'resumed', **options)
    return whole, resumed


@pytest.fixture(scope='module')
def on_the_cpu(tmp_path_factory):
    """For a number of ranks: what the first one found on the CPU."""

    @lru_cache(maxsize=None)
    def of(ranks):
        return run_ranks(digits, ranks, 'cpu', tmp_path_factory.mktemp('cpu'), 'cpu')[0][0]

    return of


MORE = [('npu', 1), ('npu', 4), ('mlu', 2), ('zeta', 4), ('tpu', 1), ('tpu', 4)]


@pytest.mark.parametrize(
    ('name', 'ranks'),
    [
        *[('npu', 2), ('sdaa', 2), ('neuron', 2), ('tpu', 2)],
        *(pytest.param(*case, marks=pytest.mark.long) for case in MORE),
    ],
)
def test_digits(tmp_path, on_the_cpu, name, ranks):
    expected = on_the_cpu(ranks)
    collected = 'cpu' if name == 'mlu' else 'gpu'
    found = run_native(name, digits, ranks, name, tmp_path / name, collected)
    for rank, (whole, resumed) in enumerate(found):
        # TorchTPU gives each process one device.
        assert whole['device'] == f'{name}:{0 if name == "tpu" else rank}'
        assert not whole['staged']
        assert largest_difference(whole['weights'], expected['weights']) <= 1e-5
        assert whole['accuracy'] == expected['accuracy']
        assert largest_difference(whole['weights'], resumed['weights']) == 0.0
    text = log_of(tmp_path / name / 'whole')
    assert f"backend '{CARDS[name][1]}'" in text


def spread(name, work_dir):
    # Statistics of all ranks, as one process has them.
    options = dict(accelerator__backend='auto', sync_bn='auto')
    return train_spread('classifier', name, work_dir, 2, **options)


#: Kernels that the CPU has for other sizes add up in another order, on some processors: 2e-4 then.
DRIFT = 1e-3


def test_two_ranks_of_two_devices_each(tmp_path):
    (one,) = run_ranks(train_spread, 0, 'classifier', 'cpu', tmp_path / 'one')
    found = run_native('npu', spread, 2, 'npu', tmp_path / 'two')
    for rank, result in enumerate(found):
        assert result['strategy'] == 'data_and_model_parallel'
        assert result['devices'] == [f'npu:{2 * rank}', f'npu:{2 * rank + 1}']
        assert largest_difference(result['weights'], one['weights']) <= DRIFT


# an NPU whose compile mode MMEngine cannot set at its import (mmengine#1307) ----------------

COMPILE_MODE = """
import torch_npu
from mmengine.device import get_device, is_npu_available
from mmengine.device.utils import is_npu_support_full_precision
import mmdevplug
from mmdevplug.patches.mmengine import restore_mmengine
print(is_npu_available(), get_device())
mmdevplug.init_device(accelerator='npu')
mmdevplug.patch_mmengine('npu')
print(is_npu_available(), get_device(), torch_npu.npu.jit_compile, is_npu_support_full_precision())
restore_mmengine()
print(is_npu_available(), get_device())
"""


@pytest.mark.parametrize(
    ('fault', 'wish', 'seen', 'compiled'),
    [
        ('early', '', 'False cpu', 'False'),
        ('early', '1', 'False cpu', 'True'),
        # The card's own default.
        ('missing', '', 'False cpu', 'True'),
        ('', '', 'True npu', 'False'),
    ],
)
def test_mmengine_knows_of_an_npu_that_refused_it_at_import(fault, wish, seen, compiled):
    variables = dict(NPU_COMPILE_MODE=fault, NPUJITCompile=wish)
    done = python('-c', COMPILE_MODE, env=native_environment('npu', **variables), mmengine=False)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = [line for line in done.stdout.splitlines() if line.startswith(('True', 'False'))]
    assert printed == [seen, f'True npu {compiled} True', seen]
    warned = 'torch.npu.set_compile_mode(jit_compile=False) fails with AttributeError'
    assert (warned in done.stdout + done.stderr) == (fault == 'missing')


def test_the_command_trains_two_ranks_where_mmengine_sees_no_npu(tmp_path):
    """The stock runner would start a process group for CUDA."""
    config = ROOT / 'configs' / 'digits' / 'digits.py'
    options = ['train_cfg.max_epochs=1', 'train_cfg.val_interval=1']
    options += ['val_evaluator.collect_device=gpu']
    done = run(
        *(*CLI, 'train', config, '--accelerator', 'npu', '--nproc', '2', '--work-dir', tmp_path),
        *('--cfg-options', *options),
        env=native_environment('npu', OMP_NUM_THREADS='1', NPU_COMPILE_MODE='early'),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    text = log_of(tmp_path)
    assert "backend 'hccl'" in text
    assert 'device npu:0' in text

"""TorchTPU's released package, which computes on the CPU: see standins/tpu_on_cpu."""

import os
import sys
from functools import partial

import pytest
import torch

from tests.checkpoint.training import assert_equal_bits, train_or_die
from tests.commands import CLI, run
from tests.features.rows import ROWS as TABLE, train_rows
from tests.jobs import ROOT, largest_difference
from tests.model.sync_bn_cases import CASES, compare, run_all
from tests.parallel_jobs import train as train_spread
from tests.ranks import RanksFailed, run_ranks
from tests.tpu.jobs import ROWS, alone, together

pytestmark = pytest.mark.tpu


@pytest.fixture(scope='module')
def one(tmp_path_factory):
    return run_ranks(alone, 0, tmp_path_factory.mktemp('one'))[0]


@pytest.fixture(scope='module')
def two(tmp_path_factory):
    return run_ranks(together, 2, tmp_path_factory.mktemp('two'))


def test_it_is_the_released_package():
    from torch_tpu._internal.device import _device_module

    assert _device_module._STRICT_INTERNAL_DEVICE_APIS
    assert torch.accelerator.current_accelerator() == torch.device('tpu')


def test_digits_in_one_process(one):
    assert one['digits']['accuracy'] > 90
    assert one['digits']['device'] == 'tpu:0'


def test_digits_on_two_ranks(two):
    for found in two:
        assert found['digits']['accuracy'] > 90
        assert found['digits']['device'] == 'tpu:0'  # each has a device by itself
        assert found['digits']['wrapper'] == 'DeviceDistributedDataParallel'
        assert not found['digits']['staged']  # PyTorch's DDP averages
    assert two[0]['digits'] == two[1]['digits']


@pytest.mark.parametrize('name', ROWS)
def test_weights_are_those_of_one_process_on_the_cpu(two, reference, name):
    for found in two:
        assert 'error' not in found['rows'][name], found['rows'][name]['error']
        weights = found['rows'][name]['weights']
        assert largest_difference(weights, reference[name]['weights']) <= TABLE[name].tolerance


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp('reference')
    return run_ranks(train_rows, 0, ROWS, 'cpu', folder, True)[0]


def test_memory_of_an_unknown_chip_is_unknown(one):
    assert one['memory'] == [None, None]


def test_guard_finds_nothing(one):
    assert one['guard'] == ('tpu:0', 'No operation had operands on different devices.')


def test_compiled_model_trains_to_the_same_loss(one):
    plain, compiled = one['compiled']
    assert compiled == pytest.approx(plain, abs=1e-5)


def test_synchronized_batch_norm_is_that_of_the_whole_batch():
    found = run_ranks(run_all, 2, 'tpu')
    for name in CASES:
        compare(name, [each[name] for each in found], 2)


@pytest.mark.parametrize('ranks', [0, 2])
def test_killed_and_resumed_to_the_bit(tmp_path, ranks):
    whole = run_ranks(train_or_die, ranks, 'tpu', tmp_path / 'whole')
    with pytest.raises(RanksFailed, match='died'):
        run_ranks(train_or_die, ranks, 'tpu', tmp_path / 'killed', 8)
    again = run_ranks(partial(train_or_die, resume=True), ranks, 'tpu', tmp_path / 'killed')
    assert {found['iter'] for found in again} == {12}
    assert_equal_bits(whole, again)


@pytest.mark.operators
def test_segmentor_of_mmseg(tmp_path):
    cpu, tpu = (
        run_ranks(train_spread, 0, 'segmentor', name, tmp_path / name)[0]
        for name in ('cpu', 'tpu')
    )
    assert tpu['devices'] == ['tpu:0']
    # Also the running statistics, which TorchTPU's own kernel leaves as they were.
    assert largest_difference(cpu['weights'], tpu['weights']) < 1e-3


def command(*arguments, **environ):
    """Run a command of ours as a user does."""
    return run(*CLI, *arguments, env={**os.environ, 'PYTHONPATH': str(ROOT), **environ})


def test_doctor_without_a_tpu_says_so_and_nothing_else():
    done = command('doctor', '--accelerator', 'tpu', TPU_ON_CPU='0')
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    errors = [line for line in lines if line.startswith('error ') and 'mmcv.ops' not in line]
    assert len(errors) == 1
    assert 'tpu: no device' in errors[0]
    assert 'is internal to TorchTPU' not in done.stdout


def test_ranks_of_our_own_command(tmp_path):
    config = tmp_path / 'config.py'
    config.write_text(f"_base_ = '{ROOT}/configs/digits/digits.py'\n")
    changes = ['accelerator.backend=gloo', 'train_cfg.max_epochs=1']
    done = command(
        *('train', config, '--accelerator', 'tpu', '--nproc', 2, '--work-dir', tmp_path / 'work'),
        *('--cfg-options', *changes),
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-4000:]
    assert (tmp_path / 'work' / 'epoch_1.pth').exists()
    assert 'tpu:0' in printed


def test_pytorchs_ddp_and_fsdp_over_staged():
    command = [
        sys.executable,
        '-m',
        'torch.distributed.run',
        '--standalone',
        '--nproc_per_node',
        2,
    ]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]))
    done = run(*command, 'tests/tpu/staged_training.py', env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.splitlines()) == [f'rank {rank}: equal on tpu:0' for rank in (0, 1)]

"""Which parallelism: by the options, the devices present, and how the process was started."""

import json
import logging
import os
import sys

import pytest
import torch

from mmdevplug import init_device
from mmdevplug.config.model_parallel import ModelParallelOptions
from mmdevplug.environments.launch_variables import LaunchEnv
from mmdevplug.errors import LaunchError, PlacementError
from mmdevplug.model_parallel.apply_options import Parallelism
from mmdevplug.model_parallel.choose_devices import resolve_strategy
from tests.commands import environment, run
from tests.jobs import ROOT, install_card, messages_of, need_card
from tests.model_parallel.test_parse_devices import Cards
from tests.ranks import AGENT, RanksFailed, free_port, launch_variables, run_ranks

GIB = 2**30


class GPUs(Cards):
    """Devices of 8 GiB, of which none is used."""

    name = device_type = 'cuda'
    visible_devices_env = 'CUDA_VISIBLE_DEVICES'

    def __init__(self, count):
        super().__init__([8 * GIB] * count)


def resolve(enable, count=4, **options):
    return resolve_strategy(enable, accelerator=GPUs(count), **options)


def rank(index, world_size, local_world_size=None):
    return LaunchEnv('pytorch', index, index, world_size, local_world_size or world_size)


def names(strategy):
    return [str(device) for device in strategy.devices]


def test_the_log_names_the_devices_of_this_rank():
    found = Parallelism(ModelParallelOptions())
    found.choose_devices(GPUs(2), rank(1, 2))
    assert 'devices of this rank: cuda:1\n' in found.describe()
    assert 'processes: 2, this is rank 1' in found.describe()


def test_false_is_one_device():
    found = resolve(False)
    assert (found.kind, names(found)) == ('single_device', ['cuda:0'])
    assert not found.is_model_parallel


def test_true_is_all_devices_of_a_single_process():
    found = resolve(True)
    assert found.kind == 'model_parallel'
    assert names(found) == ['cuda:0', 'cuda:1', 'cuda:2', 'cuda:3']
    assert found.devices[1] == torch.device('cuda', 1)
    assert found.world_size == 1


@pytest.mark.parametrize('count', [0, 1])
def test_true_with_fewer_than_two_devices_says_how_many_there_are(count, monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '3')
    with pytest.raises(PlacementError) as raised:
        resolve(True, count)
    message = str(raised.value)
    assert f'has {count}' in message
    assert f'sees {count} cuda device(s)' in message
    assert "CUDA_VISIBLE_DEVICES='3'" in message
    assert '--model-parallel false' in message


def test_true_on_the_cpu_is_refused():
    with pytest.raises(PlacementError, match='sees 1 cpu device'):
        resolve_strategy(True, accelerator='cpu')


@pytest.mark.parametrize(
    ('needed', 'kind'), [(4 * GIB, 'single_device'), (4 * GIB + 1, 'model_parallel')]
)
def test_none_takes_one_device_where_the_model_fits_with_room(needed, kind):
    found = resolve(None, memory_needed=needed)
    assert found.kind == kind
    assert '4.00 GiB' in found.reason
    assert '8.00 GiB' in found.reason


def test_none_counts_devices_where_nothing_is_known():
    assert resolve(None).kind == 'model_parallel'
    assert resolve(None, 1).kind == 'single_device'
    assert 'is not known' in resolve(None).reason


def test_none_in_a_job_of_several_processes():
    assert resolve(None, env=rank(1, 2)).kind == 'data_parallel'
    too_large = resolve(None, env=rank(1, 2), memory_needed=7 * GIB)
    assert too_large.kind == 'data_and_model_parallel'
    assert names(too_large) == ['cuda:2', 'cuda:3']
    assert names(resolve(None, env=rank(1, 2), memory_needed=1)) == ['cuda:1']


@pytest.mark.parametrize('index', range(2))
def test_a_rank_takes_its_group_of_devices(index):
    expected = [f'cuda:{2 * index}', f'cuda:{2 * index + 1}']
    for devices in (None, 2, 'cuda:0-3'):
        found = resolve(True, env=rank(index, 2), devices=devices)
        assert found.kind == 'data_and_model_parallel'
        assert names(found) == expected
    shuffled = ['cuda:3', 'cuda:1', 'cuda:2', 'cuda:0']
    found = resolve(True, env=rank(index, 2), devices=shuffled)
    assert names(found) == shuffled[2 * index : 2 * index + 2]


def test_ranks_count_for_each_host():
    env = LaunchEnv('pytorch', 3, 1, 4, 2)
    assert names(resolve(True, env=env)) == ['cuda:2', 'cuda:3']


def test_chosen_devices():
    assert names(resolve(True, devices=['cuda:3', 'cuda:1'])) == ['cuda:3', 'cuda:1']
    assert names(resolve(True, devices=3)) == ['cuda:0', 'cuda:1', 'cuda:2']
    assert names(resolve(False, devices=['cuda:2', 'cuda:1'])) == ['cuda:2']


@pytest.mark.parametrize(
    ('devices', 'words'),
    [
        (8, '1 process(es) on this host with 8 device(s) each need 8'),
        (0, 'devices=0'),
        (True, 'devices=True'),
        ('cuda:0-7', 'names cuda:4, but this process sees 4'),
        (['cuda:0', 'cuda:0'], 'more than once'),
        (['npu:0', 'npu:1'], 'names npu:0, npu:1, but accelerator'),
        (['cuda:0', 'npu:1'], 'of different types: cuda, npu'),
        ([], 'names no device'),
        ('cuda', "device 'cuda'"),
    ],
)
def test_devices_that_cannot_be(devices, words):
    with pytest.raises(PlacementError) as raised:
        resolve(True, devices=devices)
    assert words in str(raised.value)


def test_devices_that_do_not_divide():
    with pytest.raises(PlacementError, match='3 devices for 2 processes'):
        resolve(True, devices='cuda:0-2', env=rank(0, 2))


@pytest.mark.parametrize('enable', [1, 0, 'yes', 'true', 2])
def test_enable_is_true_false_or_none(enable):
    with pytest.raises(PlacementError, match=f'model_parallel.enable={enable!r}'):
        resolve(enable)


def without_launcher(drop=(), start_group=False):
    """The strategy, what a warning says, and why a start without a launcher is refused."""
    if start_group:
        torch.distributed.init_process_group('gloo')
    for name in drop:
        del os.environ[name]
    install_card('zeta')
    try:
        with messages_of(logging.getLogger('mmdevplug.environments.launch_variables')) as told:
            found = resolve_strategy(True, accelerator='zeta', devices=2)
    except LaunchError as error:
        return str(error)
    refused = ''
    try:
        init_device(accelerator='cpu')
    except LaunchError as error:
        refused = str(error)
    return found.kind, found.rank, names(found), told, refused


# Without torchrun above the process, the job of its variables has ended.
@pytest.mark.parametrize('agent', [False, True])
def test_a_job_that_may_be_running_is_not_left_alone(agent):
    variables = launch_variables(1, 2, free_port())
    (found,) = run_ranks(without_launcher, 0, environ=dict(variables, **(AGENT if agent else {})))
    assert found.startswith('RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=')
    assert "--launcher pytorch (in a script launcher='pytorch')" in found
    assert 'for a single process: unset RANK ' in found


def test_a_process_group_is_followed():
    for rank, found in enumerate(run_ranks(without_launcher, 2, (), True)):
        devices = [f'zeta:{2 * rank}', f'zeta:{2 * rank + 1}']
        assert found[:4] == ('data_and_model_parallel', rank, devices, [])
        assert f'is rank {rank} of a process group of 2; it would train alone' in found[4]


def test_a_process_group_without_variables_needs_the_local_rank():
    for found in run_ranks(without_launcher, 2, ('LOCAL_RANK',), True, together=True):
        assert 'Set RANK WORLD_SIZE LOCAL_RANK before, or pass env=' in found


CARD = ROOT / 'standins' / 'fakecard'
#: Each rank writes what it finds.
SCRIPT = """
import json, os, sys
from tests.model_parallel.test_choose_devices import without_launcher
with open(f'{sys.argv[1]}/{os.getpid()}.json', 'w') as file:
    json.dump(without_launcher(), file)
"""


@pytest.mark.parametrize('launcher', ['torch.distributed.run', 'accelerate.commands.launch'])
def test_a_live_launcher_is_followed(tmp_path, launcher):
    need_card()
    options = ['--nproc_per_node=2', f'--master_port={free_port()}']
    if launcher.startswith('accelerate'):
        pytest.importorskip('accelerate')
        options = ['--multi_gpu', '--num_processes=2', f'--main_process_port={free_port()}']
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT)
    command = [sys.executable, '-m', launcher, *options, script, tmp_path]
    done = run(*command, env=environment(CARD))
    found = sorted(json.loads(path.read_text()) for path in tmp_path.glob('*.json'))
    assert len(found) == 2, done.stderr
    for rank, (kind, number, devices, told, refused) in enumerate(found):
        assert (kind, number, told) == ('data_and_model_parallel', rank, [])
        assert devices == [f'zeta:{2 * rank}', f'zeta:{2 * rank + 1}']
        assert 'runs this process as one of WORLD_SIZE=2; each of them would train' in refused
        assert 'Pass --launcher pytorch' in refused


def launched():
    install_card('zeta')
    return names(resolve_strategy(True, accelerator='zeta', launcher='pytorch'))


def test_a_launcher_is_read():
    assert run_ranks(launched, 2) == [['zeta:0', 'zeta:1'], ['zeta:2', 'zeta:3']]
    with pytest.raises(RanksFailed, match='start fewer processes'):
        run_ranks(launched, 4, together=True)

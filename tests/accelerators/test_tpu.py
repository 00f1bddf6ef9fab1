"""TorchTPU's devices: one for each process, and the variables that its runtime reads."""

import os
import sys

import pytest
import torch

from mmdevplug.accelerators import get_accelerator
from mmdevplug.accelerators.backend import default_backend
from mmdevplug.accelerators.tpu import ADDRESSES, TOPOLOGY
from mmdevplug.errors import AcceleratorError
from tests.commands import run
from tests.native import STANDINS, native_environment, needs_native, run_native
from tests.ranks import free_port

pytestmark = needs_native


def ask(local_rank=None):
    """What one rank gets, or why it is refused."""
    accelerator = get_accelerator('tpu')
    rank = int(os.environ['RANK'])
    before = accelerator.device_count(), accelerator.max_ranks()
    try:
        device = accelerator.device(rank if local_rank is None else local_rank)
    except AcceleratorError as error:
        return str(error)
    accelerator.set_device(device)
    state = accelerator.save_rng(device)
    accelerator.load_rng(state, device)
    accelerator.manual_seed(0)
    accelerator.empty_cache()  # TorchTPU has none
    return dict(
        before=before,
        after=(accelerator.device_count(), accelerator.max_ranks()),
        device=str(device),
        on=str(torch.ones(1, device=device).device),
        again=str(accelerator.device(rank)),
        memory=accelerator.memory_allocated(device),
        backend=default_backend(accelerator),
        addresses=os.environ[ADDRESSES],
        topology=os.environ[TOPOLOGY],
        port=int(os.environ['MASTER_PORT']),
    )


def test_each_rank_has_one_device_and_all_have_the_same_addresses():
    found = run_native('tpu', ask, 2)
    port = found[0]['port']
    for each in found:
        assert each['before'] == (4, 4)
        assert each['after'] == (1, 1)
        assert each['device'] == each['on'] == each['again'] == 'tpu:0'
        assert each['memory'] is None
        assert each['backend'] == 'tpu_dist'
        assert each['addresses'] == f'localhost:{port + 1},localhost:{port + 2}'
        assert each['topology'] == '1,2,1'


@pytest.mark.parametrize(
    ('ranks', 'variables', 'told'),
    [
        (
            *(2, {'WORLD_SIZE': '4'}),
            [f'{ADDRESSES} is not set, but WORLD_SIZE=4', f'all of them, and {TOPOLOGY}'],
        ),
        (2, {ADDRESSES: '10.0.0.1:8471'}, [f"{ADDRESSES} is '10.0.0.1:8471', but WORLD_SIZE=2"]),
        (
            *(3, {}),
            [f'{TOPOLOGY} is not set', 'WORLD_SIZE=3', 'RuntimeError: No TPU topology found'],
        ),
    ],
    ids=['hosts', 'addresses', 'topology'],
)
def test_what_cannot_be_filled_in_is_refused(ranks, variables, told):
    found = run_native('tpu', ask, ranks, environ=variables)
    for message in found:
        assert all(part in message for part in told), message


def test_what_the_user_sets_is_kept():
    ports = [free_port(), free_port()]
    mine = {ADDRESSES: ','.join(f'127.0.0.1:{port}' for port in ports), TOPOLOGY: '2,1,1'}
    for each in run_native('tpu', ask, 2, environ=mine):
        assert (each['addresses'], each['topology']) == (mine[ADDRESSES], mine[TOPOLOGY])


def test_a_rank_beyond_the_devices_of_the_host_is_refused():
    (message,) = set(run_native('tpu', ask, 2, 4))
    assert 'LOCAL_RANK=4 asks for tpu:4, but this process sees 4 tpu device(s)' in message
    assert 'TPU_VISIBLE_CHIPS is not set' in message


SOPHGO = """
import torch_tpu
from mmdevplug import get_accelerator
from mmdevplug.accelerators.backend import default_backend, takes_tensors
card = get_accelerator('tpu')
print(card.device_count(), card.device(2), default_backend(card), takes_tensors(card, 'sccl'))
"""


def test_another_package_of_the_name_is_no_torchtpu():
    environ = native_environment('tpu')
    theirs = str(STANDINS / 'native' / 'sophgo')
    environ['PYTHONPATH'] = os.pathsep.join([theirs, environ['PYTHONPATH']])
    done = run(sys.executable, '-c', SOPHGO, env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ['4', 'tpu:2', 'sccl', 'True']

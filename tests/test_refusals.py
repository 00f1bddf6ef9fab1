"""Refusals that cut across modules: drivers that fail, settings of the wrong shape."""

import sys
import types
from functools import cached_property

import pytest
import torch

from mmdevplug.accelerators import (
    Copies,
    CPUAccelerator,
    TorchNativeAccelerator,
    get_accelerator,
    probe_device,
)
from mmdevplug.accelerators.backend import check_backend, with_host_backend
from mmdevplug.environments.launch_variables import read_launch_env
from mmdevplug.errors import AcceleratorError, LaunchError

TORCHRUN = dict(RANK='0', LOCAL_RANK='0', WORLD_SIZE='2', MASTER_ADDR='127.0.0.1')


def test_habanas_hccl_is_not_taken_for_ascends():
    assert with_host_backend('hccl', TorchNativeAccelerator('hpu')) == 'cpu:gloo,hpu:hccl'


@pytest.mark.parametrize('function', ['is_available', 'device_count'])
def test_card_whose_driver_fails_leaves_no_silent_way_to_the_cpu(monkeypatch, function):
    def fail():
        raise RuntimeError('driver not loaded')

    module = types.ModuleType('torch.mlu')
    module.is_available, module.device_count = (lambda: True), (lambda: 2)
    setattr(module, function, fail)
    monkeypatch.setitem(sys.modules, 'torch_mlu', None)
    monkeypatch.setattr(torch, 'mlu', module, raising=False)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setitem(sys.modules, 'torch_xla', None)
    with pytest.raises(AcceleratorError, match="driver not loaded.*accelerator='cpu'"):
        get_accelerator('auto')
    assert get_accelerator('cpu').name == 'cpu'


def test_card_whose_driver_fails_is_refused_by_name(monkeypatch):
    def fail():
        raise RuntimeError('driver not loaded')

    module = types.ModuleType('torch.mlu')
    module.is_available = fail
    monkeypatch.setitem(sys.modules, 'torch_mlu', None)
    monkeypatch.setattr(torch, 'mlu', module, raising=False)
    with pytest.raises(AcceleratorError, match='driver not loaded'):
        get_accelerator('mlu')


@pytest.mark.parametrize('port', [0, -1, 70000, 'http'])
def test_impossible_port_argument_is_refused_with_its_value(port):
    with pytest.raises(LaunchError, match=str(port)):
        read_launch_env('pytorch', TORCHRUN, port=port)


def test_option_that_an_unregistered_accelerator_does_not_take_is_refused():
    with pytest.raises(AcceleratorError, match='colour'):
        get_accelerator(dict(type='zeta', package='torch_zeta', colour='red'))


def test_local_rank_beyond_the_world_is_refused_where_the_host_is_unknown():
    with pytest.raises(LaunchError, match='LOCAL_RANK=7 and WORLD_SIZE=2 disagree'):
        read_launch_env('pytorch', {**TORCHRUN, 'LOCAL_RANK': '7'})


def test_blank_address_under_slurm_leaves_it_to_the_node_list():
    environ = dict(SLURM_PROCID='0', SLURM_LOCALID='0', SLURM_NTASKS='2', SLURM_NNODES='2')
    environ.update(MASTER_ADDR=' ', SLURM_NODELIST='node3', PATH='')
    assert read_launch_env('slurm', environ).master_addr == 'node3'


def test_refusal_survives_a_driver_that_cannot_count():
    class Lost(Copies):
        def to_host(self, tensors):
            raise OSError('no card')

    class Gone(CPUAccelerator):
        copies = cached_property(Lost)

        def device_count(self):
            raise RuntimeError('driver gone')

    with pytest.raises(AcceleratorError, match='OSError: no card'):
        probe_device(Gone(), torch.device('cpu'))


def test_device_that_gives_another_shape_is_refused():
    short = CPUAccelerator()
    short.copies.to_host = lambda tensors: [tensor[:3] for tensor in tensors]
    with pytest.raises(AcceleratorError):
        probe_device(short, torch.device('cpu'))


@pytest.mark.parametrize('backend', ['cpu:gloo,gloo', 'gloo,gloo', 'cpu:zccl,nonsense'])
def test_malformed_composite_is_refused(backend):
    card = TorchNativeAccelerator('zeta', native_backend='zccl')
    with pytest.raises(LaunchError):
        check_backend(backend, card, 'accelerator.backend')


def test_refusal_names_no_backend_that_is_not_there():
    with pytest.raises(LaunchError) as caught:
        check_backend('glooo', CPUAccelerator(), 'accelerator.backend')
    assert "'mpi'" not in str(caught.value) or torch.distributed.is_mpi_available()


@pytest.mark.parametrize('config', [7, ['cpu']])
def test_config_of_another_type_is_refused(config):
    with pytest.raises(AcceleratorError):
        get_accelerator(config)

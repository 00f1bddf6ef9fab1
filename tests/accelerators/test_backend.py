"""The choice of a backend: what wins, what is refused, and what the refusal says."""

import re

import pytest
import torch.distributed as torch_dist

from mmdevplug.accelerators import CPUAccelerator, CUDAAccelerator, TorchNativeAccelerator
from mmdevplug.accelerators.backend import (
    available_backends,
    check_backend,
    resolve_backend,
    with_host_backend,
)
from mmdevplug.errors import LaunchError

CPU, CUDA = CPUAccelerator(), CUDAAccelerator()
CARD = TorchNativeAccelerator('zeta', native_backend='zccl')
#: Named by no plug-in, so that no machine that runs these tests has it.
ABSENT = 'zccl'


@pytest.fixture
def nccl(monkeypatch):
    """Say whether this PyTorch was built with nccl."""
    return lambda there: monkeypatch.setattr(torch_dist, 'is_nccl_available', lambda: there)


def test_backends_of_this_pytorch_are_listed():
    listed = available_backends()
    assert ('gloo' in listed) == torch_dist.is_gloo_available()
    assert ('mpi' in listed) == torch_dist.is_mpi_available()
    assert 'undefined' not in listed
    assert listed == sorted(set(listed))


@pytest.mark.parametrize('there', [True, False])
def test_nccl_is_listed_where_it_was_built_in(nccl, there):
    nccl(there)
    assert ('nccl' in available_backends()) == there


def plug_in(name, monkeypatch):
    if not hasattr(torch_dist.Backend, 'backend_list'):
        pytest.skip('PyTorch before 2.0 does not list the backends that are plugged in')
    listed = [*torch_dist.Backend.backend_list, name]
    monkeypatch.setattr(torch_dist.Backend, 'backend_list', listed)


def test_plugged_in_backend_is_listed(monkeypatch):
    plug_in('zccl', monkeypatch)
    assert 'zccl' in available_backends()
    assert check_backend('zccl', CARD, 'accelerator.backend') == 'zccl'


def refusal(backend, accelerator=CPU, origin='accelerator.backend'):
    with pytest.raises(LaunchError) as caught:
        check_backend(backend, accelerator, origin)
    return str(caught.value)


@pytest.mark.parametrize('there', [True, False])
@pytest.mark.parametrize('origin', ['accelerator.backend', 'env_cfg.dist_cfg.backend'])
def test_nccl_on_the_cpu_is_refused_with_key_accelerator_and_remedy(nccl, origin, there):
    nccl(there)
    message = refusal('nccl', origin=origin)
    assert message.startswith(f"{origin}='nccl'")
    assert "accelerator 'cpu'" in message
    assert "accelerator=dict(type='cpu', backend='gloo')" in message


def test_other_vendors_backend_is_refused_with_those_that_work_here(monkeypatch):
    assert re.search(r"accelerator 'zeta'.*expected 'gloo'\.", refusal('hccl', CARD))
    plug_in('zccl', monkeypatch)
    assert re.search("accelerator 'zeta'.*expected 'zccl' or 'gloo'", refusal('hccl', CARD))


@pytest.mark.parametrize(
    ('backend', 'accelerator'),
    [(ABSENT, CARD), (f'cpu:gloo,zeta:{ABSENT}', CARD), (f'cpu:gloo,cuda:{ABSENT}', CPU)],
)
def test_backend_that_is_not_installed_is_refused_with_those_that_are(backend, accelerator):
    message = refusal(backend, accelerator)
    assert message.startswith(f'accelerator.backend={backend!r} is not available')
    assert f'available: {", ".join(available_backends())}' in message


@pytest.mark.parametrize('backend', [5, True, ['gloo'], dict(type='gloo'), None])
def test_backend_that_is_no_name_is_refused_with_its_value(backend):
    message = refusal(backend, origin='env_cfg.dist_cfg.backend')
    assert message.startswith(f'env_cfg.dist_cfg.backend={backend!r}')
    assert ', '.join(available_backends()) in message


@pytest.mark.parametrize('backend', ['', 'cpu:', 'cpu:nccl'])
def test_composite_that_leaves_the_accelerator_out_is_refused(backend):
    assert 'accelerator.backend=' in refusal(backend)


@pytest.mark.parametrize('accelerator', [CPU, CARD, CUDA])
@pytest.mark.parametrize('backend', ['gloo', 'GLOO', 'Gloo'])
def test_gloo_works_on_every_accelerator_in_any_case(accelerator, backend):
    assert check_backend(backend, accelerator, 'accelerator.backend') == 'gloo'


def test_composite_is_taken_when_all_of_its_backends_are_there(nccl):
    nccl(True)
    taken = check_backend('CPU:gloo,CUDA:nccl', CUDA, 'accelerator.backend')
    assert taken == 'cpu:gloo,cuda:nccl'
    assert check_backend('cpu:gloo', CPU, 'accelerator.backend') == 'cpu:gloo'


@pytest.mark.parametrize('forced', [None, 'auto'])
@pytest.mark.parametrize(
    ('accelerator', 'configured', 'expected'),
    [
        (CPU, None, 'gloo'),
        (CARD, None, 'staged'),  # gloo takes none of its tensors
        (CUDA, None, 'nccl'),
        (CUDA, 'gloo', 'gloo'),
        (CUDA, 'nccl', 'nccl'),
    ],
)
def test_configured_backend_wins_over_the_default(nccl, accelerator, forced, configured, expected):
    nccl(True)
    assert resolve_backend(accelerator, forced, configured) == expected


@pytest.mark.parametrize('configured', [None, 'nccl', 'gloo', 'nonsense'])
def test_forced_backend_wins_over_the_configured_one(configured):
    assert resolve_backend(CPU, 'gloo', configured) == 'gloo'


@pytest.mark.parametrize(
    ('forced', 'configured', 'refused'),
    [
        ('nccl', 'gloo', "accelerator.backend='nccl'"),
        (None, 'nccl', "env_cfg.dist_cfg.backend='nccl'"),
    ],
)
def test_chosen_backend_that_does_not_work_is_refused(forced, configured, refused):
    with pytest.raises(LaunchError, match=f'^{refused}'):
        resolve_backend(CPU, forced, configured)


@pytest.mark.parametrize('configured', ['nccl', 'nonsense', ABSENT])
@pytest.mark.parametrize('accelerator', [CPU, CARD])
def test_auto_falls_back_where_the_configured_backend_does_not_work(accelerator, configured):
    expected = 'staged' if accelerator is CARD else 'gloo'
    assert resolve_backend(accelerator, 'auto', configured) == expected


@pytest.mark.parametrize(
    ('backend', 'accelerator', 'expected'),
    [
        ('gloo', CPU, 'gloo'),
        ('gloo', CARD, 'gloo'),
        ('mpi', CPU, 'mpi'),
        ('ucc', CARD, 'ucc'),
        ('nccl', CUDA, 'nccl'),
        ('smddp', CUDA, 'smddp'),
        ('hccl', TorchNativeAccelerator('npu'), 'hccl'),
        ('cncl', TorchNativeAccelerator('mlu'), 'cncl'),
        ('mccl', TorchNativeAccelerator('musa'), 'mccl'),
        ('cpu:gloo,cuda:nccl', CUDA, 'cpu:gloo,cuda:nccl'),
        ('zccl', CARD, 'cpu:gloo,zeta:zccl'),
        ('xccl', TorchNativeAccelerator('xpu'), 'cpu:gloo,xpu:xccl'),
        ('neuron', TorchNativeAccelerator('neuron'), 'cpu:gloo,neuron:neuron'),
        ('tccl', TorchNativeAccelerator('sdaa'), 'cpu:gloo,sdaa:tccl'),
    ],
)
def test_gloo_is_added_for_backends_that_mmengine_does_not_know(backend, accelerator, expected):
    assert with_host_backend(backend, accelerator) == expected

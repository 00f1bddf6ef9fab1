"""What each family of devices does: the CPU, CUDA's names, and cards through the stand-in."""

import types

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist

from mmdevplug.accelerators import (
    CPUAccelerator,
    CUDAAccelerator,
    DeviceContext,
    S60Accelerator,
    T20Accelerator,
    TorchNativeAccelerator,
    XLAAccelerator,
)
from mmdevplug.accelerators.backend import default_backend, takes_tensors
from mmdevplug.accelerators.random_states import host_random_state, set_host_random_state
from mmdevplug.accelerators.torch_native import FAMILIES
from mmdevplug.errors import AcceleratorError
from tests.jobs import needs_scaler


def test_cpu_has_one_shared_device_and_gloo():
    cpu = CPUAccelerator()
    assert cpu.is_available()
    assert cpu.device_count() == 1
    assert [cpu.device(local_rank) for local_rank in (0, 1, 7)] == [torch.device('cpu')] * 3
    assert cpu.shares_devices
    assert not cpu.compilation.lazy
    assert default_backend(cpu) == 'gloo'
    assert cpu.describe_visibility() == 'no variable limits the devices seen'


def test_cpu_reports_no_memory_and_takes_every_call():
    cpu, device = CPUAccelerator(), torch.device('cpu')
    assert cpu.memory_allocated(device) is None
    assert cpu.max_memory_allocated() is None
    assert cpu.device_name(device) == 'cpu'
    cpu.set_device(device)
    cpu.synchronize(device)
    cpu.compilation.materialize()
    cpu.empty_cache()
    cpu.manual_seed(0)


def test_cpu_autocast_computes_in_bfloat16():
    cpu, a = CPUAccelerator(), torch.ones(2, 2)
    with cpu.precision.autocast(dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
    with cpu.precision.autocast(dtype=torch.bfloat16, enabled=False):
        assert (a @ a).dtype == torch.float32
    assert (a @ a).dtype == torch.float32


def test_family_without_a_gradient_scaler_says_what_to_do(monkeypatch):
    with pytest.raises(AcceleratorError, match="'xla' has no gradient scaler.*bfloat16"):
        XLAAccelerator().precision.grad_scaler()
    # As on releases before torch 2.3.
    monkeypatch.delattr(getattr(torch, 'amp', None), 'GradScaler', raising=False)
    with pytest.raises(AcceleratorError, match="'cpu' has no gradient scaler.*bfloat16"):
        CPUAccelerator().precision.grad_scaler()


@needs_scaler
def test_cpu_takes_the_gradient_scaler_of_pytorch():
    scaler = CPUAccelerator().precision.grad_scaler(init_scale=8.0)
    assert scaler.is_enabled()
    assert scaler.get_scale() == 8.0


def test_precision_of_each_family():
    assert CPUAccelerator().precision.dtype == XLAAccelerator().precision.dtype == torch.bfloat16
    assert T20Accelerator().precision.dtype == torch.float16
    older = not hasattr(torch, 'get_autocast_dtype')  # before PyTorch 2.4
    known = torch.float16 if older else torch.get_autocast_dtype('cuda')
    assert CUDAAccelerator().precision.dtype == known


ZETA = TorchNativeAccelerator('zeta', native_backend='eccl')


@pytest.mark.parametrize(
    ('accelerator', 'backend', 'taken'),
    [
        (CPUAccelerator(), 'gloo', True),
        (CPUAccelerator(), 'mpi', True),
        (CPUAccelerator(), 'nccl', False),
        (CPUAccelerator(), 'cpu:gloo', True),
        (CPUAccelerator(), 'cpu:gloo,zeta:eccl', True),
        (CPUAccelerator(), 'zeta:eccl', False),
        (CUDAAccelerator(), 'gloo', True),
        (CUDAAccelerator(), 'nccl', True),
        (CUDAAccelerator(), 'cpu:gloo,cuda:nccl', True),
        (CUDAAccelerator(), 'cpu:gloo', False),
        (ZETA, 'eccl', True),
        (ZETA, 'gloo', False),
        (ZETA, 'nccl', False),
        (ZETA, 'cpu:gloo,zeta:eccl', True),
        (ZETA, 'zeta:eccl,cpu:gloo', True),
        (ZETA, 'cpu:gloo,zeta:gloo', False),
        (ZETA, 'cpu:gloo,cuda:nccl', False),
        (TorchNativeAccelerator('npu'), 'hccl', True),
        (TorchNativeAccelerator('npu'), 'gloo', False),
        (S60Accelerator(), 'cpu:gloo,gcu:eccl', True),
        (T20Accelerator(), 'gloo', False),
        (XLAAccelerator(), 'gloo', False),
    ],
)
def test_backend_takes_tensors_of_its_devices_only(accelerator, backend, taken):
    assert takes_tensors(accelerator, backend) is taken


@pytest.mark.parametrize(('there', 'backend'), [(True, 'nccl'), (False, 'gloo')])
def test_cuda_default_backend_needs_nccl_built_in(monkeypatch, there, backend):
    monkeypatch.setattr(torch_dist, 'is_nccl_available', lambda: there)
    assert default_backend(CUDAAccelerator()) == backend


@pytest.mark.parametrize(
    'accelerator', [ZETA, TorchNativeAccelerator('npu'), T20Accelerator(), XLAAccelerator()]
)
def test_default_backend_is_gloo_where_the_vendors_is_not_there(accelerator):
    assert default_backend(accelerator) == 'gloo'


def test_default_backend_is_the_one_registered_first(monkeypatch):
    backends = dict(gloo=['cpu', 'cuda'], first=['zeta'], second=['zeta'])
    monkeypatch.setattr(torch_dist.Backend, 'backend_capability', backends, raising=False)
    for name in ('FIRST', 'SECOND'):
        monkeypatch.setattr(torch_dist.Backend, name, name.lower(), raising=False)
    assert default_backend(TorchNativeAccelerator('zeta')) == 'first'


def test_contexts_can_be_compared_and_hashed():
    cpu = CPUAccelerator()
    first, second = (DeviceContext(cpu, 'a test', torch.device('cpu')) for _ in range(2))
    assert len({first, second}) == 1


@pytest.mark.parametrize(
    ('hip', 'variable'), [(None, 'CUDA_VISIBLE_DEVICES'), ('6.2', 'HIP_VISIBLE_DEVICES')]
)
def test_cuda_names_the_variable_of_the_build(monkeypatch, hip, variable):
    monkeypatch.setattr(torch.version, 'hip', hip)
    monkeypatch.setenv(variable, '1,3')
    assert CUDAAccelerator().describe_visibility() == f"{variable}='1,3'"


def test_subclass_of_cuda_has_attributes_that_differ():
    class Own(CUDAAccelerator):
        name = 'own'
        native_backend = 'own_ccl'
        visible_devices_env = 'OWN_DEVICES'

    assert (CUDAAccelerator.name, CUDAAccelerator.native_backend) == ('cuda', 'nccl')
    own = Own()
    assert (own.name, own.device_type, own.native_backend) == ('own', 'cuda', 'own_ccl')
    assert own.describe_visibility() == 'OWN_DEVICES is not set'


@pytest.mark.parametrize(('count', 'local_rank', 'index'), [(4, 0, 0), (4, 3, 3), (1, 3, 0)])
def test_cuda_device_follows_the_local_rank(monkeypatch, count, local_rank, index):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: count)
    cuda = CUDAAccelerator()
    assert cuda.device(local_rank) == torch.device('cuda', index)


def test_cuda_index_beyond_the_count_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, 'hip', None)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '4,5')
    with pytest.raises(AcceleratorError) as caught:
        CUDAAccelerator().device(2)
    message = str(caught.value)
    assert message.startswith('LOCAL_RANK=2 asks for cuda:2')
    assert 'sees 2 cuda device(s), indices 0 to 1' in message
    assert "CUDA_VISIBLE_DEVICES='4,5'" in message


@pytest.mark.parametrize('device_type', ['meta', 'vulkan'])
def test_a_device_that_autocast_does_not_know_is_refused_where_it_is_to_cast(device_type):
    accelerator = TorchNativeAccelerator(device_type)
    with accelerator.precision.autocast(enabled=False):
        pass
    with pytest.raises(AcceleratorError, match='no mixed precision for .*OptimWrapper'):
        accelerator.precision.autocast()


@pytest.mark.parametrize('name', sorted(FAMILIES))
def test_known_family_has_its_package_backend_and_variable(name):
    accelerator = TorchNativeAccelerator(name)
    assert (accelerator.name, accelerator.device_type) == (name, name)
    assert FAMILIES[name] == (
        accelerator.package,
        accelerator.native_backend,
        accelerator.visible_devices_env,
    )


def test_given_values_win_over_the_known_ones():
    accelerator = TorchNativeAccelerator(
        'npu', package='own_npu', native_backend='own', visible_devices_env='OWN'
    )
    assert accelerator.package == 'own_npu'
    assert (accelerator.native_backend, accelerator.visible_devices_env) == ('own', 'OWN')


@pytest.mark.skipif(
    not hasattr(torch.backends, 'mps'), reason='PyTorch before 1.12 has no MPS devices'
)
def test_mps_functions_get_no_device(monkeypatch):
    calls = []
    module = types.ModuleType('torch.mps')
    module.synchronize = lambda: calls.append('synchronize')
    module.manual_seed = lambda seed: calls.append(('manual_seed', seed))
    monkeypatch.setattr(torch, 'mps', module, raising=False)
    accelerator = TorchNativeAccelerator('mps')
    accelerator.synchronize(torch.device('mps', 0))
    accelerator.synchronize()
    accelerator.manual_seed(5)
    assert calls == ['synchronize', 'synchronize', ('manual_seed', 5)]


def test_family_without_its_module_has_no_device(monkeypatch):
    monkeypatch.setattr(torch, 'zeta', None, raising=False)
    accelerator = TorchNativeAccelerator('zeta')
    assert not accelerator.is_available()
    assert accelerator.device_count() == 0
    assert accelerator.memory_allocated() is None
    with pytest.raises(AcceleratorError, match='sees 0 zeta device'):
        accelerator.device(0)


def test_the_second_of_two_numbers_that_numpy_draws_at_once_is_kept():
    np.random.randn()
    state = host_random_state()
    expected = np.random.randn(3)
    np.random.seed(0)
    set_host_random_state(state)
    assert np.array_equal(np.random.randn(3), expected)

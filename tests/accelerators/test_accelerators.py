"""What each family of devices does: the CPU, CUDA's names, and cards through the stand-in."""

import multiprocessing
import os
import sys
import traceback
import types
from pathlib import Path

import card
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
    get_accelerator,
)
from mmdevplug.accelerators.backend import default_backend, takes_tensors
from mmdevplug.accelerators.torch_native import FAMILIES
from mmdevplug.errors import AcceleratorError
from tests.columns import NATIVE, job_of
from tests.jobs import install_card, need_card, needs_scaler
from tests.ranks import run_ranks, start_process

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / 'standins' / 'native'))
import vendor_names  # noqa: E402

NAMES = """
import card, json, os, pytest, sys, torch
from mmdevplug.accelerators import *
from mmdevplug.accelerators.backend import default_backend, takes_tensors
from mmdevplug.errors import AcceleratorError
from tests.jobs import need_card, needs_scaler
"""


def serve(connection, name, count, environ):
    """Run pieces of code, and answer each with a traceback or nothing."""
    os.environ.update(environ)
    card.install(name, count=count)
    names = {}
    exec(NAMES, names)
    for code in iter(connection.recv, None):
        torch.manual_seed(0)
        failure = ''
        try:
            exec(code, {**names, 'accelerator': names['get_accelerator'](name)})
        except BaseException:
            failure = traceback.format_exc()
        connection.send(failure)


class Card:
    """A process that has the stand-in under one name, because a process can have but one."""

    def __init__(self, name, count, **environ):
        environ['MMDEVPLUG_ACCELERATOR'] = ''
        self.connection, theirs = multiprocessing.Pipe()
        self.process = start_process(serve, theirs, name, count, environ)
        theirs.close()

    def run(self, code):
        """Run code with ``accelerator`` and all of mmdevplug.accelerators in its globals."""
        self.connection.send(code)
        failure = self.connection.recv()
        assert not failure, failure

    def close(self):
        self.connection.send(None)
        self.process.join()


def card_fixture(name, count, **environ):
    @pytest.fixture(scope='module')
    def fixture():
        need_card()
        process = Card(name, count, **environ)
        yield process.run
        process.close()

    return fixture


zeta = card_fixture('zeta', 4)
lonely_zeta = card_fixture('zeta', 1)
gcu = card_fixture('gcu', 2, TOPS_VISIBLE_DEVICES='6,7')
npu = card_fixture('npu', 2, ASCEND_RT_VISIBLE_DEVICES='0,1')


# CPU -----------------------------------------------------------------------------------------


@pytest.mark.parametrize('local_rank', [0, 1, 7])
def test_cpu_has_room_for_every_local_rank(local_rank):
    assert CPUAccelerator().device(local_rank) == torch.device('cpu')


def test_cpu_has_one_shared_device_and_gloo():
    cpu = CPUAccelerator()
    assert cpu.is_available()
    assert cpu.device_count() == 1
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


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize('dtype', DTYPES)
def test_cpu_copies_keep_values(dtype):
    cpu, values = CPUAccelerator(), torch.arange(6).reshape(2, 3).to(dtype)
    assert torch.equal(cpu.copies.to_host([values])[0], values)
    target = torch.zeros_like(values)
    cpu.copies.into_host([values], [target])
    assert torch.equal(target, values)
    target.zero_()
    cpu.copies.into_device([values], [target])
    assert torch.equal(target, values)


def test_host_copies_are_outside_the_graph():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert not CPUAccelerator().copies.to_host([parameter * 2])[0].requires_grad
    target = torch.zeros(3)
    CPUAccelerator().copies.into_host([parameter * 2], [target])
    assert not target.requires_grad


# backends of torch.distributed ---------------------------------------------------------------

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


# contexts and compiled graphs ----------------------------------------------------------------


def test_contexts_can_be_compared_and_hashed():
    cpu = CPUAccelerator()
    first, second = (DeviceContext(cpu, 'a test', torch.device('cpu')) for _ in range(2))
    assert len({first, second}) == 1


# CUDA's and ROCm's names ---------------------------------------------------------------------


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


# a card that nobody has heard of -------------------------------------------------------------


@pytest.mark.parametrize('local_rank', range(4))
def test_card_device_follows_the_local_rank(zeta, local_rank):
    zeta(
        f"assert accelerator.device({local_rank}) == torch.device('zeta', {local_rank})\n"
        f'assert accelerator.device_count() == 4\n'
    )


@pytest.mark.parametrize('local_rank', [4, 7, -1])
def test_card_index_beyond_the_count_is_refused_with_count(zeta, local_rank):
    zeta(f"""
with pytest.raises(AcceleratorError) as caught:
    accelerator.device({local_rank})
message = str(caught.value)
assert message.startswith('LOCAL_RANK={local_rank} asks for zeta:{local_rank}')
assert 'this process sees 4 zeta device(s), indices 0 to 3' in message
assert 'no variable limits the devices seen' in message
assert 'Start at most 4 processes' in message
""")


@pytest.mark.parametrize('local_rank', [0, 1, 7])
def test_only_card_is_taken_by_every_local_rank(lonely_zeta, local_rank):
    lonely_zeta(f"""
device = accelerator.device({local_rank})
assert device == torch.device('zeta', 0)
probe_device(accelerator, device)
""")


def test_only_card_is_not_taken_by_a_negative_local_rank(lonely_zeta):
    lonely_zeta("""
with pytest.raises(AcceleratorError, match='LOCAL_RANK=-1 asks for zeta:-1'):
    accelerator.device(-1)
""")


def test_card_variable_is_named_where_the_config_names_it(zeta):
    zeta("""
import os
os.environ['ZETA_DEVICES'] = '0,1,2,3'
named = get_accelerator(dict(type='zeta', package='card', visible_devices_env='ZETA_DEVICES'))
with pytest.raises(AcceleratorError, match="ZETA_DEVICES='0,1,2,3'"):
    named.device(4)
""")


def test_card_of_unknown_name_is_the_generic_accelerator(zeta):
    zeta("""
assert type(accelerator) is TorchNativeAccelerator
assert (accelerator.name, accelerator.device_type) == ('zeta', 'zeta')
assert (accelerator.native_backend, accelerator.visible_devices_env) == (None, None)
assert default_backend(accelerator) == 'gloo'
assert not takes_tensors(accelerator, 'gloo')
assert accelerator.device_name(torch.device('zeta:1')) == 'fakecard'
""")


def test_every_card_that_copies_to_the_host_is_waited_for(zeta):
    zeta("""
import contextlib
from mmdevplug.staged import host_buffers
recorded, waited = [], []
class Stream:
    def __init__(self, device):
        self.device = device
    def wait_stream(self, program):
        assert program is None
    def record_event(self):
        recorded.append(self.device.index)
        return self
    def synchronize(self):
        waited.append(self.device.index)
zeta = torch.zeta
zeta.Stream, zeta.stream = Stream, lambda stream: contextlib.nullcontext()
zeta.current_stream = lambda device: None
host_buffers.pins_memory.cache_clear()
zeta.set_device(0)
sources = [torch.full((3,), index, device=f'zeta:{index}') for index in (1, 3, 1)]
buffers = host_buffers.HostBuffers()
targets = [buffers.read(source, later=True) for source in sources]
assert (recorded, waited) == ([1, 3, 1], [])
assert all(target.is_pinned() for target in targets)
buffers.wait_for_copies()
assert waited == [1, 3, 1]
assert zeta.current_device() == 0
assert [target.tolist() for target in targets] == [[1] * 3, [3] * 3, [1] * 3]
del zeta.Stream, zeta.stream, zeta.current_stream
host_buffers.pins_memory.cache_clear()
""")


def test_current_card_is_set(zeta):
    zeta("""
for index in (2, 0, 3):
    accelerator.set_device(accelerator.device(index))
    assert torch.zeta.current_device() == index
    assert torch.ones(1, device='zeta').device == torch.device('zeta', index)
""")


def test_every_card_passes_its_first_operation(zeta):
    zeta("""
for local_rank in range(4):
    probe_device(accelerator, accelerator.device(local_rank))
    assert torch.zeta.current_device() == local_rank
with pytest.raises(AcceleratorError) as caught:
    probe_device(accelerator, torch.device('zeta:9'))
assert str(caught.value).startswith('the first operation of device zeta:9 fails with')
assert 'no device 9, there are 4' in str(caught.value)
""")


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('index', [0, 3])
def test_copies_between_host_and_card_keep_values(zeta, dtype, index):
    zeta(f"""
host = torch.arange(6).reshape(2, 3).to({dtype})
sent = torch.zeros(2, 3, dtype={dtype}, device='zeta:{index}')
accelerator.copies.into_device([host], [sent])
assert sent.device == torch.device('zeta:{index}') and sent.dtype is {dtype}
fetched = accelerator.copies.to_host([sent])[0]
assert fetched.device.type == 'cpu' and fetched.dtype is {dtype}
assert torch.equal(fetched, host)
target = torch.zeros_like(host)
accelerator.copies.into_host([sent], [target])
assert torch.equal(target, host)
""")


def test_many_tensors_of_many_kinds_are_copied_in_one_call(zeta):
    zeta("""
host = [torch.arange(6.).view(2, 3).t(), torch.tensor(3), torch.empty(0, 2), torch.eye(3).bool()]
sent = [value.to('zeta:1') for value in host]
fetched = accelerator.copies.to_host(sent)
assert [value.dtype for value in fetched] == [value.dtype for value in host]
assert all(torch.equal(one, other) for one, other in zip(fetched, host))
assert accelerator.copies.to_host([]) == []
accelerator.copies.into_device([torch.zeros_like(value) for value in host], sent)
assert not any(value.any() for value in accelerator.copies.to_host(sent))
""")


def test_copies_convert_dtypes(zeta):
    zeta("""
master = torch.tensor([1.0, 2.5, -3.0])
half = torch.zeros(3, dtype=torch.bfloat16, device='zeta:2')
accelerator.copies.into_device([master], [half])
assert half.dtype == torch.bfloat16 and half.device == torch.device('zeta:2')
back = torch.zeros(3)
accelerator.copies.into_host([half], [back])
assert torch.equal(back, master)
""")


def test_copies_are_outside_the_graph_and_keep_the_parameter(zeta):
    zeta("""
parameter = torch.nn.Parameter(torch.ones(3, device='zeta:1'))
assert not accelerator.copies.to_host([parameter])[0].requires_grad
assert not accelerator.copies.to_host([parameter * 2])[0].requires_grad
with torch.no_grad():
    accelerator.copies.into_device([torch.full((3,), 7.0)], [parameter])
assert parameter.requires_grad and parameter.is_leaf
assert parameter.cpu().tolist() == [7.0] * 3
""")


def test_memory_is_reported_in_bytes_for_each_card(zeta):
    zeta("""
before = [accelerator.memory_allocated(torch.device('zeta', i)) for i in range(4)]
kept = torch.zeros(256, device='zeta:1')
after = [accelerator.memory_allocated(torch.device('zeta', i)) for i in range(4)]
assert [b - a for a, b in zip(before, after)] == [0, 1024, 0, 0]
assert accelerator.max_memory_allocated(torch.device('zeta:1')) >= 1024
accelerator.set_device(torch.device('zeta:1'))
assert accelerator.memory_allocated() == after[1]
accelerator.set_device(torch.device('zeta:0'))
accelerator.empty_cache()
""")


def test_waiting_and_seeding_work_with_and_without_a_card(zeta):
    zeta("""
accelerator.synchronize()
accelerator.synchronize(torch.device('zeta:3'))
accelerator.compilation.materialize(torch.device('zeta:3'))
accelerator.manual_seed(1)
""")


def test_seed_reaches_every_card(zeta):
    zeta("""
seeds = []
torch.zeta.manual_seed_all = seeds.append
accelerator.manual_seed(7)
assert seeds == [7]
""")


@pytest.mark.parametrize('dtype', ['torch.bfloat16', 'torch.float16'])
def test_autocast_is_that_of_the_card(zeta, dtype):
    zeta(f"""
with accelerator.precision.autocast(dtype={dtype}):
    assert torch.is_autocast_enabled('zeta') and not torch.is_autocast_enabled('cpu')
    assert torch.get_autocast_dtype('zeta') is {dtype}
    with accelerator.precision.autocast(enabled=False):
        assert not torch.is_autocast_enabled('zeta')
assert not torch.is_autocast_enabled('zeta')
with accelerator.precision.autocast():
    assert torch.is_autocast_enabled('zeta')
""")


def test_gradient_scaler_scales_on_the_card(zeta):
    zeta("""
scaler = accelerator.precision.grad_scaler(init_scale=8.0)
assert scaler.scale(torch.ones(1, device='zeta:1')).cpu().item() == 8.0
""")


def test_vendors_gradient_scaler_is_preferred(zeta):
    zeta("""
import types
torch.zeta.amp = types.SimpleNamespace(GradScaler=lambda **kwargs: ('own', kwargs))
try:
    assert accelerator.precision.grad_scaler(init_scale=2.0) == ('own', dict(init_scale=2.0))
finally:
    del torch.zeta.amp
""")


def test_functions_that_a_vendor_lacks_are_left_out(zeta):
    zeta("""
import types
whole = torch.zeta
torch.zeta = types.ModuleType('torch.zeta')
torch.zeta.is_available, torch.zeta.device_count = whole.is_available, whole.device_count
try:
    assert accelerator.is_available() and accelerator.device_count() == 4
    assert accelerator.memory_allocated() is None
    assert accelerator.max_memory_allocated(torch.device('zeta:0')) is None
    assert accelerator.device_name(torch.device('zeta:0')) == 'zeta'
    accelerator.empty_cache()
    accelerator.synchronize()
    accelerator.manual_seed(0)
finally:
    torch.zeta = whole
""")


def test_cards_are_set_by_their_index(zeta):
    zeta("""
whole = torch.zeta.set_device
torch.zeta.set_device = lambda device: whole(device + 0)  # openreg compares it with integers
try:
    accelerator.set_device(torch.device('zeta:2'))
    assert accelerator.current_device() == torch.device('zeta:2')
finally:
    torch.zeta.set_device = whole
    torch.zeta.set_device(0)
""")


@pytest.mark.skipif(not hasattr(torch, 'accelerator'), reason='PyTorch 2.6 has torch.accelerator')
def test_a_guarded_module_is_asked_through_pytorch(zeta):
    zeta("""
import sys, types
whole = torch.zeta
asked = ['is_available', 'device_count', 'current_device', 'set_device', 'synchronize',
         'get_rng_state']
def guarded(name):
    def call(*args):
        caller = sys._getframe(1).f_globals['__name__']
        if not caller.startswith('torch.'):
            raise RuntimeError(f'{name} is internal to Zeta. Use torch.accelerator instead.')
        return getattr(whole, name)(*args)
    return call
torch.zeta = types.SimpleNamespace(**{**vars(whole), **{name: guarded(name) for name in asked}})
sys.modules['torch.zeta'] = torch.zeta
try:
    accelerator = TorchNativeAccelerator('zeta')
    assert accelerator.is_available() and accelerator.device_count() == 4
    accelerator.set_device(torch.device('zeta:3'))
    assert accelerator.current_device() == torch.device('zeta:3')
    accelerator.synchronize()
    assert accelerator.save_rng(torch.device('zeta:3')) is None
    missing = accelerator.missing_functions()
    assert 'get_rng_state (a resumed run draws other random numbers)' in missing, missing
    assert 'set_device' not in missing and 'device_count' not in missing
finally:
    torch.zeta = sys.modules['torch.zeta'] = whole
    torch.zeta.set_device(0)
""")


def test_the_card_offers_what_openreg_does_and_is_as_strict(zeta):
    zeta(f"""
missing = set({vendor_names.OPENREG.split()}) - set(vars(torch.zeta))
assert not missing, missing
for wrong in (torch.device('zeta:1'), 'zeta:1', None):
    with pytest.raises(TypeError):
        torch.zeta.set_device(wrong)
scores = torch.randn(4, 5, device='zeta:1', requires_grad=True)
scores.logsumexp(1).sum().backward()
expected = torch.softmax(scores.detach().cpu(), 1)
assert torch.allclose(scores.grad.cpu(), expected) and scores.grad.device == scores.device
storage = torch.ones(3, device='zeta:2').untyped_storage()
storage.resize_(40)
assert (storage.nbytes(), storage.device) == (40, torch.device('zeta:2'))
""")


def test_a_failure_of_a_driver_is_no_reason_to_ask_elsewhere(zeta):
    zeta("""
whole = torch.zeta.synchronize
def fail(device=None):
    raise RuntimeError('kernel timed out')
torch.zeta.synchronize = fail
try:
    with pytest.raises(RuntimeError, match='kernel timed out'):
        accelerator.synchronize()
finally:
    torch.zeta.synchronize = whole
""")


def test_what_a_module_lacks_is_named_with_its_cost(zeta):
    zeta("""
import types
whole = torch.zeta
torch.zeta = types.ModuleType('torch.zeta')
torch.zeta.synchronize = whole.synchronize
try:
    with pytest.raises(AcceleratorError) as caught:
        get_accelerator('zeta')
    message = str(caught.value)
    for words in ('device_count (', 'get_rng_state (a resumed run draws other random numbers)',
                  "accelerator=dict(type='zeta', device_count=1)"):
        assert words in message, message
    told = get_accelerator(dict(type='zeta', device_count=1))
    assert told.device_count() == 1 and told.device(5) == torch.device('zeta:0')
    assert 'device_count' not in told.missing_functions()
    weight = torch.ones(2, device='zeta:0', requires_grad=True)
    weight.sum().backward()
    torch.optim.Adam([weight]).step()  # asks torch.zeta.is_available from PyTorch 2.13 on
    assert not torch.equal(weight.cpu(), torch.ones(2))
    told.set_device(told.device())
    assert told.current_device() == torch.device('zeta:0')
    probe_device(told, told.device())
finally:
    torch.zeta = whole
assert accelerator.missing_functions().count('Event') == accelerator.missing_functions().count('(')
with pytest.raises(AcceleratorError, match='device_count=1, but torch.zeta tells 4'):
    get_accelerator(dict(type='zeta', device_count=1))
for wrong in (0, -1, True, '2', 1.5):
    with pytest.raises(AcceleratorError, match='expected the number of devices'):
        get_accelerator(dict(type='zeta', device_count=wrong))
""")


@pytest.mark.parametrize('device_type', ['meta', 'vulkan'])
def test_a_device_that_autocast_does_not_know_is_refused_where_it_is_to_cast(device_type):
    accelerator = TorchNativeAccelerator(device_type)
    with accelerator.precision.autocast(enabled=False):
        pass
    with pytest.raises(AcceleratorError, match='no mixed precision for .*OptimWrapper'):
        accelerator.precision.autocast()


# cards of known names ------------------------------------------------------------------------


def test_card_named_gcu_is_the_s60(gcu):
    gcu("""
assert type(accelerator) is S60Accelerator
assert (accelerator.name, accelerator.device_type) == ('gcu', 'gcu')
assert not accelerator.compilation.lazy
assert accelerator.device(1) == torch.device('gcu:1')
assert type(get_accelerator('auto')) is S60Accelerator
assert available_accelerators()[0] == 'gcu'
probe_device(accelerator, accelerator.device(1))
""")


def test_s60_names_its_variable(gcu):
    gcu("""
with pytest.raises(AcceleratorError) as caught:
    accelerator.device(2)
message = str(caught.value)
assert 'LOCAL_RANK=2 asks for gcu:2' in message
assert 'sees 2 gcu device(s), indices 0 to 1' in message
assert "TOPS_VISIBLE_DEVICES='6,7'" in message
""")


def test_s60_takes_its_own_backend_once_it_is_plugged_in(gcu):
    gcu("""
import torch.distributed as torch_dist
from mmdevplug.accelerators.backend import available_backends, resolve_backend, with_host_backend
assert default_backend(accelerator) == 'gloo'
torch_dist.Backend.register_backend('eccl', lambda *args: None, devices='gcu')
assert default_backend(accelerator) == 'eccl'
assert 'eccl' in available_backends()
assert resolve_backend(accelerator, 'eccl') == 'eccl'
assert resolve_backend(accelerator, 'auto', 'nccl') == 'eccl'
assert resolve_backend(accelerator, 'gloo') == 'staged'
assert with_host_backend('eccl', accelerator) == 'cpu:gloo,gcu:eccl'
assert takes_tensors(accelerator, 'cpu:gloo,gcu:eccl')
""")


def test_card_named_npu_has_what_is_known_of_ascend(npu):
    npu("""
assert type(accelerator) is TorchNativeAccelerator
assert (accelerator.package, accelerator.native_backend) == ('torch_npu', 'hccl')
with pytest.raises(AcceleratorError) as caught:
    accelerator.device(2)
assert "ASCEND_RT_VISIBLE_DEVICES='0,1'" in str(caught.value)
probe_device(accelerator, accelerator.device(1))
""")


# families without a stand-in -----------------------------------------------------------------


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


def draw_again(accelerator):
    install_card(accelerator)
    card = get_accelerator(accelerator)
    device = card.device(1)
    torch.rand(3, device=device)
    state = card.save_rng(device)
    drawn = torch.rand(4, device=device).tolist()
    card.load_rng(state, device)
    return drawn, torch.rand(4, device=device).tolist()


@pytest.mark.parametrize('accelerator', ['zeta', NATIVE])
def test_random_numbers_of_a_card_go_on_where_they_were_saved(accelerator):
    need_card()
    ((drawn, again),) = run_ranks(draw_again, 0, accelerator, **job_of(accelerator))
    assert again == drawn

"""What cards do, through the stand-in: each test runs in a process that has one kind of them."""

import contextlib
import functools
import multiprocessing
import os
import sys
import traceback
import types
from importlib import import_module

import card
import pytest
import torch
import torch.distributed as torch_dist

from mmdevplug.accelerators import (
    S60Accelerator,
    TorchNativeAccelerator,
    available_accelerators,
    choose_accelerator,
    get_accelerator,
    probe_device,
)
from mmdevplug.accelerators.backend import (
    available_backends,
    default_backend,
    resolve_backend,
    takes_tensors,
    with_host_backend,
)
from mmdevplug.errors import AcceleratorError
from mmdevplug.staged import host_buffers
from tests.jobs import ROOT, need_card
from tests.ranks import start_process

sys.path.append(str(ROOT / 'standins' / 'native'))
import vendor_names  # noqa: E402

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.uint8, torch.bool, torch.complex64),
]


def serve(connection, name, count, environ):
    """Run tests on cards of this name, and answer each with a traceback or nothing."""
    os.environ.update(environ)
    card.install(name, count=count)
    for module, test, arguments in iter(connection.recv, None):
        torch.manual_seed(0)
        failure = ''
        try:
            getattr(import_module(module), test).__wrapped__(get_accelerator(name), **arguments)
        except BaseException:
            failure = traceback.format_exc()
        connection.send(failure)


class Cards:
    """A process that has the stand-in under one name, because a process can have but one."""

    def __init__(self, name, count, **environ):
        environ['MMDEVPLUG_ACCELERATOR'] = ''
        self.connection, theirs = multiprocessing.Pipe()
        self.process = start_process(serve, theirs, name, count, environ)
        theirs.close()

    def run(self, test, arguments):
        self.connection.send((test.__module__, test.__name__, arguments))
        failure = self.connection.recv()
        assert not failure, failure

    def close(self):
        self.connection.send(None)
        self.process.join()


def cards(name, count, **environ):
    @pytest.fixture(scope='module')
    def fixture():
        need_card()
        process = Cards(name, count, **environ)
        yield process
        process.close()

    return fixture


zeta = cards('zeta', 4)
lonely_zeta = cards('zeta', 1)
gcu = cards('gcu', 2, TOPS_VISIBLE_DEVICES='6,7')
npu = cards('npu', 2, ASCEND_RT_VISIBLE_DEVICES='0,1')


def there(test):
    """Run a test in the process of its cards, where it gets their accelerator as its fixture."""

    @functools.wraps(test)
    def run(**given):
        (fixture,) = [name for name, value in given.items() if isinstance(value, Cards)]
        given.pop(fixture).run(test, given)

    return run


def refusal(accelerator, local_rank):
    with pytest.raises(AcceleratorError) as caught:
        accelerator.device(local_rank)
    return str(caught.value)


# a card that nobody has heard of -------------------------------------------------------------


@pytest.mark.parametrize('local_rank', range(4))
@there
def test_card_device_follows_the_local_rank(zeta, local_rank):
    assert zeta.device(local_rank) == torch.device('zeta', local_rank)
    assert zeta.device_count() == 4


@pytest.mark.parametrize('kind', ['SiLU', 'Mish', 'LayerNorm', 'GroupNorm'])
@there
def test_card_computes_by_kernels_of_the_cpu(zeta, kind):
    layer = getattr(torch.nn, kind)(*{'LayerNorm': [40], 'GroupNorm': [4, 8]}.get(kind, []))
    x, weight = torch.randn(2, 64, 8, 40)
    found = []
    for device in (torch.device('cpu'), zeta.device(0)):
        here = x.clone().to(device).requires_grad_()
        output = layer.to(device)(here)
        (output * weight.to(device)).sum().backward()
        found.append([output.cpu(), here.grad.cpu()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize('local_rank', [4, 7, -1])
@there
def test_card_index_beyond_the_count_is_refused_with_count(zeta, local_rank):
    message = refusal(zeta, local_rank)
    assert message.startswith(f'LOCAL_RANK={local_rank} asks for zeta:{local_rank}')
    assert 'this process sees 4 zeta device(s), indices 0 to 3' in message
    assert 'no variable limits the devices seen' in message
    assert 'Start at most 4 processes' in message


@pytest.mark.parametrize('local_rank', [0, 1, 7])
@there
def test_only_card_is_taken_by_every_local_rank(lonely_zeta, local_rank):
    device = lonely_zeta.device(local_rank)
    assert device == torch.device('zeta', 0)
    probe_device(lonely_zeta, device)
    assert 'LOCAL_RANK=-1 asks for zeta:-1' in refusal(lonely_zeta, -1)


@there
def test_card_variable_is_named_where_the_config_names_it(zeta):
    os.environ['ZETA_DEVICES'] = '0,1,2,3'
    named = dict(type='zeta', package='card', visible_devices_env='ZETA_DEVICES')
    assert "ZETA_DEVICES='0,1,2,3'" in refusal(get_accelerator(named), 4)


@there
def test_card_of_unknown_name_is_the_generic_accelerator(zeta):
    assert type(zeta) is TorchNativeAccelerator
    assert (zeta.name, zeta.device_type) == ('zeta', 'zeta')
    assert (zeta.native_backend, zeta.visible_devices_env) == (None, None)
    assert default_backend(zeta) == 'gloo'
    assert not takes_tensors(zeta, 'gloo')
    assert zeta.device_name(torch.device('zeta:1')) == 'fakecard'


@there
def test_name_never_heard_of_is_found_by_name_by_environment_and_by_detection(zeta):
    names = available_accelerators()
    assert (names[0], names[-1], names.count('zeta')) == ('zeta', 'cpu', 1), names
    for config in (None, 'auto', dict(type='auto')):
        choice = choose_accelerator(config)
        assert (choice.accelerator.name, choice.reason) == ('zeta', 'detected: 4 zeta device(s)')
    choice = choose_accelerator('zeta')
    assert (choice.accelerator.device_type, choice.reason) == ('zeta', "accelerator.type='zeta'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('MMDEVPLUG_ACCELERATOR', 'cpu')
        assert choose_accelerator().accelerator.name == 'cpu'
        assert choose_accelerator('zeta').accelerator.name == 'zeta'
        patch.setenv('MMDEVPLUG_ACCELERATOR', 'zeta')
        assert choose_accelerator().reason == 'environment variable MMDEVPLUG_ACCELERATOR=zeta'
        assert choose_accelerator('cpu').accelerator.name == 'cpu'


@there
def test_every_card_that_copies_to_the_host_is_waited_for(zeta):
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

    module = torch.zeta
    module.Stream, module.stream = Stream, lambda stream: contextlib.nullcontext()
    module.current_stream = lambda device: None
    host_buffers.pins_memory.cache_clear()
    module.set_device(0)
    sources = [torch.full((3,), index, device=f'zeta:{index}') for index in (1, 3, 1)]
    buffers = host_buffers.HostBuffers()
    targets = [buffers.read(source, later=True) for source in sources]
    assert (recorded, waited) == ([1, 3, 1], [])
    assert all(target.is_pinned() for target in targets)
    buffers.wait_for_copies()
    assert waited == [1, 3, 1]
    assert module.current_device() == 0
    assert [target.tolist() for target in targets] == [[1] * 3, [3] * 3, [1] * 3]
    del module.Stream, module.stream, module.current_stream
    host_buffers.pins_memory.cache_clear()


@there
def test_current_card_is_set(zeta):
    for index in (2, 0, 3):
        zeta.set_device(zeta.device(index))
        assert torch.zeta.current_device() == index
        assert torch.ones(1, device='zeta').device == torch.device('zeta', index)


@there
def test_every_card_passes_its_first_operation(zeta):
    for local_rank in range(4):
        probe_device(zeta, zeta.device(local_rank))
        assert torch.zeta.current_device() == local_rank
    with pytest.raises(AcceleratorError) as caught:
        probe_device(zeta, torch.device('zeta:9'))
    assert str(caught.value).startswith('the first operation of device zeta:9 fails with')
    assert 'no device 9, there are 4' in str(caught.value)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('index', [0, 3])
@there
def test_copies_between_host_and_card_keep_values(zeta, dtype, index):
    host, device = torch.arange(6).reshape(2, 3).to(dtype), torch.device('zeta', index)
    sent = torch.zeros(2, 3, dtype=dtype, device=device)
    zeta.copies.into_device([host], [sent])
    assert (sent.device, sent.dtype) == (device, dtype)
    fetched = zeta.copies.to_host([sent])[0]
    assert (fetched.device.type, fetched.dtype) == ('cpu', dtype)
    assert torch.equal(fetched, host)
    target = torch.zeros_like(host)
    zeta.copies.into_host([sent], [target])
    assert torch.equal(target, host)


@there
def test_many_tensors_of_many_kinds_are_copied_in_one_call(zeta):
    host = [torch.arange(6.0).view(2, 3).t(), torch.tensor(3), torch.empty(0, 2)]
    host.append(torch.eye(3).bool())
    sent = [value.to('zeta:1') for value in host]
    fetched = zeta.copies.to_host(sent)
    assert [value.dtype for value in fetched] == [value.dtype for value in host]
    assert all(torch.equal(one, other) for one, other in zip(fetched, host))
    assert zeta.copies.to_host([]) == []
    zeta.copies.into_device([torch.zeros_like(value) for value in host], sent)
    assert not any(value.any() for value in zeta.copies.to_host(sent))


@there
def test_copies_convert_dtypes(zeta):
    master = torch.tensor([1.0, 2.5, -3.0])
    half = torch.zeros(3, dtype=torch.bfloat16, device='zeta:2')
    zeta.copies.into_device([master], [half])
    assert (half.dtype, half.device) == (torch.bfloat16, torch.device('zeta:2'))
    back = torch.zeros(3)
    zeta.copies.into_host([half], [back])
    assert torch.equal(back, master)


@there
def test_copies_are_outside_the_graph_and_keep_the_parameter(zeta):
    parameter = torch.nn.Parameter(torch.ones(3, device='zeta:1'))
    assert not zeta.copies.to_host([parameter])[0].requires_grad
    assert not zeta.copies.to_host([parameter * 2])[0].requires_grad
    target = torch.zeros(3)
    zeta.copies.into_host([parameter * 2], [target])
    assert not target.requires_grad
    with torch.no_grad():
        zeta.copies.into_device([torch.full((3,), 7.0)], [parameter])
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert parameter.cpu().tolist() == [7.0] * 3


@there
def test_memory_is_reported_in_bytes_for_each_card(zeta):
    before = [zeta.memory_allocated(torch.device('zeta', i)) for i in range(4)]
    kept = torch.zeros(256, device='zeta:1')
    after = [zeta.memory_allocated(torch.device('zeta', i)) for i in range(4)]
    assert [b - a for a, b in zip(before, after)] == [0, kept.numel() * 4, 0, 0]
    assert zeta.max_memory_allocated(torch.device('zeta:1')) >= 1024
    zeta.set_device(torch.device('zeta:1'))
    assert zeta.memory_allocated() == after[1]
    zeta.set_device(torch.device('zeta:0'))
    zeta.empty_cache()


@there
def test_waiting_works_with_and_without_a_card_and_a_seed_reaches_every_card(zeta):
    zeta.synchronize()
    zeta.synchronize(torch.device('zeta:3'))
    zeta.compilation.materialize(torch.device('zeta:3'))
    zeta.manual_seed(1)
    seeds = []
    torch.zeta.manual_seed_all = seeds.append
    zeta.manual_seed(7)
    assert seeds == [7]


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
@there
def test_autocast_is_that_of_the_card(zeta, dtype):
    with zeta.precision.autocast(dtype=dtype):
        assert torch.is_autocast_enabled('zeta')
        assert not torch.is_autocast_enabled('cpu')
        assert torch.get_autocast_dtype('zeta') is dtype
        with zeta.precision.autocast(enabled=False):
            assert not torch.is_autocast_enabled('zeta')
    assert not torch.is_autocast_enabled('zeta')
    with zeta.precision.autocast():
        assert torch.is_autocast_enabled('zeta')


@there
def test_gradient_scaler_scales_on_the_card(zeta):
    scaler = zeta.precision.grad_scaler(init_scale=8.0)
    assert scaler.scale(torch.ones(1, device='zeta:1')).cpu().item() == 8.0


@there
def test_vendors_gradient_scaler_is_preferred(zeta):
    own = types.SimpleNamespace(GradScaler=lambda **kwargs: ('own', kwargs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.zeta, 'amp', own, raising=False)
        assert zeta.precision.grad_scaler(init_scale=2.0) == ('own', dict(init_scale=2.0))


@there
def test_functions_that_a_vendor_lacks_are_left_out(zeta):
    lean = types.ModuleType('torch.zeta')
    lean.is_available, lean.device_count = torch.zeta.is_available, torch.zeta.device_count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'zeta', lean)
        assert zeta.is_available()
        assert zeta.device_count() == 4
        assert zeta.memory_allocated() is None
        assert zeta.max_memory_allocated(torch.device('zeta:0')) is None
        assert zeta.device_name(torch.device('zeta:0')) == 'zeta'
        zeta.empty_cache()
        zeta.synchronize()
        zeta.manual_seed(0)


@there
def test_cards_are_set_by_their_index(zeta):
    whole = torch.zeta.set_device
    with pytest.MonkeyPatch.context() as patch:
        # openreg compares it with integers
        patch.setattr(torch.zeta, 'set_device', lambda device: whole(device + 0))
        zeta.set_device(torch.device('zeta:2'))
        assert zeta.current_device() == torch.device('zeta:2')
    torch.zeta.set_device(0)


@pytest.mark.skipif(not hasattr(torch, 'accelerator'), reason='PyTorch 2.6 has torch.accelerator')
@there
def test_a_guarded_module_is_asked_through_pytorch(zeta):
    whole = torch.zeta

    def guarded(name):
        def call(*args):
            caller = sys._getframe(1).f_globals['__name__']
            if not caller.startswith('torch.'):
                raise RuntimeError(f'{name} is internal to Zeta. Use torch.accelerator instead.')
            return getattr(whole, name)(*args)

        return call

    asked = ['is_available', 'device_count', 'current_device', 'set_device', 'synchronize']
    functions = {name: guarded(name) for name in [*asked, 'get_rng_state']}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'zeta', types.SimpleNamespace(**{**vars(whole), **functions}))
        patch.setitem(sys.modules, 'torch.zeta', torch.zeta)
        accelerator = TorchNativeAccelerator('zeta')
        assert accelerator.is_available()
        assert accelerator.device_count() == 4
        accelerator.set_device(torch.device('zeta:3'))
        assert accelerator.current_device() == torch.device('zeta:3')
        accelerator.synchronize()
        assert accelerator.save_rng(torch.device('zeta:3')) is None
        missing = accelerator.missing_functions()
        assert 'get_rng_state (a resumed run draws other random numbers)' in missing, missing
        assert 'set_device' not in missing
        assert 'device_count' not in missing
    torch.zeta.set_device(0)


@there
def test_the_card_offers_what_openreg_does_and_is_as_strict(zeta):
    missing = set(vendor_names.OPENREG.split()) - set(vars(torch.zeta))
    assert not missing, missing
    for wrong in (torch.device('zeta:1'), 'zeta:1', None):
        with pytest.raises(TypeError):
            torch.zeta.set_device(wrong)
    scores = torch.randn(4, 5, device='zeta:1', requires_grad=True)
    scores.logsumexp(1).sum().backward()
    expected = torch.softmax(scores.detach().cpu(), 1)
    assert torch.allclose(scores.grad.cpu(), expected)
    assert scores.grad.device == scores.device
    storage = torch.ones(3, device='zeta:2').untyped_storage()
    storage.resize_(40)
    assert (storage.nbytes(), storage.device) == (40, torch.device('zeta:2'))


@there
def test_a_failure_of_a_driver_is_no_reason_to_ask_elsewhere(zeta):
    def fail(device=None):
        raise RuntimeError('kernel timed out')

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.zeta, 'synchronize', fail)
        with pytest.raises(RuntimeError, match='kernel timed out'):
            zeta.synchronize()


@there
def test_what_a_module_lacks_is_named_with_its_cost(zeta):
    lean = types.ModuleType('torch.zeta')
    lean.synchronize = torch.zeta.synchronize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'zeta', lean)
        with pytest.raises(AcceleratorError) as caught:
            get_accelerator('zeta')
        message = str(caught.value)
        assert 'device_count (' in message
        assert 'get_rng_state (a resumed run draws other random numbers)' in message
        assert "accelerator=dict(type='zeta', device_count=1)" in message
        told = get_accelerator(dict(type='zeta', device_count=1))
        assert told.device_count() == 1
        assert told.device(5) == torch.device('zeta:0')
        assert 'device_count' not in told.missing_functions()
        weight = torch.ones(2, device='zeta:0', requires_grad=True)
        weight.sum().backward()
        torch.optim.Adam([weight]).step()  # asks torch.zeta.is_available from PyTorch 2.13 on
        assert not torch.equal(weight.cpu(), torch.ones(2))
        told.set_device(told.device())
        assert told.current_device() == torch.device('zeta:0')
        probe_device(told, told.device())
    assert zeta.missing_functions().count('Event') == zeta.missing_functions().count('(')
    with pytest.raises(AcceleratorError, match='device_count=1, but torch.zeta tells 4'):
        get_accelerator(dict(type='zeta', device_count=1))
    for wrong in (0, -1, True, '2', 1.5):
        with pytest.raises(AcceleratorError, match='expected the number of devices'):
            get_accelerator(dict(type='zeta', device_count=wrong))


# cards of known names ------------------------------------------------------------------------


@there
def test_card_named_gcu_is_the_s60(gcu):
    assert type(gcu) is S60Accelerator
    assert (gcu.name, gcu.device_type) == ('gcu', 'gcu')
    assert not gcu.compilation.lazy
    assert gcu.device(1) == torch.device('gcu:1')
    assert type(get_accelerator('auto')) is S60Accelerator
    assert available_accelerators()[0] == 'gcu'
    assert "TOPS_VISIBLE_DEVICES='6,7'" in refusal(gcu, 2)
    probe_device(gcu, gcu.device(1))


@there
def test_s60_takes_its_own_backend_once_it_is_plugged_in(gcu):
    assert default_backend(gcu) == 'gloo'
    torch_dist.Backend.register_backend('eccl', lambda *args: None, devices='gcu')
    assert default_backend(gcu) == 'eccl'
    assert 'eccl' in available_backends()
    assert resolve_backend(gcu, 'eccl') == 'eccl'
    assert resolve_backend(gcu, 'auto', 'nccl') == 'eccl'
    assert resolve_backend(gcu, 'gloo') == 'staged'
    assert with_host_backend('eccl', gcu) == 'cpu:gloo,gcu:eccl'
    assert takes_tensors(gcu, 'cpu:gloo,gcu:eccl')


@there
def test_card_named_npu_has_what_is_known_of_ascend(npu):
    assert type(npu) is TorchNativeAccelerator
    assert (npu.package, npu.native_backend) == ('torch_npu', 'hccl')
    assert "ASCEND_RT_VISIBLE_DEVICES='0,1'" in refusal(npu, 2)
    probe_device(npu, npu.device(1))

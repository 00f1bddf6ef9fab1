"""DeviceGuard: where it says things happen, how it comes and goes."""

import logging
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from mmdevplug.accelerators.detection import find_registered
from mmdevplug.device_guard import DeviceGuard
from mmdevplug.device_guard.rules import lazy_types
from mmdevplug.errors import DeviceMismatchError, DevPlugError
from tests.commands import python
from tests.jobs import install_card, needs_modes
from tests.ranks import in_ranks

ONE, TWO, THREE = 'zeta:0', 'zeta:1', 'zeta:2'
#: What a card says by itself of operands of two devices.
STOCK = 'Expected all tensors to be on the same device'


class Head(nn.Module):
    """A head whose classifier may be elsewhere, with MMSegmentation's names."""

    def __init__(self):
        super().__init__()
        self.conv_seg = nn.Linear(4, 3)

    def forward(self, x):
        return self.conv_seg(x)

    def loss(self, x, labels):
        return F.cross_entropy(self(x), labels)


class Segmentor(BaseModel):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.decode_head = Head()

    def forward(self, inputs, labels=None, mode='tensor'):
        x = self.backbone(inputs)
        if mode == 'loss':
            return dict(loss=self.decode_head.loss(x, labels))
        return self.decode_head(x)


def segmentor():
    torch.manual_seed(3)
    return Segmentor()


def spread_segmentor():
    """A segmentor with the classifier on the second card."""
    model = segmentor().to(ONE)
    model.decode_head.conv_seg.to(TWO)
    return model


def refusal(function, *args, **options):
    """What a guard tells of a function."""
    with pytest.raises(DeviceMismatchError) as caught:
        with DeviceGuard(**options):
            function(*args)
    return caught.value.mismatch


def modes():
    return torch._C._len_torch_function_stack()


@pytest.mark.parametrize(
    ('options', 'named'),
    [
        (dict(policy='mvoe'), ["policy='mvoe'", "'error', 'warn' or 'move'"]),
        (dict(policy=None), ['policy=None']),
        (dict(model='resnet'), ['model is of type str', 'torch.nn.Module']),
        (dict(allow='torch.equal'), ["allow='torch.equal'", 'list of names']),
        (dict(allow=[torch.equal]), ['allow=[', 'list of names']),
    ],
)
def test_bad_arguments_are_named(options, named):
    with pytest.raises(DevPlugError) as caught:
        DeviceGuard(**options)
    for words in named:
        assert words in str(caught.value)


OLD_TORCH = """
import torch
class Mode:  # as in torch 1.12, which cannot enter it
    pass
torch.overrides.TorchFunctionMode = Mode
torch.__version__ = '1.12.1'
from mmdevplug.device_guard import DeviceGuard
from mmdevplug.errors import DevPlugError
guard = DeviceGuard('move')
try:
    guard.__enter__()
except DevPlugError as error:
    print(error)
from torch.autograd.function import BackwardCFunction
print(BackwardCFunction.apply.__module__)
"""


def test_old_torch_is_refused_on_entering():
    told = python('-c', OLD_TORCH, mmengine=False)
    error, where = told.stdout.strip().splitlines()
    assert 'torch >= 1.13' in error
    assert 'found torch 1.12.1' in error
    assert where == 'torch.autograd.function'


# whereabouts ------------------------------------------------------------------------------------


@in_ranks()
def test_module_and_line_are_named():
    install_card('zeta')
    model, x = spread_segmentor(), torch.randn(2, 4, device=ONE)
    labels = torch.tensor([0, 2], device=ONE)
    for given, path in ((model, ''), (nn.ModuleDict(dict(module=model)), 'module.'), (None, '')):
        told = refusal(model, x, model=given)
        assert told.operation == 'torch.nn.functional.linear'
        assert told.module == f'{path}decode_head.conv_seg (Linear)'
        # The lines of torch and mmengine in between are nobody's mistake.
        assert told.source.code == 'return self.conv_seg(x)'
        assert told.source.file == __file__
    # A method is told as the call of a module is.
    head = Head().to(ONE)
    model.decode_head = head
    told = refusal(lambda: head.loss(torch.randn(2, 4, device=ONE), labels.to(TWO)), model=model)
    assert told.module == 'decode_head (Head)'
    assert told.operation == 'torch.nn.functional.cross_entropy'
    assert [each.role for each in told.operands] == ['input', 'target']
    assert [each.dtype for each in told.operands] == [torch.float32, torch.int64]
    assert [each.shape for each in told.operands] == [(2, 3), (2,)]
    assert told.devices == (torch.device(ONE), torch.device(TWO))
    # What raised has left nothing behind.
    told = refusal(lambda: x + x.to(TWO), model=model)
    assert (told.module, told.backward) == ('', '')
    assert told.where().endswith('<lambda>()')
    assert [each.variable for each in told.operands] == ['x', '']
    assert 'x + x.to(TWO)' in Path(__file__).read_text().splitlines()[told.source.line - 1]


class Straying(nn.Module):
    """Mixes only when it runs again, for the backward."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.matmul(x, x if self.calls == 1 else x.detach().to(TWO))


@in_ranks()
def test_backward_is_guarded():
    install_card('zeta')
    x = torch.randn(4, 4, device=ONE, requires_grad=True)
    # Segments that are run again, whichever thread of autograd does it.
    for reentrant in (True, False):
        model = nn.Sequential(Straying())
        loss = checkpoint(model, x, use_reentrant=reentrant).sum()
        told = refusal(loss.backward)
        assert told.operation == 'torch.matmul'
        assert told.module == '0 (Straying)'
        assert bool(told.backward) == reentrant
    # Hooks of gradients.
    y = x * 2
    y.register_hook(lambda gradient: torch.matmul(gradient, torch.ones(4, 4, device=TWO)))
    told = refusal(torch.autograd.backward, [y.sum()])
    assert 'register_hook' in told.source.code
    with DeviceGuard('move') as guard:
        (gradient,) = torch.autograd.grad([(x * y).sum()], [x])
    assert guard.moved.number == 1
    assert gradient.device == torch.device(ONE)


# coming and going -------------------------------------------------------------------------------


@in_ranks()
def test_guards_nest_and_leave_nothing_behind():
    install_card('zeta')
    x, y = torch.ones(2, 2, device=ONE), torch.ones(2, 2, device=TWO)
    assert modes() == 0
    guard = DeviceGuard('move')
    with guard, guard:
        assert modes() == 1  # Once is enough.
        with DeviceGuard('error') as outer:
            pass
        torch.matmul(x, y)
    with guard:
        torch.matmul(x, y)
    assert (guard.moved.number, outer.moved.number) == (2, 0)
    # The innermost comes first: it repairs what the outer one then finds in order.
    with DeviceGuard('error'), DeviceGuard('move') as inner:
        torch.matmul(x, y)
    assert inner.moved.number == 1
    with pytest.raises(DeviceMismatchError):
        with DeviceGuard('move') as outer, DeviceGuard('error'):
            torch.matmul(x, y)
    assert outer.moved.number == 0
    original = BackwardCFunction.apply
    with DeviceGuard('move'):
        assert BackwardCFunction.apply is not original
        with pytest.raises(ZeroDivisionError), DeviceGuard('move'), DeviceGuard('warn'):
            _ = torch.matmul(x, y).sum().item() / 0
        assert BackwardCFunction.apply is not original
    assert BackwardCFunction.apply is original
    assert modes() == 0
    with pytest.raises(RuntimeError, match=STOCK):
        torch.matmul(x, y)


@in_ranks()
def test_other_threads_and_workers_are_left_alone():
    install_card('zeta')
    x, y = torch.ones(2, 2, device=ONE), torch.ones(2, 2, device=TWO)
    told = []

    def mix():
        with pytest.raises(RuntimeError, match=STOCK):
            torch.matmul(x, y)
        told.append(modes())
        with guard, pytest.raises(DeviceMismatchError):
            torch.matmul(x, y)
        told.append(modes())

    with DeviceGuard() as guard:
        thread = threading.Thread(target=mix)
        thread.start()
        thread.join()
        batches = list(
            DataLoader(
                torch.arange(8.0), batch_size=4, num_workers=1, multiprocessing_context='fork'
            )
        )
    assert told == [0, 0]  # each thread enters by itself
    assert torch.equal(torch.cat(batches), torch.arange(8.0))


@needs_modes
@pytest.mark.parametrize('policy', ['error', 'warn', 'move'])
def test_one_device_computes_the_same_bits(policy):
    def train(guard):
        model = segmentor()
        wrapper = OptimWrapper(torch.optim.AdamW(model.parameters()), clip_grad=dict(max_norm=1))
        torch.manual_seed(1)
        for _ in range(3):
            data = dict(inputs=torch.randn(4, 4), labels=torch.randint(3, (4,)))
            with guard:
                model.train_step(data, wrapper)
        return model.state_dict()

    expected, found = train(nullcontext()), train(DeviceGuard(policy))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_which_devices_are_lazy():
    find_registered('lazy')
    assert {'xla', 'lazy'} <= lazy_types()
    assert lazy_types().isdisjoint({'cpu', 'cuda', 'npu', 'privateuseone'})


@in_ranks()
def test_warnings_come_once_for_each_place():
    install_card('zeta')
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    MMLogger.get_instance('guard').addHandler(handler)
    x, y = torch.ones(2, 2, device=ONE), torch.ones(2, 2, device=TWO)
    with DeviceGuard('warn') as guard:
        for _ in range(3):
            with pytest.raises(RuntimeError, match=STOCK):
                _ = torch.matmul(x, y)
        with pytest.raises(RuntimeError, match=STOCK):
            torch.stack([x, y])
        with pytest.raises(RuntimeError, match=STOCK):
            _ = x + y
    assert [record.levelname for record in records] == ['WARNING'] * 3
    assert 'y (other): zeta:1, float32, 2x2' in records[0].getMessage()
    assert 'in: test_warnings_come_once_for_each_place()' in records[0].getMessage()
    assert 'y (tensors[1]): zeta:1' in records[1].getMessage()
    assert [count.times for count in guard.sites.values()] == [3, 1, 1]
    assert guard.moved == (0, 0, {})
    assert '5 operation(s) at 3 place(s)' in guard.report()
    assert ': _ = torch.matmul(x, y)' in guard.report()

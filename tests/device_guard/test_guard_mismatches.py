"""Operations that mix devices: what PyTorch does with them, and what the guard does.

Each runs on the CPU for the right numbers, on two devices as PyTorch leaves it, and on two devices
under a guard that reports and one that moves.
"""

import inspect
import os
import resource
import signal
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from mmdevplug.device_guard import DeviceGuard
from mmdevplug.errors import DeviceMismatchError
from tests.columns import XLA, job_of
from tests.jobs import install_card, need_card
from tests.ranks import in_ranks, run_ranks


class Case(NamedTuple):
    """An operation: its name, which operands go to the second device, and how they are called."""

    operation: str  #: The name to be reported.
    apply: Callable  #: Computes a result from operands that it asks for by name.
    elsewhere: str  #: The operands on the second device.
    roles: str  #: ``operand=role`` for those that the report shall name.
    host_index: bool = False  #: Whether PyTorch takes what is elsewhere from the CPU.


class Product(torch.autograd.Function):
    """A custom function whose forward mixes what it gets."""

    @staticmethod
    def forward(ctx, x, scale, w):
        ctx.save_for_backward(x, w)
        ctx.scale = scale
        return scale * torch.matmul(x, w)

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return (
            ctx.scale * torch.matmul(gradient, w.t()),
            None,
            ctx.scale * torch.matmul(x.t(), gradient),
        )


class Late(torch.autograd.Function):
    """A custom function that mixes in its backward alone."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x * w.to(x.device)

    @staticmethod
    def backward(ctx, gradient):
        (w,) = ctx.saved_tensors
        return torch.matmul(gradient, torch.diag(w)), None


def assign_eos(is_eos, eos_idx):
    eos_idx = eos_idx * 1
    eos_idx[is_eos.any(dim=1)] = is_eos.int().argmax(dim=1)[is_eos.any(dim=1)]
    return eos_idx


def assign_mask(x, mask):
    x = x * 1
    x[mask] = 0.5
    return x


def add_in_place(x, row):
    x = x * 1
    x += row
    return x


def add_out(x, y, out):
    with torch.no_grad():
        torch.add(x, y, out=out)
    return out


def scatter_in_place(x, index, y):
    return (x * 1).scatter_(0, index, y)


def recurrent(x, y, row, hidden):
    weights = [y, y * 2, row, row * 2]
    return torch._VF.rnn_tanh(x[:, None], hidden, weights, True, 1, 0.0, True, False, False)[0]


def foreach_add(x, y, row):
    return torch.stack(torch._foreach_add([x, row[None].repeat(4, 1)], [y, y * 2]))


def running_statistics(x, mean, variance):
    y = F.batch_norm(x, mean, variance, training=True)
    return torch.cat([y, mean[None]])


def method_where(x, y, mask):
    return x.where(mask, y)


def differentiate(x, row):
    return torch.autograd.grad(Late.apply(x, row).sum(), x)[0]


CASES: Dict[str, Case] = {
    'stack': Case(
        'torch.stack', lambda x, y: torch.stack([x, y]), 'y', 'x=tensors[0] y=tensors[1]'
    ),
    'cat': Case('torch.cat', lambda x, y: torch.cat((x, y), 1), 'y', 'x=tensors[0] y=tensors[1]'),
    'add': Case('torch.Tensor.add', lambda x, row: x + row, 'row', 'x=input row=other'),
    'iadd': Case('torch.Tensor.add_', add_in_place, 'row', 'x=input row=other'),
    'matmul': Case('torch.Tensor.matmul', lambda x, y: x @ y, 'y', 'x=input y=other'),
    'bmm with keywords': Case(
        'torch.bmm', lambda x, y: torch.bmm(input=x[None], mat2=y[None]), 'y', 'x=input y=mat2'
    ),
    'linear': Case(
        'torch.nn.functional.linear',
        lambda x, y, row: F.linear(x, y, row),
        'y row',
        'x=input y=weight row=bias',
    ),
    'conv2d': Case(
        'torch.nn.functional.conv2d',
        lambda x, y: F.conv2d(x[None, None], y[None, None], padding=1),
        'x',
        'x=input y=weight',
    ),
    'layer_norm': Case(
        'torch.nn.functional.layer_norm',
        lambda x, row: F.layer_norm(x, (4,), weight=row),
        'row',
        'x=input row=weight',
    ),
    'batch_norm': Case(
        'torch.nn.functional.batch_norm',
        running_statistics,
        'mean variance',
        'x=input mean=running_mean variance=running_var',
    ),
    'einsum': Case(
        'torch.einsum',
        lambda x, y: torch.einsum('ij,jk->ik', x, y),
        'x',
        'x=operands[0] y=operands[1]',
    ),
    'embedding': Case(
        'torch.nn.functional.embedding',
        lambda index, y: F.embedding(index, y),
        'index',
        'index=input y=weight',
    ),
    'lerp': Case('torch.lerp', lambda x, y: torch.lerp(x, y, 0.25), 'y', 'x=input y=end'),
    'where': Case(
        'torch.where',
        lambda mask, x, y: torch.where(mask, x, y),
        'mask',
        'mask=condition x=input y=other',
    ),
    'where, a method': Case(
        'torch.Tensor.where', method_where, 'y', 'x=self mask=condition y=other'
    ),
    'index_select': Case(
        'torch.index_select',
        lambda x, index: torch.index_select(x, 0, index[0]),
        'index',
        'x=input index=index',
    ),
    'gather': Case(
        'torch.Tensor.gather', lambda x, index: x.gather(0, index), 'index', 'x=input index=index'
    ),
    'scatter_': Case(
        'torch.Tensor.scatter_', scatter_in_place, 'index y', 'x=input index=index y=src'
    ),
    'index': Case(
        'torch.Tensor.__getitem__',
        lambda x, index: x[index[0], :],
        'index',
        'x=self index=index[0]',
        host_index=True,
    ),
    'mask': Case(
        'torch.Tensor.__getitem__',
        lambda x, mask: x[mask],
        'mask',
        'x=self mask=index',
        host_index=True,
    ),
    'masked assignment': Case(
        'torch.Tensor.__setitem__', assign_mask, 'mask', 'x=self mask=index', host_index=True
    ),
    'eos': Case('torch.Tensor.__setitem__', assign_eos, 'is_eos', 'eos_idx=self is_eos=index'),
    'cross_entropy': Case(
        'torch.nn.functional.cross_entropy',
        lambda x, labels, row: F.cross_entropy(x, labels, weight=row.detach().abs()),
        'row',
        'x=input labels=target row=weight',
    ),
    'mse_loss': Case(
        'torch.nn.functional.mse_loss', lambda x, y: F.mse_loss(x, y), 'y', 'x=input y=target'
    ),
    'out': Case('torch.add', add_out, 'out', 'x=input y=other out=out'),
    'recurrent': Case(
        'torch.rnn_tanh', recurrent, 'y row', 'x=input hidden=hx y=params[0] row=params[2]'
    ),
    'foreach': Case('torch._foreach_add', foreach_add, 'y', 'x=self[0] y=other[0]'),
    'forward of a function': Case(
        'torch.matmul', lambda x, y: Product.apply(x, 2.0, y), 'y', 'x=input y=other'
    ),
    'backward of a function': Case('torch.matmul', differentiate, 'row', ''),
}


def operands() -> Dict[str, torch.Tensor]:
    """All operands there are, on the CPU."""
    generator = torch.Generator().manual_seed(7)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_()

    return dict(
        x=leaf(4, 4),
        y=leaf(4, 4),
        row=leaf(4),
        hidden=torch.zeros(1, 1, 4),
        index=torch.tensor([[0, 2, 1, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 1, 2, 0]]),
        labels=torch.tensor([0, 2, 1, 3]),
        mask=torch.tensor([[True, False, True, False]] * 4),
        mean=torch.zeros(4),
        variance=torch.ones(4),
        out=torch.empty(4, 4),
        is_eos=torch.tensor([[0, 1, 0], [0, 0, 0], [1, 1, 0], [0, 0, 1]]).bool(),
        eos_idx=torch.full((4,), 3),
    )


def placed(case: Case, home: str, other: str) -> Dict[str, torch.Tensor]:
    """The operands of a case, each a leaf on its device."""
    wanted = inspect.signature(case.apply).parameters
    return {
        name: value.detach()
        .to(other if name in case.elsewhere.split() else home)
        .requires_grad_(value.requires_grad)
        for name, value in operands().items()
        if name in wanted
    }


def compute(case: Case, given: Dict[str, torch.Tensor]) -> Dict[str, Any]:
    """Result and gradients on the host, and whether those were where their leaves are."""
    result = case.apply(**given)
    if result.requires_grad:
        weights = torch.arange(1.0, result.numel() + 1).view(result.shape)
        (result * weights.to(result.device)).sum().backward()
    leaves = {name: value for name, value in given.items() if value.grad is not None}
    return dict(
        result=as_array(result),
        gradients={name: as_array(leaf.grad) for name, leaf in leaves.items()},
        at_home=all(leaf.grad.device == leaf.device for leaf in leaves.values()),
    )


def as_array(tensor: torch.Tensor) -> Any:
    """A tensor that travels between processes by value."""
    return tensor.detach().cpu().double().numpy()


def run_case(case: Case, home: str, other: str) -> Dict[str, Any]:
    """What the guard makes of a case, and the right numbers."""
    told: Dict[str, Any] = dict(expected=compute(case, placed(case, 'cpu', 'cpu')))
    given = placed(case, home, other)
    try:
        with DeviceGuard():
            compute(case, given)
    except DeviceMismatchError as error:
        mismatch = error.mismatch
        told.update(
            operation=mismatch.operation,
            roles={each.role: str(each.device) for each in mismatch.operands},
            source=mismatch.source.code,
            file=mismatch.source.file,
            where=mismatch.where(),
            message=str(error),
        )
    guard = DeviceGuard('move')
    with guard:
        told['found'] = compute(case, placed(case, home, other))
    told['moved'] = (guard.moved.number, guard.moved.bytes)
    return told


def stock_outcome(case: Case, home: str, other: str, first: Callable[[], Any]) -> str:
    """What PyTorch does by itself, in a process of its own; ``'silent'`` if as on the CPU."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            torch.set_num_threads(1)  # PyTorch's pool of threads does not survive a fork.
            first()
            expected = compute(case, placed(case, 'cpu', 'cpu'))['result']
            found = as_array(case.apply(**placed(case, home, other)))
            told = 'silent' if abs(found - expected).max() < 1e-4 else 'wrong'
        except BaseException as error:
            told = 'raises' if 'same device' in str(error) else repr(error)
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    return told or signal.Signals(os.WTERMSIG(status)).name


def touch(kind: str) -> None:
    """Start the runtime of torch_xla, which does not survive a fork."""
    if kind == 'xla':
        torch.zeros(1, device='xla:1').cpu()


def run_cases(kind: str) -> Dict[str, Dict[str, Any]]:
    """All cases on two devices of a kind, and on a device and the CPU."""
    install_card(kind)
    home, other = f'{kind}:0', f'{kind}:1'
    stock = {
        name: stock_outcome(case, home, other, lambda: touch(kind)) for name, case in CASES.items()
    }
    touch(kind)
    return {
        name: dict(
            stock=stock[name],
            apart=run_case(case, home, other),
            beside_host=run_case(case, home, 'cpu'),
        )
        for name, case in CASES.items()
    }


def check_report(name: str, told: Dict[str, Any], home: str, other: str) -> None:
    """That a guard under ``error`` names what an operation got."""
    case = CASES[name]
    assert told['operation'] == case.operation
    for pair in case.roles.split():
        operand, role = pair.split('=')
        assert told['roles'][role] == (other if operand in case.elsewhere.split() else home)
        assert role in told['message']
    assert told['file'] == __file__
    assert told['source'] in Path(__file__).read_text()
    assert told['source'] in told['message']


def check_moves(told: Dict[str, Any], number: int = 1) -> None:
    """That a guard under ``move`` gives the CPU's numbers, each gradient where it belongs."""
    expected, found = told['expected'], told['found']
    assert abs(found['result'] - expected['result']).max() < 1e-5
    assert found['gradients'].keys() == expected['gradients'].keys()
    for leaf, gradient in expected['gradients'].items():
        # Some are sums of large values, and compilers differ in how they compute tanh.
        scale = max(1.0, abs(gradient).max())
        assert abs(found['gradients'][leaf] - gradient).max() < 1e-5 * scale, leaf
    assert found['at_home']
    assert told['moved'][0] >= number
    assert (told['moved'][1] > 0) == (number > 0)


def check_beside_host(name: str, told: Dict[str, Any], home: str) -> None:
    """That operands on the CPU are told too, unless PyTorch takes them from there."""
    if CASES[name].host_index:
        assert 'operation' not in told
        assert told['moved'][0] == 0
        check_moves(told, number=0)
        return
    check_report(name, told, home, 'cpu')
    check_moves(told)


@lru_cache(maxsize=None)
def told_of(accelerator: str) -> Dict[str, Dict[str, Any]]:
    return run_ranks(run_cases, 0, accelerator, **job_of(accelerator, 0))[0]


#: Most operations on two devices of torch_xla abort the process. It replaces ``out``, and PyTorch
#: looks at the weights of recurrent layers first.
ON_XLA = {'out': 'silent', 'recurrent': 'raises'}


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('accelerator', ['zeta', XLA])
def test_two_devices(accelerator, name):
    told = told_of(accelerator)[name]
    assert told['stock'] == ('raises' if accelerator == 'zeta' else ON_XLA.get(name, 'SIGABRT'))
    check_report(name, told['apart'], f'{accelerator}:0', f'{accelerator}:1')
    check_moves(told['apart'])


@pytest.mark.parametrize('name', ['matmul', 'gather', 'eos', 'cross_entropy'])
@in_ranks()
def test_a_card_that_computes_on_in_silence(name):
    need_card()
    import card

    card.install('zeta', variant=card.Variant(falls_back=True))
    case, devices = CASES[name], ('zeta:0', 'zeta:1')
    stock, told = stock_outcome(case, *devices, lambda: None), run_case(case, *devices)
    assert stock == 'silent'
    check_report(name, told, 'zeta:0', 'zeta:1')
    check_moves(told)


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('accelerator', ['zeta', XLA])
def test_device_and_host(accelerator, name):
    check_beside_host(name, told_of(accelerator)[name]['beside_host'], f'{accelerator}:0')

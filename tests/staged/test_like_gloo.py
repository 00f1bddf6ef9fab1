"""What programs do with gloo beyond plain collectives: the same calls give the same values."""

import pytest
import torch
from torch import distributed as torch_dist, nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run_ranks

from .test_collectives import on_host, pytestmark, start  # noqa: F401


def under_changed_defaults(where):
    """Buffers of the group are on the host, of the tensor's type."""
    torch.set_default_device(where)
    torch.set_default_dtype(torch.float64)
    small, large = torch.ones(3), torch.ones(1 << 18)
    torch_dist.all_reduce(small)
    torch_dist.all_reduce(large, async_op=True).wait()
    torch_dist.all_reduce_coalesced([small, large])
    halves = torch.ones(3, dtype=torch.float16)
    torch_dist.all_reduce(halves)
    objects = [None] * 2
    torch_dist.all_gather_object(objects, torch_dist.get_rank())
    model = DistributedDataParallel(nn.Linear(512, 512))  # 2 MB
    model(torch.ones(1, 512)).sum().backward()
    gradient = model.module.weight.grad[0, :2]
    return [small, large[:2], halves, torch.tensor(objects), gradient]


def in_inference_mode(where):
    """Sums that nobody waits for in this mode, and their futures."""
    with torch.inference_mode():
        small, large = torch.ones(3, device=where), torch.ones(1 << 19, device=where)
        future = torch_dist.all_reduce(small, async_op=True).get_future()
        work = torch_dist.all_reduce(large, async_op=True)
    future.wait()
    work.wait()
    return [small, large[:2]]


def twice_in_one_call(where):
    """A tensor that is there twice is added up once."""
    tensor = torch.ones(3, device=where)
    torch_dist.all_reduce_coalesced([tensor, tensor])
    return [tensor]


def what_futures_hold(where):
    """The tensors of a rank each, in one list."""
    parts = [torch.zeros(2, device=where) for _ in range(2)]
    own = torch.full((2,), torch_dist.get_rank() + 1.0, device=where)
    gathered = torch_dist.all_gather(parts, own, async_op=True).get_future().wait()
    summed = torch_dist.all_reduce(own, async_op=True).get_future().wait()
    return [*gathered, *summed]


def join_with_those_that_are_left(where):
    """Gradients are divided by the ranks that still train."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(5, 3, bias=False).to(where))
    found = []
    with model.join(divide_by_initial_world_size=False):
        for _ in range(2 + 2 * torch_dist.get_rank()):
            model(torch.ones(1, 5, device=where)).sum().backward()
            found.append(model.module.weight.grad.clone())
            model.zero_grad()
    return found


PROGRAMS = (
    in_inference_mode,
    twice_in_one_call,
    what_futures_hold,
    join_with_those_that_are_left,
    under_changed_defaults,  # last: the defaults stay
)


def run_all(device):
    where = start(device, timeout=20)
    return {program.__name__: on_host(program(where)) for program in PROGRAMS}


@pytest.mark.parametrize('device', ['cpu', 'zeta', 'streams'])
def test_programs_find_what_they_find_with_gloo(device):
    expected = run_ranks(run_all, 2, 'gloo')
    for values, of_gloo in zip(run_ranks(run_all, 2, device), expected):
        assert values.keys() == of_gloo.keys()
        for name, tensors in values.items():
            assert len(tensors) == len(of_gloo[name]), name
            for one, other in zip(tensors, of_gloo[name]):
                torch.testing.assert_close(one, other, msg=lambda told, name=name: name + told)

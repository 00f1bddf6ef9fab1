"""A gathered batch is what the stacked pool is, however samples travel."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from mmengine.structures import InstanceData

from mmdevplug.errors import SampleError
from mmdevplug.samples import gather_samples, stack_samples
from mmdevplug.samples.structures import describe_samples
from tests.columns import CUDA, NATIVE, device_of
from tests.jobs import start
from tests.ranks import in_ranks, run_ranks

from .values import Answer, Rollout, bits


def floats(n):
    return [0.1 + n, -0.0, float('nan'), float('inf'), 1e300, 5e-324][n % 6]


#: Samples by their number in the pool.
BY_NUMBER = dict(
    small=lambda n: dict(x=torch.tensor([n / 3]), reward=n / 8),
    plain=lambda n: dict(f=floats(n), i=n - 2**63, b=n % 2 == 0, s=f'é{n}', y=b'\0' * n, n=None),
    number=floats,
    integer=lambda n: 2**63 - 1 - n,
    text=str,
    nothing=lambda n: None,
    empty=lambda n: {},
    tensor=lambda n: torch.tensor(n),
    nested=lambda n: dict(
        a=dict(b=(torch.ones(2, 3) * n, n)), c=Answer(str(n), n / 2), d=Rollout('p', [n, {}])
    ),
    ordered=lambda n: OrderedDict(b=n, a=[torch.zeros(0, 4), (n, n > 1)]),
    dtypes=lambda n: [torch.full((2,), n).to(t) for t in (torch.half, torch.bool, torch.int8)],
    strided=lambda n: torch.arange(6.0).view(2, 3).t() * n,
    gradients=lambda n: dict(x=torch.nn.Parameter(torch.ones(2) * n), y=n),
    negated=lambda n: torch.tensor([1 + 2j, 3 - 4j * n]).conj().imag,
    wide=lambda n: dict(x=torch.full((1 << 15,), float(n)), y=n / 2),
    big=lambda n: dict(x=torch.ones(1), y=str(2**70 + n), z=[n, n]),
    kinds=lambda n: dict(x=n if n % 2 else n / 2),
    order=lambda n: dict(a=n, b=1) if n % 2 else dict(b=1, a=n),
    array=lambda n: dict(x=np.full((2,), n), y=np.float32(n)),
    element=lambda n: InstanceData(x=torch.arange(n)),
    complex=lambda n: torch.tensor([n + 1j]).conj(),
    large=lambda n: torch.full((1 << 17,), float(n)),
    shapes=lambda n: dict(x=torch.zeros(1 + n % 2), y=n),
    optional=lambda n: dict(x=None if n % 2 else n),
    lengths=lambda n: [torch.zeros(1)] * (n % 3),
)
#: Alike on each rank, but not on all: by the rank and the number.
BY_RANK = dict(
    kind=lambda rank, n: dict(x=float(n) if rank else n),
    shape=lambda rank, n: dict(x=torch.zeros(1 + rank)),
    none=lambda rank, n: dict(x=None if rank else torch.zeros(1)),
    keys=lambda rank, n: dict(a=n, b=1) if rank else dict(b=1, a=n),
)
MAKERS = {
    **{name: (lambda rank, n, make=make: make(n)) for name, make in BY_NUMBER.items()},
    **BY_RANK,
}
COUNTS = [(2, 2, 2), (5, 0, 1), (0, 0, 3)]
CANNOT_BE_STACKED = ('shapes', 'optional', 'lengths', 'shape', 'none')


def outcome(function):
    """The bits of a result, or its error."""
    try:
        return bits(function())
    except SampleError as error:
        return 'SampleError', str(error)


def compare(name, counts, rank=0):
    """Gather and stack samples of a kind at once, and one after the other: both outcomes."""
    begin = sum(counts[:rank])
    mine = [MAKERS[name](rank, n) for n in range(begin, begin + counts[rank])]
    return (
        outcome(lambda: gather_samples(mine, stacked=True)),
        outcome(lambda: stack_samples(gather_samples(mine), 'cpu')),
    )


def compare_in_job():
    rank = start().env.rank
    found = {}
    for name in MAKERS:
        many = (1, 30 if name == 'large' else 300, 2)  # of half a megabyte each
        found[name] = [compare(name, counts, rank) for counts in [*COUNTS, many]]
    nobody = outcome(lambda: gather_samples([], stacked=True))
    with pytest.raises(SampleError, match='a # for stacked=True'):
        gather_samples([1], stacked=rank == 1)
    # Nothing is left of what was refused.
    return found, nobody, gather_samples([rank], stacked=True).tolist()


@pytest.fixture(scope='module')
def compared():
    return run_ranks(compare_in_job, 3)


@pytest.mark.parametrize('name', MAKERS)
def test_a_batch_is_the_stacked_pool_to_the_last_bit(compared, name):
    outcomes = [found[name] for found, _, _ in compared]
    assert outcomes[0] == outcomes[1] == outcomes[2]
    for stacked, expected in outcomes[0]:
        assert stacked == expected
        assert stacked[0] != 'SampleError' or name in CANNOT_BE_STACKED


def test_ranks_without_samples_and_without_agreement(compared):
    for _, nobody, again in compared:
        assert nobody == ('SampleError', 'stack_samples() got no samples; expected at least one.')
        assert again == [0, 1, 2]


@pytest.mark.parametrize('name', MAKERS)
def test_a_single_process_stacks_too(name):
    stacked, expected = compare(name, [3])
    assert stacked == expected


def test_keys_that_are_equal_but_of_another_type_are_refused():
    with pytest.raises(SampleError, match='sample 1 is a dict with the key'):
        describe_samples([dict(x=0), {np.str_('x'): 0}])


def test_the_default_dtype_is_that_of_stacked_numbers():
    torch.set_default_dtype(torch.float64)
    try:
        assert gather_samples([0.1], stacked=True).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize('accelerator', ['zeta', NATIVE, CUDA])
@in_ranks(2)
def test_the_batch_is_on_the_device_of_the_receiver(accelerator):
    context = start(accelerator)
    rank = context.env.rank
    mine = [dict(x=torch.ones(2).to(context.device) * n, y=n / 2) for n in range(2 + rank)]
    batch = gather_samples(mine, stacked=True)
    at_home = gather_samples(mine, stacked=True, device='cpu')
    device = device_of(accelerator, rank, 2)
    assert {str(each.device) for each in batch.values()} == {device}
    assert {str(each.device) for each in at_home.values()} == {'cpu'}
    assert batch['x'].cpu()[:, 1].tolist() == [0.0, 1.0, 0.0, 1.0, 2.0]
    assert batch['y'].cpu().tolist() == [0.0, 0.5, 0.0, 0.5, 1.0]

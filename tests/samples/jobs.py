"""What ranks do in the tests of sample exchange."""

import hashlib
import os

import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import distributed as torch_dist

from mmdevplug.distributed.byte_exchange import gather_json
from mmdevplug.errors import SampleError
from mmdevplug.samples import balance_samples, gather_samples, stack_samples
from mmdevplug.utils.pytree import tensors_in
from tests.jobs import start

from .values import Answer, Rollout, bits, pools

#: The same draws on every rank, and so the same exchanges in the same order.
IN_STEP = dict(
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def all_agree(truth, group=None):
    """Whether something is true of all ranks; so all of them go on, or fail, together."""
    agreed = torch.tensor([int(truth)])
    torch_dist.all_reduce(agreed, op=torch_dist.ReduceOp.MIN, group=group)
    return bool(agreed)


def fingerprint(samples):
    return hashlib.sha256(repr(bits(samples)).encode(errors='surrogatepass')).hexdigest()


def batch_of(function):
    """The bits of a batch, or why there is none; None for an error of PyTorch."""
    try:
        return bits(function())
    except SampleError as error:
        return str(error)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return None


def exchange_in_groups(largest, examples):
    """Check the properties of pools in groups of 1 to ``largest`` ranks."""
    context = start()
    checked = {}
    for size in range(1, largest + 1):
        # The last ranks of the job, so that ranks of a group are not those of the job.
        members = list(range(largest - size, largest))
        group = torch_dist.new_group(members) if size < largest else None
        if context.env.rank in members:
            checked[size] = check_properties(
                members.index(context.env.rank), size, group, examples
            )
        torch_dist.barrier()
    return checked


def check_properties(rank, size, group, examples):
    """Pool and slices of any samples, however they are spread over ranks."""
    seen = []

    @settings(max_examples=examples, **IN_STEP)
    @given(st.data(), st.booleans(), st.integers(0, 3))
    def check(data, same_kind, wanted):
        held = data.draw(pools(size, same_kind=same_kind))
        expected = [sample for samples in held for sample in samples]
        options = dict(device='cpu', same_structure=same_kind)
        pool = gather_samples(held[rank], group, **options)
        same = bits(pool) == bits(expected)
        # Once more with what the ranks say themselves.
        same = same and len(set(gather_json(fingerprint(pool), group))) == 1
        assert all_agree(same, group), 'the pool is not that of all ranks in their order'

        expected_batch = batch_of(lambda: stack_samples(pool, 'cpu'))
        # Every rank knows whether PyTorch would raise an error of its own.
        if expected_batch is not None:
            found = batch_of(lambda: gather_samples(held[rank], group, stacked=True, **options))
            assert all_agree(found == expected_batch, group), 'the batch is not the stacked pool'

        mine = balance_samples(held[rank], group=group, **options)
        slices = gather_samples([mine], group, same_structure=False)
        sizes = [len(each) for each in slices]
        same = bits([sample for each in slices for sample in each]) == bits(expected)
        even = max(sizes) - min(sizes) <= 1
        assert all_agree(same and even, group), f'slices of {sizes}'

        per_rank = min(wanted, len(expected) // size)
        mine, surplus = balance_samples(held[rank], per_rank, group=group, **options)
        used = per_rank * size
        first = sum(map(len, held[:rank]))
        left = held[rank][max(0, used - first) :]
        same = bits(mine) == bits(expected[rank * per_rank : (rank + 1) * per_rank])
        assert all_agree(same and bits(surplus) == bits(left), group), 'an exact slice is wrong'
        seen.append(len(expected))

    check()
    return len(seen), sum(seen)


def sample_of(rank, number, device):
    """A sample that says where it comes from."""
    return dict(
        image=torch.full((2, 3), 10.0 * rank + number).to(device),
        # Large enough to travel by itself, in several pieces.
        large=torch.full((256, 300), 10.0 * rank + number).t().to(device),
        mask=torch.tensor([True, False]).to(device),
        half=torch.arange(number, dtype=torch.bfloat16).to(device),
        empty=torch.empty(0, 4).to(device),
        answer=Answer(f'{rank}/{number}', torch.tensor(number).to(device)),
        rollout=Rollout('é', [rank, number]),
        none=None,
    )


def exchange_on(accelerator, per_rank):
    """Exchange samples that lie on this rank's device, and tell where and whether all arrived."""
    context = start(accelerator)
    rank, size = context.env.rank, context.env.world_size
    held = [[sample_of(r, n, 'cpu') for n in range(per_rank[r])] for r in range(size)]
    expected = [sample for samples in held for sample in samples]
    own = [sample_of(rank, number, context.device) for number in range(per_rank[rank])]
    pool = gather_samples(own)
    mine = balance_samples(own)
    slices = gather_samples([mine], device='cpu')
    batch = stack_samples([sample['image'] for sample in pool], context.device)
    return dict(
        devices=sorted({str(tensor.device) for tensor in tensors_in([pool, mine, batch])}),
        own_stayed=all(
            one is another
            for sample, arrived in zip(own, pool[sum(per_rank[:rank]) :])
            for one, another in zip(tensors_in(sample), tensors_in(arrived))
        ),
        pool=bits(pool) == bits(expected),
        slices=bits([sample for each in slices for sample in each]) == bits(expected),
        batch=batch.cpu()[:, 0, 0].tolist(),
        sizes=[len(each) for each in slices],
        device=str(context.device),
        pid=os.getpid(),
    )

"""Samples between lazy devices: each arrives on the receiver's, for one execution an exchange."""

import pytest
import torch

from tests.jobs import start
from tests.ranks import run_ranks
from tests.samples.jobs import exchange_on
from tests.samples.test_exchange import check_found
from tests.xla.executions import counts
from tests.xla.t20 import T20, with_calls

pytestmark = pytest.mark.xla


def test_eight_cards_of_a_t20():
    per_rank = [1, 0, 3, 1, 0, 2, 2, 0]
    results = run_ranks(with_calls, 8, exchange_on, 'gcu', per_rank, timeout=280, **T20)
    for rank, (found, calls) in enumerate(results):
        check_found(found, rank, per_rank)
        assert found['device'] == f'xla:{rank}'
        assert found['sizes'] == [2] + [1] * 7
        # The pool and the slices; a rank without samples has nothing to run.
        assert calls['unlazy'] >= (2 if per_rank[rank] else 0)


def executions(first, others):
    from mmdevplug.samples import balance_samples, gather_samples, stack_samples

    context = start('xla')
    rank, device = context.env.rank, context.device

    def count(function):
        context.accelerator.synchronize(device)
        before = counts()
        result = function()
        return result, [b - a for a, b in zip(before, counts())]

    def rollouts(number):
        """Recorded, and not computed yet."""
        drawn = torch.arange(8.0, device=device) * (rank + 1)
        return [dict(x=drawn * n, y=(drawn + n).sum(), name=str(n)) for n in range(number)]

    seen, held = [], others if rank else first
    for _ in range(3):
        # Recorded inside, so that nothing has computed them before.
        pool, gathered = count(lambda: gather_samples(rollouts(held)))
        mine, balanced = count(lambda: balance_samples(rollouts(held)))
        batch, stacked = count(lambda mine=mine: stack_samples(mine, device))
        whole, at_once = count(lambda: gather_samples(rollouts(held), stacked=True))
        assert at_once[0] == (held > 0)
        assert whole['y'].cpu().tolist() == [float(each['y']) for each in pool]
        seen.append((gathered, balanced, stacked))
    return seen, [float(each['y']) for each in pool], batch['y'].cpu().tolist()


def test_an_exchange_is_one_execution_and_compiles_nothing_new():
    found = run_ranks(executions, 2, 2, 4, environ=dict(CPU_NUM_DEVICES='2'))
    expected = [28.0 * 1 + 8 * n for n in range(2)] + [28.0 * 2 + 8 * n for n in range(4)]
    for rank, (seen, pool, batch) in enumerate(found):
        assert pool == expected
        assert batch == expected[3 * rank : 3 * rank + 3]
        for gathered, balanced, _ in seen:
            assert gathered[0] == 1
            # Rank 0 sends nothing, so what it keeps stays to be computed with what follows.
            assert balanced[0] == rank
        for gathered, balanced, stacked in seen[1:]:
            assert gathered[1] == balanced[1] == stacked[1] == 0


def test_samples_for_several_ranks_are_one_execution():
    found = run_ranks(executions, 3, 6, 0, environ=dict(CPU_NUM_DEVICES='3'))
    for rank, (seen, pool, batch) in enumerate(found):
        assert pool == [28.0 + 8 * n for n in range(6)]
        assert batch == pool[2 * rank : 2 * rank + 2]
        for _, balanced, _ in seen:
            assert balanced[0] == (rank == 0)

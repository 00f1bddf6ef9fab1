"""Losses of detectors on the host, behind a network on a card of the stand-in."""

import pytest

from tests.columns import job_of
from tests.ranks import run_ranks
from tests.t20.conftest import ON_T20
from tests.xla.loss_jobs import (
    batch,
    largest_difference,
    train_detector,
    trained_detector,
    two_stage_detector,
)

pytestmark = [*ON_T20, pytest.mark.timeout(600)]


def train_on_both(stages):
    import t20_card
    import torch_gcu

    def counts():
        stats = t20_card.card.stats(torch_gcu.current_device())
        return sum(stats['executions'].values()), stats['compilations']

    config = trained_detector('RetinaHead') if stages == 1 else two_stage_detector()
    batches = [batch(number) for number in range(8 if stages == 1 else 5)]
    host = train_detector('cpu', config, batches, counts=lambda: (0, 0))
    return host, train_detector('gcu', config, batches, counts=counts)


@pytest.mark.operators
@pytest.mark.parametrize(('stages', 'executions'), [(1, 4), (2, 8)])
def test_few_executions_and_the_losses_of_the_host(torch_gcu, stages, executions):
    ((host, card),) = run_ranks(train_on_both, 0, stages, **job_of('gcu'))
    assert largest_difference(host, card) <= 1e-4
    assert max(card['executions'][2:]) <= executions
    assert not any(card['compilations'][2:])

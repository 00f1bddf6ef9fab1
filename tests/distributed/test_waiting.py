"""Waiting for other ranks: missing ranks are named, and nobody waits for ever."""

import os
import time
from datetime import timedelta

import pytest
from torch import distributed as torch_dist

from mmdevplug import init_device
from mmdevplug.distributed.process_group import to_timeout
from mmdevplug.distributed.waiting import run_on_main, wait_for_everyone
from mmdevplug.errors import LaunchError, RankFailedError
from mmdevplug.fault_tolerance import failure, failure_watch
from mmdevplug.fault_tolerance.failure import enter_phase
from mmdevplug.fault_tolerance.store_barrier import wait_until
from tests.jobs import torch_before
from tests.ranks import check_errors, errors_of_ranks, in_ranks, run_ranks


def start(timeout=60):
    init_device('pytorch', 'cpu', timeout=timeout)
    return int(os.environ['RANK'])


@in_ranks(3)
def test_only_rank_0_runs_and_all_get_the_result():
    rank, called = start(), []
    for number in (1, 2, 3):
        found = run_on_main('counting', lambda: called.append(rank) or dict(n=len(called)))
        assert found == dict(n=number)
    wait_for_everyone('the end')
    wait_for_everyone('counting')
    assert called == ([] if rank else [0] * 3)


@in_ranks(3)
def test_waiting_in_every_iteration_leaves_nothing_more_in_the_store():
    rank, order, keys = start(), [], []
    store, _ = failure.current_job()
    if torch_before('1.12.0'):
        time.sleep(5)  # until two beats have made the keys of their numbers
    for turn in range(20):
        if rank == turn % 3:
            store.set('order', str(turn))
            time.sleep(0.01)  # whoever does not wait reads what was there before
        wait_for_everyone('a turn')
        order.append(int(store.get('order')))
        wait_for_everyone('the next one')
        keys.append(store.num_keys())
    assert order == list(range(20))
    # What heartbeats and the first turn need is there by then.
    assert keys[-1] - keys[4] <= (10 if torch_before('1.12.0') else 2)


def test_a_single_process_waits_for_nobody():
    wait_for_everyone('nothing')
    assert run_on_main('counting', lambda: (1, 2)) == (1, 2)
    with pytest.raises(ZeroDivisionError):
        run_on_main('dividing', lambda: 1 / 0)


def wait_for_rank_2():
    """The lines that ranks print; rank 2 goes on when another one has."""
    rank, messages = start(), []
    store, _ = failure.current_job()

    def say(text, *_):
        messages.append(text)
        store.set('said', '1')

    failure_watch.REPORT_SECONDS, failure_watch.say = 2.0, say
    enter_phase('data preparation')
    if rank == 2:
        store.wait(['said'])
    wait_for_everyone('first batch')
    return messages


def test_a_rank_that_waits_says_for_whom():
    messages = run_ranks(wait_for_rank_2, 3)
    assert messages.pop(2) == []
    lines = ' '.join(messages[0] + messages[1])
    assert "ranks 0, 1 in 'first batch: waiting for the others' at " in lines
    assert "rank 2 in 'data preparation' at test_waiting.py:" in lines


@in_ranks(3, together=True)
def test_a_timeout_names_the_missing_rank_on_all():
    rank = start()
    enter_phase('reading annotations')
    if rank == 1:
        time.sleep(8)
    with pytest.raises(RankFailedError) as raised:
        wait_for_everyone('data preparation', timeout=timedelta(seconds=3))
    said = str(raised.value)
    assert 'because of rank 1 of 3' in said
    assert "in 'reading annotations'" in said
    assert "missing after 3 s at 'data preparation'" in said
    assert 'env_cfg.dist_cfg.timeout' in said


@in_ranks(2)
def test_a_wait_that_timed_out_leaves_the_store_usable():
    """Rank 0 stops waiting for a counter, which changes just after."""
    rank = start()
    store, _ = failure.current_job()
    store.set(f'value/{rank}', f'of rank {rank}')
    wait_for_everyone('values')
    if rank == 0:
        reached = wait_until(lambda: store.add('late', 0) > 0, 1.0)
        store.add('given up', 1)
    else:
        reached = wait_until(lambda: store.add('given up', 0) > 0, 30.0)
        store.add('late', 1)
    values = [store.get(f'value/{each}').decode() for each in range(2)]
    wait_for_everyone('the end')
    assert reached == (rank == 1)
    assert values == ['of rank 0', 'of rank 1']
    assert store.add('late', 0) == 1


def fail_on_main():
    start()
    run_on_main('saving epoch_1.pth', lambda: os.stat('/nowhere/epoch_1.pth').st_size)


def test_an_error_of_rank_0_ends_all():
    errors = errors_of_ranks(fail_on_main, 3, together=True)
    assert errors.pop(0)[0] == 'FileNotFoundError'
    assert sorted(errors) == [1, 2]
    words = ('rank 0 of 3 on host', 'FileNotFoundError')
    failed = "1 of 3 ranks failed in 'saving epoch_1.pth':"
    check_errors(errors, 'RankFailedError', failed, *words)


def die_while_others_wait(dying):
    rank = start()
    enter_phase('data preparation')
    store, _ = failure.current_job()
    while failure.current_watch().heartbeat.read(dying).phase != 'data preparation':
        time.sleep(0.1)
    store.add('phase is known', 1)
    if rank == dying:
        assert wait_until(lambda: store.add('phase is known', 0) == 3, 60.0)
        os._exit(9)
    wait_for_everyone('first batch')


@pytest.mark.parametrize('dying', [0, 1])
def test_a_rank_that_dies_while_others_wait(dying):
    errors = errors_of_ranks(die_while_others_wait, 3, dying, together=True)
    assert errors.pop(dying)[0] == 'Died'
    check_errors(errors, 'RankFailedError', f'because of rank {dying} of 3')
    if dying == 0:  # with the store, so that its neighbour alone says where it was
        del errors[1]
    check_errors(errors, 'RankFailedError', "in 'data preparation'")


@in_ranks(2)
def test_under_a_process_group_that_is_not_ours():
    torch_dist.init_process_group('gloo', timeout=timedelta(seconds=60))
    wait_for_everyone('first batch')
    found = run_on_main('counting', lambda: [1, 2])
    torch_dist.barrier()
    assert found == [1, 2]


def test_an_infinite_timeout_is_a_long_one():
    assert to_timeout(float('inf')) > timedelta(days=10000)


@in_ranks(2, together=True)
def test_a_timeout_that_is_none():
    start()
    with pytest.raises(LaunchError, match='timeout=-1'):
        wait_for_everyone('first batch', timeout=-1)

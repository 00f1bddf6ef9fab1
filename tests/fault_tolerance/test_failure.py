"""When one rank is wrong, all ranks end, and every message names that rank."""

import itertools
import json
import os
import re
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from mmengine.registry import RUNNERS
from torch import distributed as torch_dist

from mmdevplug import init_device
from mmdevplug.accelerators import CPUAccelerator
from mmdevplug.distributed.waiting import wait_for_everyone
from mmdevplug.fault_tolerance import failure_watch
from mmdevplug.fault_tolerance.failure import current_watch, fail_together
from mmdevplug.fault_tolerance.host_events import HostEvents
from mmdevplug.fault_tolerance.stop_together import StopAgreement
from tests.cli.running import config
from tests.commands import CLI, environment, run
from tests.jobs import PLAIN, digits_config, install_card
from tests.ranks import (
    AGENT,
    check_errors,
    errors_of_ranks,
    free_port,
    in_ranks,
    launch_variables,
    run_ranks,
)


def init(timeout=30, **options):
    context = init_device('pytorch', 'cpu', timeout=timeout, **options)
    return context.backend, str(context.device), os.environ.get('GLOO_SOCKET_IFNAME')


def test_process_group_on_the_loopback_interface():
    assert run_ranks(init, 2) == [('gloo', 'cpu', 'lo')] * 2


def init_where_rank_1_has_another_name(rank_1):
    return init_device('pytorch', rank_1 if os.environ['RANK'] == '1' else 'cpu', timeout=30)


def test_one_rank_without_its_device_ends_all_with_its_name():
    errors = errors_of_ranks(init_where_rank_1_has_another_name, 3, 'npu')
    assert sorted(errors) == [0, 1, 2]
    check_errors({1: errors.pop(1)}, 'AcceleratorError', 'torch_npu')
    check_errors(errors, 'RankFailedError', '1 of 3 ranks failed', 'rank 1 of 3', 'torch_npu')


def init_with_broken_card_on_rank_1():
    broken = CPUAccelerator()
    broken.copies.to_host = lambda tensors: [tensor * float('nan') for tensor in tensors]
    return init_device('pytorch', broken if os.environ['RANK'] == '1' else 'cpu', timeout=30)


def test_a_device_that_computes_wrongly_is_found_before_training():
    errors = errors_of_ranks(init_with_broken_card_on_rank_1, 2)
    assert 'differs from the CPU' in errors[1][1]
    assert 'rank 1 of 2' in errors[0][1]


@pytest.mark.parametrize(
    ('variable', 'value'),
    [('LOCAL_RANK', None), ('LOCAL_RANK', 'two'), ('RANK', '7'), ('WORLD_SIZE', '0')],
)
def test_bad_launch_variables_name_themselves(variable, value):
    errors = errors_of_ranks(init, 1, environ={variable: value})
    check_errors(errors, 'LaunchError', variable)


def test_where_ranks_meet_is_the_launchers_business():
    # MMEngine passes on what a config says, and this is what is the default in any case.
    started = run_ranks(partial(init, init_method='env://'), 2)
    assert [backend for backend, _, _ in started] == ['gloo', 'gloo']
    for options in (dict(init_method='tcp://10.0.0.1:29500'), dict(rank=0)):
        ((key, value),) = options.items()
        errors = errors_of_ranks(partial(init, **options), 2, together=True)
        assert sorted(errors) == [0, 1]
        check_errors(errors, 'LaunchError')
        told = f'env_cfg.dist_cfg.{key}={value!r}: '
        assert all(message.startswith(told) for _, message in errors.values())


def train(accelerator, work_dir, change):
    """Train with a function in place of the model's forward, which makes it of that."""
    install_card(accelerator)
    cfg = digits_config(accelerator, work_dir, **PLAIN)
    cfg.env_cfg = dict(dist_cfg=dict(timeout=60))
    runner = RUNNERS.build(cfg)
    model = runner.model.module
    model.forward = change(model.forward)
    runner.train()


def raise_at_third(rank, forward):
    numbers = itertools.count(1)

    def call(*args, **kwargs):
        if next(numbers) == 3 and torch_dist.get_rank() == rank:
            raise ValueError('the third batch is bad')
        return forward(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ('accelerator', 'bad_rank'), [('cpu', 1), ('cpu', 0), ('zeta', 1), ('zeta', 0)]
)
def test_an_error_in_forward_names_its_rank_on_all_ranks(tmp_path, accelerator, bad_rank):
    change = partial(raise_at_third, bad_rank)
    errors = errors_of_ranks(train, 3, accelerator, tmp_path, change, timeout=120)
    assert sorted(errors) == [0, 1, 2]
    assert errors.pop(bad_rank) == ('ValueError', 'the third batch is bad')
    check_errors(errors, 'RankFailedError', f'rank {bad_rank} of 3', 'the third batch is bad')


def detach_losses(forward):
    def call(*args, **kwargs):
        return {name: loss.detach() for name, loss in forward(*args, **kwargs).items()}

    return call


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
def test_a_loss_that_reaches_no_parameter(tmp_path, accelerator):
    errors = errors_of_ranks(train, 2, accelerator, tmp_path, detach_losses)
    check_errors(errors, 'ModelError', 'loss.requires_grad is False')


def die_without_a_word():
    init(timeout=60)
    with fail_together('training'):
        if torch_dist.get_rank() == 1:
            os._exit(9)
        torch_dist.all_reduce(torch.ones(1))


def test_a_killed_rank_is_no_riddle():
    errors = errors_of_ranks(die_without_a_word, 2)
    words = ('rank 1 of 2', 'the process is gone and left no message')
    check_errors({0: errors[0]}, 'RankFailedError', *words)


LEAVES = """
import os, sys, torch
from mmdevplug import init_device
from mmdevplug.fault_tolerance.failure import fail_together
init_device('pytorch', 'cpu', timeout=60)
with fail_together('training'):
    if os.environ['RANK'] == '1':
        sys.exit(0)
    torch.distributed.all_reduce(torch.ones(1))
"""


def test_a_rank_that_leaves_by_itself_was_not_killed():
    """As a hook that ends training early, and asks one rank alone."""
    port = free_port()

    def start(rank):
        variables = launch_variables(rank, 2, port)
        return run(sys.executable, '-c', LEAVES, env=environment(**variables))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(start, range(2))
    assert (first.returncode, second.returncode) == (1, 0), first.stderr + second.stderr
    assert 'stops because of rank 1 of 2' in first.stderr
    assert 'it ended while the others went on' in first.stderr
    assert 'was killed' not in first.stderr


def fail_and_go_on():
    failure_watch.GRACE_SECONDS = 1.0  # the others fail, too, and read no report
    init()
    with pytest.raises(ValueError, match='everywhere'), fail_together('a test'):
        raise ValueError('everywhere')
    with fail_together('a test'):
        total = torch.ones(1)
        torch_dist.all_reduce(total)
    return total.item()


def variables_of(agent, max_restarts):
    """What torchrun sets for workers that use its store."""
    port, restarts = str(agent.port), str(max_restarts)
    return dict(AGENT, MASTER_PORT=port, TORCHELASTIC_MAX_RESTARTS=restarts)


def init_twice():
    first = init()
    torch_dist.destroy_process_group()
    assert first == init()


def test_a_second_process_group_over_the_same_launch(tmp_path):
    # As under torchrun, whose store outlives the process group of its workers.
    agent = torch_dist.TCPStore('127.0.0.1', 0, is_master=True)
    run_ranks(init_twice, 2, environ=variables_of(agent, max_restarts=0))


def test_restarts_that_torchrun_does_not_count():
    # Hosts that join or leave restart all ranks under the same count and over the same store.
    agent = torch_dist.TCPStore('127.0.0.1', 0, is_master=True)
    environ = variables_of(agent, max_restarts=3)
    for world_size in (2, 4, 2):
        found = run_ranks(fail_and_go_on, world_size, environ=environ)
        assert found == [world_size] * world_size


@in_ranks(2)
def test_a_failure_of_all_ranks_is_forgotten_when_the_process_goes_on():
    """Fail everywhere, rank 1 later than rank 0; then not at all, on rank 1 alone, not at all."""
    rank = int(os.environ['RANK'])
    init_device('pytorch', 'cpu', timeout=30)
    seen = []
    for attempt, failing in enumerate([(0, 1), (), (1,), ()]):
        try:
            with fail_together(f'attempt {attempt}'):
                if rank in failing:
                    if failing == (0, 1):
                        time.sleep(2 * rank)
                    raise ValueError(f'of rank {rank}')
                wait_for_everyone(f'end of attempt {attempt}')
                total = torch.ones(1)
                torch_dist.all_reduce(total)
                seen.append(total.item())
        except Exception as error:
            seen.append(f'{type(error).__name__}: {error}')
    everywhere, total, of_rank_1, last = seen
    assert everywhere == f'ValueError: of rank {rank}'
    assert total == last == 2.0
    if rank == 1:
        assert of_rank_1 == 'ValueError: of rank 1'
    else:
        assert 'rank 1 of 2' in of_rank_1
        assert 'failed in attempt 2: ValueError: of rank 1' in of_rank_1


def start_and_fail():
    with fail_together('the job'):
        init()
        if os.environ['RANK'] == '1':
            raise ValueError('of rank 1')
        wait_for_everyone('the end')


def test_a_failure_after_the_start_inside_one_context_is_reported():
    errors = errors_of_ranks(start_and_fail, 2, together=True)
    assert errors[1] == ('ValueError', 'of rank 1')
    assert 'failed in the job: ValueError: of rank 1' in errors[0][1]


@in_ranks(2)
def test_a_failure_is_noted_for_torchrun_before_the_others_know_it(tmp_path):
    """The first that ends makes torchrun end the rest, this rank among them."""
    init()
    note = tmp_path / f'{os.environ["RANK"]}.json'
    os.environ.update(TORCHELASTIC_RUN_ID='a job', TORCHELASTIC_ERROR_FILE=str(note))
    watch, found = current_watch(), []
    report = watch.report

    def note_then_report(*args):
        found.append(json.loads(note.read_text()))
        return report(*args)

    watch.report = note_then_report
    with pytest.raises(ValueError, match='of all ranks'), fail_together('the job'):
        raise ValueError('of all ranks')
    with fail_together('the next job'):
        found.append(note.exists())
    note, after = found
    assert note['message'] == 'ValueError: of all ranks'
    assert not note['because_of_another']
    assert not after


class Watch:
    """What a stop agreement asks of the watch of a rank."""

    def __init__(self, store, rank=0, world_size=1):
        self.watch_store, self.events = store, HostEvents(store, '', 0)
        self.env = types.SimpleNamespace(rank=rank, world_size=world_size)
        self.trainings = 0

    def begin_training(self, stop):
        self.trainings += 1
        stop.keys = f'stop/{self.trainings}'


def test_a_stop_agreement_uses_the_keys_of_its_training():
    store = torch_dist.HashStore()
    watch = Watch(store)
    first, second = StopAgreement(watch), StopAgreement(watch)
    second.request('a test')
    second.publish()
    for each in (first, second):
        each.read()
        each.reached(7, 1)
    assert (first.why, second.why) == (None, 'a test')
    assert [store.add(f'stop/{number}/published', 0) for number in (1, 2)] == [0, 1]


def test_a_stop_comes_after_the_iteration_of_the_rank_that_is_ahead():
    store = torch_dist.HashStore()
    ahead, behind = (StopAgreement(Watch(store, rank, 2)) for rank in (0, 1))
    behind.request('a test')
    behind.publish()
    ahead.read()
    behind.read()
    assert not ahead.reached(7, 2)
    assert not behind.reached(6, 2)
    assert not ahead.reached(8, 2)
    assert ahead.iteration == behind.iteration == 7 + StopAgreement.MARGIN + 2
    assert behind.reached(behind.iteration, 2)


def train_under_torchrun(folder, **accident):
    """Exit status and output of ``mmdevplug train --nproc 3`` in which rank 1 has an accident."""
    accident = dict(dict(type='Accident', rank=1, iteration=7, pause=0.2), **accident)
    lines = f'custom_hooks = [{accident!r}]'
    path = config(folder, lines, ['tests.fault_tolerance.accidents'])
    done = run(*CLI, 'train', path, '--nproc', 3, '--work-dir', folder / 'work')
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
def test_torchrun_shows_one_message_with_the_name_of_a_killed_rank(tmp_path):
    status, output = train_under_torchrun(tmp_path, what='kill')
    assert status != 0
    assert 'Traceback' not in output
    assert output.count('because of rank 1 of 3 on host') == 1
    assert "in 'train: " in output
    # One line of each rank that is left.
    assert 1 <= output.count('RankFailedError') <= 2


@pytest.mark.long
@pytest.mark.parametrize(('moment', 'rank'), [('before_save_checkpoint', 0), ('after_run', 1)])
def test_the_last_line_names_the_rank_that_failed(tmp_path, moment, rank):
    """It waits until the others have read its report, so another rank ends first."""
    accident = dict(what='raise', when=moment, rank=rank, pause=0.0)
    status, output = train_under_torchrun(tmp_path, **accident)
    assert status == 1
    last = output.strip().splitlines()[-1]
    assert re.match(rf'mmdevplug: rank {rank}.* failed: ValueError: the seventh', last)

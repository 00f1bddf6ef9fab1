"""Ranks that wait for others: where each rank is, and which ones are missing."""

import os
import re
import sys
import threading
import time
import traceback

import pytest
import torch
from torch import distributed as torch_dist, nn

from mmdevplug import init_device
from mmdevplug.distributed import process_group
from mmdevplug.fault_tolerance import failure_watch
from mmdevplug.fault_tolerance.failure import enter_phase, fail_together
from mmdevplug.fault_tolerance.heartbeat import list_numbers
from mmdevplug.fault_tolerance.stack_place import describe_error, describe_stack
from mmdevplug.model.norm_layers import convert_norm_layers
from mmdevplug.samples import gather_samples
from tests.ranks import check_errors, errors_of_ranks, in_ranks, run_ranks


class Probe(nn.Module):
    """Notes where its thread is, as another thread sees it, and fails."""

    def forward(self, inputs):
        self.seen = []
        own = threading.get_ident()

        def look():
            stack = list(traceback.walk_stack(sys._current_frames()[own]))
            self.seen += [describe_stack(stack, detail) for detail in (True, False)]

        looking = threading.Thread(target=look)
        looking.start()
        looking.join()
        raise RuntimeError('lost')


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, inputs):
        return self.module(inputs)


def test_a_layer_has_the_name_that_the_model_knows():
    probe = Probe()
    model = nn.Sequential(nn.Sequential(nn.ReLU(), probe))
    with pytest.raises(RuntimeError, match='lost') as failed:
        Wrapper(model)(torch.ones(1))
    in_detail, plain = probe.seen
    for text in (in_detail, describe_error(failed.value)):
        assert text.startswith("layer '0.1', test_places.py:")
        assert text.endswith(' in forward')
    assert plain.startswith('test_places.py:')


class Unready(Probe):
    """Is looked at before it has modules, and answers no questions."""

    def __init__(self):
        self.forward(None)

    def __getattr__(self, name):
        raise KeyError(name)


class Growing(Probe):
    def named_modules(self, *args, **kwargs):
        raise RuntimeError('OrderedDict mutated during iteration')


def test_a_module_that_is_being_made_is_in_a_place_without_a_layer():
    unready = Unready.__new__(Unready)
    with pytest.raises(RuntimeError, match='lost') as failed:
        unready.__init__()
    growing = Growing()
    with pytest.raises(RuntimeError, match='lost'):
        growing(torch.ones(1))
    for text in (describe_error(failed.value), *vars(unready)['seen'], *growing.seen):
        assert text.startswith('test_places.py:')


def test_numbers_of_ranks():
    assert list_numbers([3]) == 'rank 3'
    assert list_numbers([4, 0, 2, 3]) == 'ranks 0, 2-4'
    assert list_numbers([0, 1, 5, 6]) == 'ranks 0, 1, 5, 6'


def pass_over_a_layer():
    context = init_device('pytorch', 'cpu', timeout=5)
    head = nn.Sequential(nn.Conv2d(3, 2, 1), nn.SyncBatchNorm(2))
    net = convert_norm_layers(nn.Sequential(head), context.accelerator, context.device)
    enter_phase('train: iteration 3')
    with fail_together('training'):
        if torch_dist.get_rank() != 1:
            net(torch.ones(2, 3, 4, 4))
        torch_dist.all_reduce(torch.ones(1))


def test_ranks_in_different_collectives_say_where_each_is():
    errors = errors_of_ranks(pass_over_a_layer, 3, together=True)
    assert sorted(errors) == [0, 1, 2]
    check_errors(
        errors,
        'RankFailedError',
        "ranks 0, 2 in 'train: iteration 3' at all_gather, layer '0.1', test_pl",
        "rank 1 in 'train: iteration 3' at all_reduce, test_places.py:",
    )
    assert not any('network' in message for _, message in errors.values())


def start(timeout):
    init_device('pytorch', 'cpu', timeout=timeout)


def test_a_start_names_the_ranks_that_are_missing():
    environ = dict(WORLD_SIZE='4', LOCAL_WORLD_SIZE='4')
    errors = errors_of_ranks(start, 2, 4, environ=environ, together=True)
    missing = 'rank 2 of 4 (which has not started); rank 3 of 4 (which has not'
    check_errors(errors, 'RankFailedError', missing)


def gather_late():
    """The lines that ranks print while rank 1 does something else."""
    said = []
    failure_watch.say = said.append
    failure_watch.REPORT_SECONDS = 2.0
    init_device('pytorch', 'cpu', timeout=60)
    enter_phase('sampling')
    rank = torch_dist.get_rank()
    assert gather_samples([rank]) == [0, 1, 2]
    if rank == 1:
        time.sleep(9)
    assert gather_samples([rank]) == [0, 1, 2]
    return said


def test_gathering_samples_says_for_whom_it_waits():
    first, late, last = run_ranks(gather_late, 3)
    assert not late
    said = ' '.join(first + last)
    assert "ranks 0, 2 in 'sampling' at gather_samples, test_places.py:" in said
    assert "rank 1 in 'sampling' at test_places.py:" in said


@in_ranks(2)
def test_a_rank_that_comes_before_the_store_says_so():
    said, first = [], int(os.environ['RANK']) == 0
    process_group.say, process_group.REPORT_SECONDS = said.append, 2.0
    if first:
        time.sleep(7)
    start(60)
    text = r'rank 1 of 2 .* has waited \d+ s for the store at 127.0.0.1:'
    assert said == [] if first else re.match(text, said[0])

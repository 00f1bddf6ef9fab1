"""Long work shows that it goes on; short work prints nothing, and no thread is left."""

import threading
import time

import pytest
import torch

from mmdevplug.accelerators import XLAAccelerator
from mmdevplug.accelerators.lazy import FIRST_GRAPHS
from mmdevplug.checkpoint.writing import write_checkpoint
from mmdevplug.utils import progress
from mmdevplug.utils.progress import show_progress
from tests.commands import wait_until


@pytest.fixture
def quick(monkeypatch):
    """The first line after a twentieth of a second."""
    monkeypatch.setattr(progress, 'IN_LOG', (0.05, 0.1))


def threads():
    return [each for each in threading.enumerate() if each.name == 'mmdevplug-progress']


def test_lines_come_while_the_work_lasts_and_no_longer(quick):
    lines = []
    with show_progress('planning a model', lines.append):
        assert len(threads()) == 1
        wait_until(lambda: len(lines) >= 2, 20)
    assert not threads()
    told = len(lines)
    time.sleep(0.25)
    assert len(lines) == told
    assert lines[0] == 'planning a model, 0 s so far'


def test_short_work_prints_nothing(capfd):
    with show_progress('planning a model'):
        pass
    assert capfd.readouterr() == ('', '')
    assert not threads()


def test_an_error_ends_the_lines(quick):
    with pytest.raises(ValueError, match='no plan'), show_progress('planning', lambda line: None):
        raise ValueError('no plan')
    assert not threads()


def test_ranks_but_the_first_are_silent(quick, monkeypatch):
    for name, value in dict(is_initialized=True, get_rank=1).items():
        monkeypatch.setattr(f'torch.distributed.{name}', lambda value=value: value)
    with show_progress('writing', pytest.fail):
        assert not threads()
        time.sleep(0.2)


def test_a_checkpoint_that_takes_long_says_how_large_it_is(quick, monkeypatch, tmp_path):
    lines = []
    monkeypatch.setattr(progress, 'write_log', lines.append)
    save = torch.save

    def slow_save(*args, **kwargs):
        wait_until(lambda: lines, 20)
        save(*args, **kwargs)

    monkeypatch.setattr(torch, 'save', slow_save)
    path = tmp_path / 'iter_1.pth'
    write_checkpoint(dict(state_dict=dict(weight=torch.zeros(1 << 20))), str(path))
    assert lines[0] == f'writing 4.00 MiB to {path}, 0 s so far'
    assert path.is_file()


@pytest.mark.xla
def test_first_graphs_of_a_lazy_device(quick, monkeypatch):
    import torch_xla

    lines, calls = [], []
    monkeypatch.setattr(progress, 'write_log', lines.append)

    def slow_sync():
        calls.append(threads())
        if len(calls) == 1:
            wait_until(lambda: lines, 20)

    accelerator = XLAAccelerator()
    assert accelerator.is_available()
    accelerator.set_device(accelerator.device())
    monkeypatch.setattr(torch_xla, 'sync', slow_sync)
    for _ in range(FIRST_GRAPHS + 1):
        accelerator.compilation.materialize()
    assert lines[0] == 'compiling the first graphs, 0 s so far'
    assert [len(found) for found in calls] == [1] * FIRST_GRAPHS + [0]

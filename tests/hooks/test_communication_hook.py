"""The communication monitor: figures in every log line, a table and a picture at the end."""

import json

import pytest

from mmdevplug.distributed.traffic import Cost, Traffic, all_reduce_bytes
from mmdevplug.hooks import communication_hook
from mmdevplug.hooks.communication_hook import MOST_POINTS, History
from tests.jobs import PLAIN, train_digits
from tests.ranks import run_ranks


def train(accelerator, work_dir, **options):
    from tests import preloaded  # here, for the ranks alone

    communication_hook.draw = preloaded.draw
    visualizer = dict(
        type='Visualizer',
        vis_backends=[dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')],
    )
    found = train_digits(
        accelerator,
        work_dir,
        **PLAIN,
        visualizer=visualizer,
        default_hooks__logger__interval=1,
        log_processor=dict(window_size=1),
        **options,
    )
    return sum(array.size for array in found['weights'].values())


def scalars(work_dir):
    (path,) = work_dir.glob('*/vis_data/scalars.json')
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if 'loss' in line]


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
def test_every_iteration_is_logged_and_drawn(accelerator, tmp_path):
    size, _ = run_ranks(train, 2, accelerator, tmp_path)
    lines = scalars(tmp_path)
    assert len(lines) == 22
    for line in lines:
        assert line['comm/mb'] == pytest.approx(all_reduce_bytes(4 * size, 2) / 2**20, rel=1e-6)
        assert line['comm/ms'] > 0
        assert 0 <= line['comm/overlap'] <= 1
    (log,) = tmp_path.glob('*/*.log')
    text = log.read_text()
    assert text.count('comm/overlap: ') == 22
    assert 'Communication, mean of 22 iterations' in text
    (picture,) = tmp_path.glob('*/communication.png')
    assert picture.read_bytes().startswith(b'\x89PNG')
    assert f'Communication drawn in {picture}' in text


def test_tensorboard_has_it_too(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    size, _ = run_ranks(train, 2, 'cpu', tmp_path)
    (events,) = tmp_path.glob('*/vis_data/events*')
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    values = [event.value for event in accumulator.Scalars('comm/mb')]
    assert len(values) == 22
    assert values[0] == pytest.approx(all_reduce_bytes(4 * size, 2) / 2**20, rel=1e-5)


def unmonitored(work_dir):
    return train('cpu', work_dir, accelerator__monitor=False)


def test_it_can_be_left_out(tmp_path):
    run_ranks(unmonitored, 2, tmp_path)
    assert not any('comm/mb' in line for line in scalars(tmp_path))
    assert not list(tmp_path.glob('*/communication.png'))


def test_a_single_process_has_nothing_to_tell(tmp_path):
    run_ranks(train, 0, 'cpu', tmp_path)
    assert not any('comm/mb' in line for line in scalars(tmp_path))


def test_costs_add_up_by_kind():
    traffic = Traffic()
    traffic.record('gradients', sent=100, seconds=2.0, waited=0.5)
    traffic.record('gradients', sent=50, seconds=2.0, waited=0.5, messages=3)
    traffic.record('sync_bn', seconds=1.0, waited=1.0)
    costs = traffic.take()
    assert costs['gradients'] == Cost(messages=4, sent=150, seconds=4.0, waited=1.0)
    assert costs['gradients'].overlap == 0.75
    assert costs['sync_bn'].overlap == 0
    assert traffic.take() == {}
    assert Cost().overlap == 0


def test_a_long_history_takes_little_memory_and_keeps_its_means():
    history = History()
    count = 3 * MOST_POINTS
    for step in range(count):
        history.append(dict(iteration=step, hidden=1.0, waited=2.0, sent=3.0, shared=0.0))
    assert len(history.points['sent']) < MOST_POINTS
    assert history.every == 4
    assert history.means()['iteration'] == pytest.approx((count - 1) / 2)
    points = history.points['iteration']
    assert points == sorted(points)
    assert sum(points) / len(points) == pytest.approx((count - 1) / 2, rel=1e-3)

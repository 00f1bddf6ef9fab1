"""Results of metrics on their way to rank 0: through the process group, in little memory."""

import os
import tracemalloc
from collections import namedtuple

import numpy as np
import pytest
import torch
from mmengine import dist
from mmengine.structures import InstanceData

from mmdevplug import init_device, patch_mmengine
from mmdevplug.accelerators import to_device
from mmdevplug.distributed import gather_results
from mmdevplug.errors import DevPlugError, SampleError
from mmdevplug.fault_tolerance.failure import fail_together
from mmdevplug.patches.metric_results import patch_video_metrics
from tests.columns import CUDA, NATIVE, XLA, backend_of
from tests.jobs import install_card
from tests.ranks import in_ranks

Pair = namedtuple('Pair', 'scores label')


class Thing:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value


def start(accelerator, folder):
    """Begin a job in a folder that no other rank has; return the device and the rank."""
    install_card(accelerator)
    context = init_device('pytorch', accelerator, forced_backend=backend_of(accelerator))
    patch_mmengine(accelerator)
    place = folder / str(context.env.rank)
    place.mkdir()
    os.chdir(place)
    return context.device, context.env.rank


def results_of(rank, device):
    """Some more on rank 1; None, as MMEngine leaves it out."""
    return [
        dict(index=index, thing=Thing(rank), text='é' * index, pair=Pair(None, {rank}))
        if index != 2
        else None
        for index in range(4 + rank)
    ] + [InstanceData(boxes=torch.full((2, 4), float(rank), device=device))]


def describe(collected):
    """What rank 0 has got; the order as rank and index."""
    if collected is None:
        return None
    dicts = [each for each in collected if isinstance(each, dict)]
    boxes = [each.boxes for each in collected if isinstance(each, InstanceData)]
    return dict(
        order=[(each['thing'].value, each['index']) for each in dicts],
        same=all(each == results_of(each['thing'].value, 'cpu')[each['index']] for each in dicts),
        boxes=[(each.device.type, each.mean().item()) for each in boxes],
    )


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta', NATIVE, XLA, CUDA])
@in_ranks(2)
def test_rank_0_gets_what_mmengine_gives_it_without_a_folder(accelerator, tmp_path):
    mmengines = dist.dist.collect_results_cpu
    device, rank = start(accelerator, tmp_path)
    results = results_of(rank, device)
    # The last names a folder that nobody can write to.
    ways = dict(cpu=('cpu', None), gpu=('gpu', None), folder=('cpu', '/proc/nowhere'))
    found = {name: describe(dist.collect_results(results, 9, *way)) for name, way in ways.items()}
    own = mmengines(to_device(results, 'cpu'), 9, str(tmp_path / 'shared'))
    found['mmengine'] = describe(own)
    one = dist.collect_results([rank], 1, 'cpu')
    uneven = dist.collect_results([[]] if rank else [], 4, 'gpu')
    assert os.listdir() == []
    if rank == 1:
        assert [*found.values(), one, uneven] == [None] * 6
        return
    assert (one, uneven) == ([0], [[]])
    assert found['cpu'] == found['gpu'] == found['folder'] == found['mmengine']
    assert found['cpu']['same']
    assert found['cpu']['order'] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 3), (1, 3), (1, 4)]
    assert found['cpu']['boxes'][:1] == [('cpu', 0.0)]
    assert found['cpu']['boxes'][1] == ('cpu', 1.0)


@pytest.mark.operators
@in_ranks(2)
def test_metrics_of_videos_need_no_folder(tmp_path):
    pytest.importorskip('mmdet')
    from mmdet.evaluation.metrics.base_video_metric import collect_tracking_results

    _, rank = start('cpu', tmp_path)
    patch_video_metrics()
    collected = collect_tracking_results([rank, None] * (rank + 1))
    assert collected == (None if rank else [0, None, 1, None, 1, None])
    assert os.listdir() == []


CHUNK = 1 << 20


@in_ranks(2)
def test_no_more_than_a_chunk_is_in_flight(tmp_path):
    """Collect 60 MB in pieces: masks as arrays, as tensors and as bytes, and one large result."""
    _, rank = start('cpu', tmp_path)
    gather_results.CHUNK_BYTES = CHUNK
    sizes = []
    exchange = gather_results.exchange_bytes

    def counted(outgoing, sources):
        sizes.extend(data.numel() for data in outgoing.values())
        return exchange(outgoing, sources)

    gather_results.exchange_bytes = counted
    mask = np.zeros((100, 1000), bool)
    results = [
        dict(masks=mask.copy(), tensor=torch.zeros(100, 1000).bool(), rle=bytes([index]) * 100_000)
        for index in range(200)
    ]
    dist.barrier()
    tracemalloc.start()
    collected = dist.collect_results(results, 400, 'cpu')
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    if rank == 0:
        assert len(collected) == 400
        assert sizes == []
        return
    assert collected is None
    assert sum(sizes) > 60e6
    assert len(sizes) > 40
    assert max(sizes) < 1.5 * CHUNK
    assert peak < 6 * CHUNK


@in_ranks(2, together=True)
def test_a_rank_says_what_it_cannot_send(tmp_path):
    _, rank = start('cpu', tmp_path)
    results = [1, (each for each in 'ab')] if rank == 1 else [1, 2]
    said = 'rank 1: result 1 of 2 that a metric keeps, of type generator, cannot be sent to rank 0'
    with pytest.raises(SampleError if rank == 1 else DevPlugError, match=said) as raised:
        with fail_together('val'):
            dist.collect_results(results, 6, 'cpu')
    assert 'cannot pickle' in str(raised.value)

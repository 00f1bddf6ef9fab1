"""Resuming in data that know their place themselves: streams, and torchdata's loader."""

import pytest
from mmengine.dist import get_rank, get_world_size
from mmengine.registry import DATASETS
from torch.utils.data import IterableDataset

from tests.checkpoint.resuming import differences
from tests.checkpoint.training import NoisyDataset, loader
from tests.ranks import run_ranks

#: Of all ranks; a batch has 4 samples on each, and 5 batches are a pass.
PER_RANK = 20


@DATASETS.register_module()
class StatefulStream(IterableDataset):
    """Samples of this rank, one after another; noise of all three generators is added."""

    def __init__(self, endless=False):
        self.samples = NoisyDataset(indices=PER_RANK * get_world_size())
        self.endless = endless
        self.place = 0

    def __iter__(self):
        while self.place < PER_RANK or self.endless:
            index = self.place % PER_RANK * get_world_size() + get_rank()
            self.place += 1
            yield self.samples[index]
        self.place = 0

    def __len__(self):
        return PER_RANK

    def state_dict(self):
        return dict(place=self.place)

    def load_state_dict(self, state):
        self.place = state['place']


def of_stream(by_epoch, **arguments):
    stream = dict(type='StatefulStream', **arguments)
    return dict(by_epoch=by_epoch, train_dataloader=loader(sampler=None, dataset=stream))


STREAMS = dict(
    epochs=of_stream(True), iterations=of_stream(False), endless=of_stream(False, endless=True)
)


def differences_of(name, folder):
    return differences(folder, STREAMS[name])


@pytest.mark.parametrize('ranks', [0, 2])
@pytest.mark.parametrize('name', STREAMS)
def test_a_stream_goes_on_exactly(name, ranks, tmp_path):
    assert {*run_ranks(differences_of, ranks, name, tmp_path)} == {None}


@pytest.fixture
def torchdata(monkeypatch):
    """Have runners build the loaders of torchdata."""
    stateful = pytest.importorskip('torchdata.stateful_dataloader').StatefulDataLoader
    monkeypatch.setattr('mmengine.runner.runner.DataLoader', stateful)


@pytest.mark.parametrize('by_epoch', [True, False])
def test_the_loader_of_torchdata_goes_on_exactly(by_epoch, torchdata, tmp_path):
    assert differences(tmp_path, dict(by_epoch=by_epoch)) is None


def test_the_loader_of_torchdata_with_workers_reads_the_same_samples(torchdata, tmp_path):
    found = differences(tmp_path, dict(by_epoch=True, train_dataloader__num_workers=2))
    assert found is None or ': losses' in found, 'random numbers of workers may differ'

"""What is refused before workers of data loaders start."""

import os
import tempfile
from multiprocessing.connection import Listener

import pytest
import torch
from torch.utils.data import TensorDataset

from mmdevplug.data.checking import LONGEST_TEMPORARY_FOLDER
from mmdevplug.errors import LaunchError
from mmdevplug.runner import DeviceRunner


def load(workers):
    loader = DeviceRunner.build_dataloader(
        dict(
            dataset=TensorDataset(torch.arange(4.0)),
            sampler=dict(type='DefaultSampler', shuffle=False),
            batch_size=2,
            num_workers=workers,
            collate_fn=dict(type='default_collate'),
        )
    )
    return torch.cat([batch[0] for batch in loader]).tolist()


@pytest.fixture
def folder_of(monkeypatch):
    """``folder_of(length)``: make a folder for temporary files whose path has ``length`` bytes."""
    with tempfile.TemporaryDirectory(dir='/tmp') as base:

        def make(length):
            folder = f'{base}/'.ljust(length, 'x')
            os.mkdir(folder)
            monkeypatch.setattr(tempfile, 'tempdir', folder)
            return folder

        yield make


def test_the_longest_folder_has_room_for_sockets(folder_of):
    folder_of(LONGEST_TEMPORARY_FOLDER)
    assert load(workers=1) == [0, 1, 2, 3]


def test_a_longer_folder_is_refused_for_workers_alone(folder_of):
    folder = folder_of(LONGEST_TEMPORARY_FOLDER + 1)
    assert load(workers=0) == [0, 1, 2, 3]
    with pytest.raises(LaunchError) as error:
        load(workers=1)
    assert f'TMPDIR={folder!r} has 76 bytes' in str(error.value)
    with pytest.raises(OSError, match='path too long'):
        Listener(f'{folder}/pymp-12345678/listener-12345678', family='AF_UNIX')

"""What several files of these tests begin with."""

import pytest
import torch


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Holds one interrupted training for each config that a case begins with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path_factory.mktemp('before')
    torch.set_num_threads(threads)

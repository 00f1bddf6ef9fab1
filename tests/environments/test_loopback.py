"""The store of a job that stays on one host."""

import socket
from typing import List

import pytest
from torch import distributed as torch_dist

from mmdevplug.environments import loopback
from mmdevplug.errors import LaunchError
from tests.ranks import free_port

Socket = socket.socket


class AskedBeforeItCloses(Socket):
    """A socket to which another rank tries to connect right before it is closed."""

    answers: List[int] = []

    def close(self):
        if self.fileno() >= 0:
            with Socket() as early:
                self.answers.append(early.connect_ex(self.getsockname()))
        super().close()


class OlderStore:
    def __init__(self):
        """Of a PyTorch that takes no socket: TCPStore(host_name, port)."""


def test_a_rank_that_comes_early_is_not_cut_off(monkeypatch):
    """PyTorch 1.10's store ends a rank whose connection is reset, and waits for one to connect."""
    monkeypatch.setattr(torch_dist, 'TCPStore', OlderStore)
    monkeypatch.setattr(loopback.socket, 'socket', AskedBeforeItCloses)
    monkeypatch.setattr(AskedBeforeItCloses, 'answers', [])
    port = free_port()
    assert loopback.loopback_store(port) == (port, None)
    assert AskedBeforeItCloses.answers
    assert 0 not in AskedBeforeItCloses.answers


@pytest.mark.parametrize('older', [False, True])
def test_a_port_that_another_job_listens_on_is_refused(monkeypatch, older):
    if older:
        monkeypatch.setattr(torch_dist, 'TCPStore', OlderStore)
    with socket.socket() as other:
        other.bind(('127.0.0.1', 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=f'MASTER_PORT={port}: rank 0 cannot listen on'):
            loopback.loopback_store(port)

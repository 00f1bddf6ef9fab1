"""Texts in PyTorch's store, by its own way and by that for releases before 1.12."""

import threading
from datetime import timedelta

import pytest
from torch import distributed as torch_dist

from mmdevplug.utils import torch_compat
from mmdevplug.utils.torch_compat import get_text, set_text


@pytest.fixture(params=['this', 'before 1.12'])
def store(request, monkeypatch):
    """A store and a second connection to it."""
    if request.param != 'this':
        monkeypatch.setattr(torch_compat, 'GETS_BYTES_SAFELY', False)
    master = torch_dist.TCPStore('127.0.0.1', 0, 1, True, timedelta(seconds=20))
    other = torch_dist.TCPStore('127.0.0.1', master.port, 1, False, timedelta(seconds=20))
    return torch_dist.PrefixStore('here', master), torch_dist.PrefixStore('here', other)


@pytest.mark.parametrize(
    'text', ['', 'x', '1234567', '12345678', 'é\x00' * 9, '{"who": "rank 3"}' * 100]
)
def test_a_text_is_read_as_it_was_written(store, text):
    writer, reader = store
    for written in ('the first, which is longer' * 3, 'second', text):
        set_text(writer, 'key', written)
        assert get_text(reader, 'key') == written


def test_a_reader_waits_for_an_announced_text(store):
    writer, reader = store
    found = []
    thread = threading.Thread(target=lambda: found.append(get_text(reader, 'late')))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    set_text(writer, 'late', 'here')
    thread.join(20)
    assert found == ['here']


def test_a_reader_never_sees_two_texts_mixed(store):
    writer, reader = store
    texts = {letter * length for letter, length in zip('abcdefgh', range(20, 180, 20))}
    set_text(writer, 'key', 'a' * 20)
    ended = threading.Event()

    def write():
        for _ in range(20):
            for text in texts:
                set_text(writer, 'key', text)
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = {get_text(reader, 'key')}
    while not ended.is_set():
        seen.add(get_text(reader, 'key'))
    thread.join()
    assert seen <= texts

"""Commands that start no ranks."""

import pytest

from tests.cli.starting import NoRanks


@pytest.fixture
def started(monkeypatch):
    return NoRanks(monkeypatch)

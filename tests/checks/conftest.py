"""Processes of checks that are forked where PyTorch has been imported."""

import multiprocessing
import os
from types import SimpleNamespace

import pytest

from mmdevplug.checks import isolated
from tests.ranks import start_process


class Forked:
    """Stands in for a process that starts a new Python."""

    def __init__(self, target, args):
        self.given = dict(os.environ), target, args

    def start(self):
        self.process = start_process(call, *self.given, mmengine=False)

    def __getattr__(self, name):
        return getattr(self.process, name)


def call(environ, target, args):
    os.environ.clear()
    os.environ.update(environ)
    target(*args)


@pytest.fixture
def forked_checks(monkeypatch):
    """Spare checks the seconds of a new Python; test_versions.py starts them as users do."""
    context = SimpleNamespace(Process=Forked)
    forking = SimpleNamespace(Pipe=multiprocessing.Pipe, get_context=lambda method: context)
    monkeypatch.setattr(isolated, 'multiprocessing', forking)

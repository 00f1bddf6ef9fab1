"""Which tests run where, and in which environment."""

import os

import pytest


@pytest.fixture(autouse=True)
def _environment_as_before():
    """Put variables back, such as those that a process group exports."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


def pytest_collection_modifyitems(config, items):
    """Without ``-m``, leave out what needs a GPU or torch_xla; with it, run what was asked for."""
    if config.getoption('-m'):
        return
    for item in items:
        for marker in ('cuda', 'xla'):
            if marker in item.keywords:
                item.add_marker(pytest.mark.skip(reason=f'run it with pytest -m {marker}'))

"""Which tests run where."""

import pytest


def pytest_collection_modifyitems(config, items):
    """Without ``-m``, leave out what needs a GPU or torch_xla; with it, run what was asked for."""
    if config.getoption('-m'):
        return
    for item in items:
        for marker in ('cuda', 'xla'):
            if marker in item.keywords:
                item.add_marker(pytest.mark.skip(reason=f'run it with pytest -m {marker}'))

"""The conformance suite on TorchTPU's released package."""

import json

import pytest

from tests.tpu.test_tpu import command

pytestmark = pytest.mark.tpu

#: Others fail by faults of the package or of XLA's plugin for the CPU: see docs/en/torch_xla.md.
CHECKS = ['copies', 'random numbers', 'device guard', 'collectives']


def test_passes_where_the_package_is_right(tmp_path):
    path = tmp_path / 'results.json'
    done = command(
        *('conformance', '--accelerator', 'tpu', '--json', path, '--checks', *CHECKS),
        *('--cfg-options', 'accelerator.backend=gloo'),
    )
    assert path.is_file(), done.stderr[-4000:]
    found = {row['section']: row['level'] for row in json.loads(path.read_text())['findings']}
    assert found == dict.fromkeys(['detection', *CHECKS], 'passed'), done.stdout
    assert done.returncode == 0

"""Installing leaves the vendor's torch, numpy and mmcv alone, with every extra."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.jobs import ROOT
from tests.t20.conftest import MISSING

pytestmark = [
    pytest.mark.t20,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.timeout(600),
]

#: What the vendor's container brings, or is built against.
VENDORS = {'torch', 'numpy', 'mmcv', 'mmcv-lite', 'protobuf', 'setuptools', 'mmengine'}

#: Extras that need a later PyTorch, and the package that pip refuses on Python 3.8.
REFUSED = {'xla': 'torch==2.9.0', 'llama': 'peft'}


def extras():
    """The extras of ``setup.py``, read without running it."""
    import ast

    for node in ast.parse((ROOT / 'setup.py').read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == 'EXTRAS_REQUIRE':
            return sorted(ast.literal_eval(node.value))
    raise AssertionError('setup.py has no EXTRAS_REQUIRE')


def pip(*arguments):
    command = [sys.executable, '-m', 'pip', '--disable-pip-version-check', *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=550)


@pytest.mark.parametrize('extra', sorted({*extras()} - {*REFUSED}))
def test_an_extra_replaces_nothing(tmp_path, extra):
    report = tmp_path / 'report.json'
    done = pip('install', '--dry-run', '--report', report, f'{ROOT}[{extra}]')
    assert done.returncode == 0, done.stderr[-2000:]
    chosen = {
        each['metadata']['name'].lower() for each in json.loads(report.read_text())['install']
    }
    assert 'mmdevplug' in chosen
    assert not chosen & VENDORS


@pytest.mark.parametrize('extra', sorted(REFUSED))
def test_an_extra_that_would_replace_torch_is_refused(extra):
    done = pip('install', '--dry-run', f'{ROOT}[{extra}]')
    assert done.returncode != 0
    assert REFUSED[extra] in done.stdout + done.stderr


def test_pip_install_changes_nothing_that_is_there(tmp_path):
    """In a copy of this environment: a new one that sees the packages of this one."""
    subprocess.run([sys.executable, '-m', 'venv', tmp_path / 'copy'], check=True, timeout=120)
    python = tmp_path / 'copy' / 'bin' / 'python'
    (packages,) = (tmp_path / 'copy').glob('lib/python3.8/site-packages')
    (packages / 'vendor.pth').write_text(sysconfig.get_paths()['purelib'] + '\n')

    def freeze():
        done = subprocess.run(
            [python, '-m', 'pip', 'freeze', '--all'], stdout=subprocess.PIPE, text=True, check=True
        )
        lines = [line for line in done.stdout.splitlines() if 'mmdevplug' not in line]
        return sorted(line for line in lines if not line.startswith('pip=='))

    before = freeze()
    assert 'torch==1.10.0' in before
    subprocess.run(
        [python, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', str(ROOT)],
        check=True,
        timeout=500,
    )
    assert freeze() == before
    assert Path(packages / 'mmdevplug' / 'version.py').exists()

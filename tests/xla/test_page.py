"""The commands of docs/*/torch_xla.md, typed one after the other in a checkout."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.jobs import ROOT

pytestmark = [pytest.mark.xla, pytest.mark.long, pytest.mark.timeout(900)]

#: What the page installs, and transformers, which MMEngine imports where it finds it.
ABSENT = ('mmdevplug', '__editable__', 'transformers')

#: Makes environments that see the packages of this one, so that nothing is fetched.
PYTHON3 = """\
#!/bin/sh
set -e
{python} "$@"
for packages in "$3"/lib/python*/site-packages; do echo {brought} > "$packages/brought.pth"; done
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of what installing and training need, beside a folder of programs."""
    brought, programs, folder = (tmp_path / name for name in ('brought', 'bin', 'mmdevplug'))
    for each in (brought, programs, folder):
        each.mkdir()
    for path in Path(sysconfig.get_paths()['purelib']).iterdir():
        if not path.name.startswith(ABSENT):
            (brought / path.name).symlink_to(path)
    (programs / 'python3').write_text(PYTHON3.format(python=sys.executable, brought=brought))
    (programs / 'python3').chmod(0o755)
    skip = shutil.ignore_patterns('__pycache__', '.mim', 'work_dirs')
    for name in ('mmdevplug', 'configs', 'tools'):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skip)
    for name in ('setup.py', 'pyproject.toml', 'README.md', 'model-index.yml', 'MANIFEST.in'):
        shutil.copy2(ROOT / name, folder / name)
    return folder


def test_the_commands_of_the_page(checkout):
    page = (ROOT / 'docs' / 'en' / 'torch_xla.md').read_text(encoding='utf-8')
    commands = re.search('```bash\n(.*?)```', page, re.DOTALL).group(1)
    kept = ('HOME', 'PJRT_DEVICE', 'XLA_FLAGS', 'LD_LIBRARY_PATH')
    done = subprocess.run(
        ['bash', '-euxc', commands],
        cwd=str(checkout),
        env=dict(
            {name: os.environ[name] for name in kept if name in os.environ},
            OMP_NUM_THREADS='1',
            PATH=f'{checkout.parent}/bin:/usr/local/bin:/usr/bin:/bin',
            # Everything is there already; pip is to find that, and to build without fetching.
            PIP_NO_INDEX='1',
            PIP_NO_BUILD_ISOLATION='0',
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "accelerator 'xla' (accelerator.type='xla'): device xla:0 (CPU)" in done.stdout
    accuracy = [float(found) for found in re.findall(r'accuracy: ([0-9.]+)', done.stdout)]
    # Of two trainings, the second of which has nothing left to do, and a test.
    assert accuracy[-1] >= 97.0
    assert (checkout / 'work_dirs' / 'xla' / 'epoch_16.pth').exists()
    installed = checkout.parent / 'env-xla'
    assert list(installed.glob('lib/python*/site-packages/mmdevplug/version.py'))
    assert not list(installed.glob('lib/python*/site-packages/torch'))

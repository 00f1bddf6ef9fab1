"""The commands of docs/*/mmengine.md, as a maintainer of MMEngine types them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import ROOT

#: Where `make test-peers` finds MMEngine's tests.
ARCHIVE = Path(os.environ.get('PEERS', ROOT.parent / 'shared' / 'peers' / 'mmengine-tests.tar.gz'))
#: What is not typed here: the environment is made, and nothing is fetched.
LEFT_OUT = ('source ', 'git ')


def commands(language):
    page = (ROOT / 'docs' / language / 'mmengine.md').read_text(encoding='utf-8')
    lines = [
        line
        for block in re.findall('```bash\n(.*?)```', page, re.DOTALL)
        for line in block.splitlines()
    ]
    return [re.sub(r'\s+#.*', '', line) for line in lines]


def test_both_languages_have_the_same_commands():
    assert commands('en') == commands('zh_cn')
    assert len(commands('en')) > 5


@pytest.mark.long
def test_the_commands_run_in_their_order(tmp_path):
    if not ARCHIVE.is_file():
        pytest.skip(f'no tests of MMEngine: PEERS={ARCHIVE} is no file')
    shutil.copy(str(ARCHIVE), str(tmp_path / 'mmengine-tests.tar.gz'))
    ran = []
    for line in commands('en'):
        if line.startswith(LEFT_OUT):
            continue
        words = line.replace('../mmengine-tests.tar.gz', str(tmp_path / 'mmengine-tests.tar.gz'))
        if '-m pytest' in line:
            words += ' --collect-only -q'  # They run in `make test`.
        elif '--device' in line and '--only' not in line:
            words += ' --only test_scheduler'  # All of them run in `make test-peers`.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ['PATH']])
        done = subprocess.run(
            words, shell=True, cwd=str(ROOT), env=dict(os.environ, PATH=path, OMP_NUM_THREADS='1'),
            capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, (line, done.stdout[-3000:], done.stderr[-3000:])
        ran.append(done.stdout)
    collected, imports, cpu, npu, stock = ran
    assert int(re.search(r'(\d+)(?:/\d+)? tests collected', collected).group(1)) > 100
    assert 'ms' in imports or ' s' in imports
    for printed in (cpu, npu, stock):
        assert int(re.search(r'(\d+) passed', printed).group(1)) > 10, printed

"""The steps of the Dockerfile, done in a copy of this host's root instead of a base image.

Docker needs a daemon, which builds nothing here. The copy is an overlay: what the steps write is
gone with it.
"""

import json
import os
import re
import shlex
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.cli.starting import in_container, need_namespaces
from tests.commands import run
from tests.jobs import ROOT

TEXT = (ROOT / 'Dockerfile').read_text()
#: Runs a script in the copy, whose changes lie in memory.
CHROOT = """set -e
mount -t tmpfs -o mode=755 tmpfs "$0"
mkdir "$0/up" "$0/work" "$0/root"
mount -t overlay overlay -o lowerdir=/,upperdir="$0/up",workdir="$0/work" "$0/root"
mount -t proc proc "$0/root/proc"
mount --rbind /dev "$0/root/dev"
mount -t tmpfs -o mode=1777,size=64m tmpfs "$0/root/dev/shm"
cp -a "$1/context" "$1/check.sh" "$0/root/"
exec chroot "$0/root" bash -ec "$2"
"""
#: All files can be read, as in an image: the interpreter may be in root's home.
AS_USER = (
    'setpriv --reuid {user} --regid {user} --clear-groups '
    '--inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search'
)


def instructions():
    """The instructions, each with the rest of its line."""
    text = re.sub(r'^#.*\n', '', TEXT, flags=re.MULTILINE).replace('\\\n', ' ')
    return [line.split(None, 1) for line in text.splitlines() if line.strip()]


def copy_context(folder):
    """Copy what .dockerignore leaves of the checkout."""
    lines = (ROOT / '.dockerignore').read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith('#')]
    assert rules[0] == '*'
    ignored = shutil.ignore_patterns(
        *(rule.split('/')[-1] for rule in rules[1:] if not rule.startswith('!'))
    )
    for rule in rules:
        source = ROOT / rule.lstrip('!')
        if not rule.startswith('!'):
            continue
        if source.is_dir():
            shutil.copytree(source, folder / source.name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(source, folder / source.name)


def script():
    """The instructions as a shell script, and then the check as the image's user."""
    lines = ['umask 022']
    for name, rest in instructions():
        if name == 'ARG':
            key, _, value = rest.partition('=')
            lines += [f'export {key}={shlex.quote(value)}'] * bool(value)
        elif name == 'ENV':
            lines.append(f'export {rest}')
        elif name == 'RUN':
            lines.append(f'( cd / && {rest} )')
        elif name == 'COPY':
            source, target = rest.split()
            lines.append(f'mkdir -p {target} && cp -a /context/{source} {target}')
        elif name == 'WORKDIR':
            lines.append(f'cd {rest}')
        elif name == 'USER':
            lines.append(f'exec {AS_USER.format(user=rest)} bash -e /check.sh')
        else:
            assert name in ('FROM', 'ENTRYPOINT', 'CMD'), name
    return '\n'.join(lines)


def entry():
    found = dict(instructions())
    return json.loads(found['ENTRYPOINT']), json.loads(found['CMD'])


def test_the_image_is_started_as_any_user_and_as_process_1():
    found = dict(instructions())
    assert entry() == (['mmdevplug'], ['--help'])
    assert found['USER'].isdigit()  # `runAsNonRoot` of Kubernetes refuses a name
    assert found['FROM'] == '${BASE}'
    assert instructions()[0][0] == 'ARG'


def test_context_has_what_is_installed_and_nothing_else(tmp_path):
    copy_context(tmp_path)
    assert not list(tmp_path.rglob('__pycache__'))
    assert {path.name for path in tmp_path.iterdir()} >= {'setup.py', 'mmdevplug', 'configs'}
    assert (tmp_path / 'mmdevplug' / 'configs' / '_base_').is_dir()  # through its link
    assert not (tmp_path / 'tests').exists()


CHECK = """
test "$(id -u)" = 1000
test -w "$HOME"
python3 -c "import cv2, mmdevplug, torch; print(mmdevplug.__file__, torch.__version__)"
python3 -m pip list --format=freeze | grep -i opencv
{entry} train /opt/mmdevplug/configs/digits/digits_cpu.py --nproc 2 \\
    --cfg-options train_cfg.max_epochs=1 train_cfg.val_interval=1
cat work_dirs/digits_cpu/last_checkpoint
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_steps_leave_the_torch_of_the_base_alone_and_the_image_trains(tmp_path):
    """The base has this environment's PyTorch, as a vendor's image has the vendor's."""
    context, root = tmp_path / 'context', tmp_path / 'root'
    context.mkdir()
    root.mkdir()
    copy_context(context)
    (tmp_path / 'check.sh').write_text(CHECK.format(entry=' '.join(entry()[0])))
    site = Path(sysconfig.get_paths()['purelib'])
    prepare = (
        # What the development environment has of the checkout.
        f'rm -rf {site}/mmdevplug {site}/__editable__*mmdevplug* {site}/mmdevplug-*\n'
        f'export PATH={sysconfig.get_paths()["scripts"]}:$PATH OMP_NUM_THREADS=1\n'
    )
    before = sorted(os.listdir(site))
    command = ['bash', '-c', CHROOT, str(root), str(tmp_path), prepare + script()]
    environ = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    need_namespaces()
    done = run(*in_container(command), env=environ, timeout=850)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert sorted(os.listdir(site)) == before
    printed = done.stdout
    assert f'{site}/mmdevplug/__init__.py {torch.__version__}\n' in printed
    assert re.findall(r'^opencv\S+', printed, re.MULTILINE)[0].startswith('opencv-python-headless')
    assert printed.splitlines()[-1].endswith('/epoch_1.pth')

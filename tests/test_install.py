"""Installing the package beside either MMEngine: OpenMMLab's, or OneDL's of the same modules.

The distributions here are empty but for names, versions and requirements, and pip finds no others.
What it does with real ones of these names it decides from the same metadata.
"""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.test_mim import build_wheel, copy_checkout

#: The version of each distribution, the module that it installs, and what it requires.
STOCK = {
    'mmengine': ('0.10.7', 'mmengine', []),
    'mmcv': ('2.1.0', 'mmcv', ['mmengine>=0.3.0']),
    'mmsegmentation': ('1.2.2', 'mmseg', []),
}
ONEDL = {
    'onedl-mmengine': ('0.10.12', 'mmengine', []),
    'onedl-mmcv': ('2.3.6', 'mmcv', ['onedl-mmengine>=0.10.8rc1']),
    'onedl-mmsegmentation': ('1.4.2', 'mmseg', []),
}
#: What the package requires beside MMEngine.
OTHERS = {
    name: ('70.0' if name == 'setuptools' else '9.0', name, [])
    for name in ('setuptools', 'psutil', 'rich', 'matplotlib')
}


def write_wheel(folder, name, version, module, requires):
    """Write a distribution whose module says which one it belongs to."""
    stem = f'{name.replace("-", "_")}-{version}'
    info = f'{stem}.dist-info'
    metadata = ['Metadata-Version: 2.1', f'Name: {name}', f'Version: {version}']
    metadata += [f'Requires-Dist: {each}' for each in requires]
    files = {
        f'{module}/__init__.py': f'owner = {name!r}\n',
        f'{info}/METADATA': '\n'.join(metadata) + '\n',
        f'{info}/WHEEL': 'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n',
    }
    files[f'{info}/RECORD'] = ''.join(f'{path},,\n' for path in [*files, f'{info}/RECORD'])
    with zipfile.ZipFile(folder / f'{stem}-py3-none-any.whl', 'w') as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


@pytest.fixture(scope='module')
def wheels(tmp_path_factory):
    """All that pip may choose from: our wheel, and those that it could require."""
    folder = build_wheel(tmp_path_factory.mktemp('built'))
    for name, (version, module, requires) in {**STOCK, **ONEDL, **OTHERS}.items():
        write_wheel(folder, name, version, module, requires)
    return folder


class Environment:
    """A virtual environment into which pip installs the wheels and nothing else."""

    def __init__(self, folder, wheels):
        venv.create(folder, with_pip=False)  # installing pip takes longer than all else
        self.python, self.wheels = folder / 'bin' / 'python', wheels

    def run(self, *command):
        environ = {k: v for k, v in os.environ.items() if not k.startswith(('PYTHON', 'PIP_'))}
        return subprocess.run(
            list(map(str, command)),
            env=dict(environ, PIP_CONFIG_FILE=os.devnull, PIP_DISABLE_PIP_VERSION_CHECK='1'),
            cwd=str(self.wheels),
            capture_output=True,
            text=True,
            timeout=200,
        )

    def pip(self, *arguments):
        done = self.run(sys.executable, '-m', 'pip', '--python', self.python, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def code(self, text):
        return self.run(self.python, '-c', text)

    def read(self):
        """Read configs of the package; the folder that they come from."""
        done = self.code(READ)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def install(self, *packages):
        self.pip('install', '--no-index', '--find-links', self.wheels, '--no-compile', *packages)
        return self

    def freeze(self):
        """The packages of OpenMMLab and OneDL, and who wrote the files of MMEngine."""
        listed = self.pip('freeze').splitlines()
        owner = self.code('import mmengine; print(mmengine.owner)').stdout.strip()
        return [line for line in listed if line.startswith(('mm', 'onedl'))], owner


@pytest.fixture
def environment(tmp_path, wheels):
    return Environment(tmp_path / 'env', wheels)


def without_us(frozen):
    """What ``freeze`` found, without our own line."""
    listed, owner = frozen
    return [line for line in listed if not line.startswith('mmdevplug')], owner


@pytest.mark.parametrize('extra', ['', '[onedl]'])
def test_nothing_is_installed_over_onedl(environment, extra):
    before = environment.install(*ONEDL).freeze()
    assert before[1] == 'onedl-mmengine'
    after = environment.install(f'mmdevplug{extra}').freeze()
    assert any(line.startswith('mmdevplug') for line in after[0])
    assert without_us(after) == before


@pytest.mark.parametrize('extra', ['', '[mmengine]'])
def test_openmmlabs_packages_are_left_as_they_are(environment, extra):
    before = environment.install(*STOCK).freeze()
    assert before[1] == 'mmengine'
    assert without_us(environment.install(f'mmdevplug{extra}').freeze()) == before


@pytest.mark.parametrize(
    ('extra', 'installed'),
    [('mmengine', 'mmengine==0.10.7'), ('onedl', 'onedl-mmengine==0.10.12')],
)
def test_an_extra_chooses_the_mmengine(environment, extra, installed):
    listed, owner = without_us(environment.install(f'mmdevplug[{extra}]').freeze())
    assert listed == [installed]
    assert owner == installed.split('==')[0]


def test_without_any_mmengine_the_import_names_both(environment):
    done = environment.install('mmdevplug').code(
        'import mmdevplug; mmdevplug.version; mmdevplug.DeviceRunner'
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith('ModuleNotFoundError: mmdevplug extends MMEngine, and ')
    assert str(environment.python) in last
    assert "pip install 'mmdevplug[mmengine]'" in last
    assert "pip install 'mmdevplug[onedl]'" in last
    assert 'During handling' not in done.stderr


def test_another_module_that_mmengine_lacks_is_named(environment, tmp_path):
    """A broken MMEngine is not taken for a missing one."""
    environment.install('mmdevplug')
    folder = tmp_path / 'broken' / 'mmengine'
    folder.mkdir(parents=True)
    (folder / '__init__.py').write_text('')
    (folder / 'registry.py').write_text('import addict_is_missing\n')
    done = environment.code(
        f'import sys; sys.path.insert(0, {str(folder.parent)!r}); import mmdevplug'
    )
    assert done.stderr.strip().splitlines()[-1] == (
        "ModuleNotFoundError: No module named 'addict_is_missing'"
    )


# an editable install -------------------------------------------------------------------------

#: Reads configs of the package as MMEngine and as we find them.
READ = """
from pathlib import Path
from mmengine.config import Config
Path('new.py').write_text(
    'from mmengine.config import read_base\\n'
    'with read_base():\\n'
    '    from mmdevplug.configs._base_.accelerators.gcu import *\\n'
)
assert Config.fromfile('new.py').accelerator.type == 'gcu'
Path('old.py').write_text("_base_ = __import__('mmdevplug').base_config('cpu')")
assert Config.fromfile('old.py').accelerator.type == 'cpu'
from mmengine.utils import get_installed_path
print(Path(get_installed_path('mmdevplug')).resolve())
"""


def snapshot(folder):
    """The files of a folder, and when each was written."""
    return {path: path.lstat().st_mtime_ns for path in folder.rglob('*') if not path.is_dir()}


@pytest.fixture
def editable(environment, tmp_path):
    """An environment as `make install` leaves it, and the checkout that it leads to."""
    source = copy_checkout(tmp_path / 'checkout')
    build = 'import sys; from setuptools import build_meta as b; b.build_editable(sys.argv[1])'
    command = [sys.executable, '-c', build, tmp_path]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=100)
    (site,) = (tmp_path / 'env').glob('lib/python*/site-packages')
    shared = tmp_path / 'shared'
    shared.mkdir()
    for entry in Path(sysconfig.get_paths()['purelib']).iterdir():
        if 'mmdevplug' not in entry.name:
            (shared / entry.name).symlink_to(entry)
    (site / 'shared.pth').write_text(f'{shared}\n')
    environment.pip('install', '--no-deps', *tmp_path.glob('mmdevplug-*.whl'))
    link = [environment.python, source / '.ci' / 'link_configs.py']
    for _ in range(2):  # also where it has been made
        done = environment.run(*link)
        assert done.returncode == 0, done.stderr
    assert environment.read() == str(source / 'mmdevplug')
    return environment, source, site, link


def test_installing_over_an_editable_install_leaves_the_checkout_alone(editable, wheels):
    environment, source, site, link = editable
    before = snapshot(source)
    (wheel,) = wheels.glob('mmdevplug-*.whl')
    environment.pip('install', '--no-deps', '--no-compile', '--force-reinstall', wheel)
    assert snapshot(source) == before
    assert environment.read() == str(site / 'mmdevplug')
    assert not (site / 'mmdevplug').is_symlink()
    refused = environment.run(*link)
    assert refused.returncode == 1
    assert refused.stderr.strip().endswith(
        'expected an editable install of mmdevplug. Run: pip install -e .'
    )


def test_uninstalling_an_editable_install_leaves_the_checkout_alone(editable):
    environment, source, site, _ = editable
    before = snapshot(source)
    environment.pip('uninstall', '--yes', 'mmdevplug')
    assert snapshot(source) == before
    assert not [path for path in site.iterdir() if 'mmdevplug' in path.name]

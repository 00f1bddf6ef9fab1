"""Packaging, in OpenMMLab's manner: the configs and the tools travel inside the package."""

import re
import shutil
from pathlib import Path
from typing import Any, Dict

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent

# What `mim` looks for in an installed package, where it is present.
FOR_MIM = ('configs', 'tools', 'model-index.yml')

INSTALL_REQUIRES = [
    # Any torch from 1.10 on is needed too and left out on purpose: accelerators come with a torch
    # of their vendor's, and asking for plain `torch` may replace it. So is
    # MMEngine, which the extras choose.
    # MMEngine imports pkg_resources, which setuptools 81 removed.
    'setuptools<81',
    'psutil',
    # For tables on the terminal, and pictures; MMEngine needs both as well.
    'rich',
    'matplotlib',
]

EXTRAS_REQUIRE = {
    # One of these two, which install the same folder: if it were required, pip would install the
    # first over the second.
    'mmengine': ['mmengine>=0.10.0,<1.0'],
    'onedl': ['onedl-mmengine>=0.10.12,<1.0'],
    # One model over several devices.
    'placement': ['accelerate>=1.0', 'safetensors'],
    'xla': ['torch==2.9.0', 'torch_xla==2.9.0', 'torchvision==0.24.0'],
    'examples': ['scikit-learn'],
    # What `mmdevplug --print-completion` makes its script with.
    'completion': ['shtab'],
    # configs/llama_lora. An older peft runs on Python 3.8, and pip would replace a vendor's torch
    # 1.10 for it; this one is refused there.
    'llama': ['accelerate>=1.0', 'transformers', 'peft>=0.17'],
    'dev': [
        'pytest',
        'pytest-timeout',
        'pytest-xdist',
        'coverage',
        'hypothesis',
        'tensorboard',
        'ruff',
        'mypy==2.4.1; python_version >= "3.10"',
        'vermin',
        'pre-commit',
        'pre-commit-hooks',
        'shtab',
        'ninja',
        'torchdata>=0.11; python_version >= "3.9"',
        # What MMEngine's own tests need.
        'parameterized',
        'dill',
        'expecttest',
        # Real models to plan and to train.
        'mmsegmentation==1.2.2',
        'mmdet==3.3.0',
        'ftfy',
        'regex',
    ],
    # What docs/en/other_loops.md is run with.
    'loops': ['trl==1.16.0', 'peft>=0.17', 'lightning>=2.6', 'datasets'],
    # More real models, where torchvision is: no CPU build of it is made for the newest torch.
    'dev-xla': [
        'mmpretrain==1.2.0',
        # mmpretrain 1.2 imports what later releases no longer have.
        'transformers<4.52',
    ],
}


def read_version() -> str:
    """Read the version without importing the package, which would need MMEngine."""
    found: Dict[str, Any] = {}
    exec((ROOT / 'mmdevplug' / 'version.py').read_text(encoding='utf-8'), found)
    return found['__version__']


def read_description() -> str:
    """Read the README without links and pictures that lead to files of a checkout."""
    text = (ROOT / 'README.md').read_text(encoding='utf-8')
    text = re.sub(r'!\[[^]]*\]\((?!https?:)[^)]*\)\n*', '', text)
    # A badge is a picture inside a link.
    return re.sub(r'\[((?:!\[[^]]*\]\([^)]*\)|[^][])+)\]\((?!https?:|#)[^)]*\)', r'\1', text)


class BuildWithMim(build_py):
    """Copies what `mim` wants into ``mmdevplug/.mim`` of the build."""

    def run(self) -> None:
        """Build; an editable install needs no copies."""
        super().run()
        if getattr(self, 'editable_mode', False):
            return
        target = Path(self.build_lib) / 'mmdevplug' / '.mim'
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name in FOR_MIM:
            source = ROOT / name
            if source.is_dir():
                # Without what developers use in a checkout.
                left_out = shutil.ignore_patterns('__pycache__', '*.pyc', 'compat*', 'peers')
                shutil.copytree(source, target / name, ignore=left_out)
            elif source.is_file():
                shutil.copy2(source, target / name)


if __name__ == '__main__':
    setup(
        name='mmdevplug',
        version=read_version(),
        description='Train any OpenMMLab model on any PyTorch accelerator',
        long_description=read_description(),
        long_description_content_type='text/markdown',
        author='The mmdevplug contributors',
        keywords='OpenMMLab, MMEngine, PyTorch, accelerator, distributed training, XLA, GCU',
        license='Apache-2.0',
        classifiers=[
            'Development Status :: 3 - Alpha',
            'Operating System :: POSIX',
            'Programming Language :: Python :: 3',
            'Programming Language :: Python :: 3.8',
            'Programming Language :: Python :: 3.9',
            'Programming Language :: Python :: 3.10',
            'Programming Language :: Python :: 3.11',
            'Programming Language :: Python :: 3.12',
            'Programming Language :: Python :: 3.13',
            'Topic :: Scientific/Engineering :: Artificial Intelligence',
        ],
        python_requires='>=3.8',
        packages=find_packages(include=['mmdevplug', 'mmdevplug.*']),
        # `mmdevplug/configs` is a link to `configs`: what base_config() and read_base() read. The
        # examples are in .mim, where mim looks; twice, it would not know which to take.
        package_data={'mmdevplug': ['py.typed', 'configs/_base_/**/*.py']},
        include_package_data=False,
        install_requires=INSTALL_REQUIRES,
        extras_require=EXTRAS_REQUIRE,
        entry_points={'console_scripts': ['mmdevplug = mmdevplug.cli.main:main']},
        cmdclass={'build_py': BuildWithMim},
        zip_safe=False,
    )

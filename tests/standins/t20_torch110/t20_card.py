"""A lazy card of eight devices, ``xla:0 ... xla:7``, for PyTorch 1.10, and its account for tests.

Importing it compiles the extension once (40 s) or loads what was compiled before. ``torch_gcu``
beside it is the vendor's interface to this card.
"""

import fcntl
import importlib.util
import os
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from pathlib import Path

import torch

#: Why a release of PyTorch cannot have this card; None where it can.
MISSING = None
if not torch.__version__.startswith('1.10.'):
    MISSING = f'the T20 stand-in is written for PyTorch 1.10, and this is {torch.__version__}'

#: How often each function of ``torch_gcu`` was called.
calls = Counter()

#: How often a graph was run in each `JitRunMode`, also where nothing was pending.
modes = Counter()

#: The seeds that were given to all cards, in order.
seeds = []


def _build():
    """Compile the extension, or load it if it was compiled before."""
    source = Path(__file__).with_suffix('.cpp')
    place = zlib.crc32(str(source).encode() + source.read_bytes())
    default = f't20_card-{os.getuid()}-{torch.__version__}-{place:08x}'
    asked = os.environ.get('T20_CARD_BUILD')
    folder = Path(asked or tempfile.gettempdir()) / default
    library = folder / '_t20_card.so'
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / 'mine', 'w') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not (folder / 'complete').exists():
            _compile(source, folder)
            (folder / 'complete').touch()
    spec = importlib.util.spec_from_file_location('_t20_card', library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(source, folder):
    # In a process of its own: loaded twice, the extension would register its kernels twice.
    code = 'import sys; from torch.utils.cpp_extension import load; load(*sys.argv[1:3], '
    code += "build_directory=sys.argv[3], extra_cflags=['-O1'])"
    bin_folder = str(Path(sys.executable).parent)  # where ninja is
    result = subprocess.run(
        [sys.executable, '-c', code, '_t20_card', str(source), str(folder)],
        env={**os.environ, 'PATH': os.pathsep.join([bin_folder, os.environ.get('PATH', '')])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        raise RuntimeError(f'{source} does not compile:\n{result.stdout}')


#: The extension.
card = None if MISSING else _build()

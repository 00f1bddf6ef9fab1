"""The card on PyTorch 1.10: an extension under ``DispatchKey::XLA``, beside this file.

Importing it compiles the extension once (40 s) or loads what was compiled before.
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


def report():
    """Write the counts of all devices as torch_xla's report does, which the vendor's is."""
    stats = [card.stats(index) for index in range(card.device_count())]
    executions = Counter()
    for each in stats:
        executions.update(each['executions'])
    lines = ['Metric: CompileTime', f'  TotalSamples: {sum(x["compilations"] for x in stats)}']
    lines += ['Metric: ExecuteTime', f'  TotalSamples: {sum(executions.values())}']
    lines += ['Counter: UncachedOps', f'  Value: {sum(x["all_operations"] for x in stats)}']
    for reason, count in sorted(executions.items()):
        lines += [f'Counter: Execute.{reason}', f'  Value: {count}']
    return '\n'.join(lines)


def autocast():
    """Whether autocast is on and to which dtype: in PyTorch 1.10 CUDA's, for XLA devices too."""
    return torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()


def set_autocast(enabled, dtype):
    torch.set_autocast_enabled(enabled)
    torch.set_autocast_gpu_dtype(dtype)


#: The extension.
card = _build()
card.report, card.autocast, card.set_autocast = report, autocast, set_autocast

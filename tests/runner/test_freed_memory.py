"""What an iteration frees, the next one uses again: the kernel clears no pages for it."""

import os
import platform
import sys

import pytest

from mmdevplug.utils import host
from tests.commands import run

#: Prints how often an iteration touches a page that the kernel has to clear first.
ITERATIONS = """
import resource
import torch
import mmdevplug

mmdevplug.init_device(accelerator='cpu')

def iterate():
    blocks = [torch.ones(1 << 20) for _ in range(32)]  # 128 MB
    return sum(block[0].item() for block in blocks)

for _ in range(3):
    iterate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    iterate()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5)
"""
SETTINGS = ('MALLOC_TRIM_THRESHOLD_', 'MALLOC_MMAP_THRESHOLD_', 'MALLOC_TOP_PAD_')

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != 'glibc', reason='other C libraries have no such settings'
)


def faults(**environ):
    clean = {k: v for k, v in os.environ.items() if k not in (*SETTINGS, 'GLIBC_TUNABLES')}
    return int(run(sys.executable, '-c', ITERATIONS, env=dict(clean, **environ)).stdout)


def test_an_iteration_uses_the_memory_of_the_one_before():
    # A user's own setting stands; this one returns everything at once.
    returned = faults(MALLOC_TRIM_THRESHOLD_='0', MALLOC_MMAP_THRESHOLD_='131072')
    kept = faults()
    assert kept < returned / 10


@pytest.mark.parametrize(
    'environ',
    [{name: '1000000'} for name in SETTINGS]
    + [{'GLIBC_TUNABLES': 'glibc.malloc.perturb=1:glibc.malloc.top_pad=4096'}],
)
def test_settings_of_the_environment_stand(monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert not host.keep_freed_memory()

"""Cores of a control group."""

import os

import psutil
import pytest

from mmdevplug.utils.host import available_memory, memory_kills, usable_cores


def test_cores_of_a_control_group(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: set(range(64)), raising=False)
    assert usable_cores(str(tmp_path)) == 64
    for text, cores in (('max 100000', 64), ('150000 100000', 2)):
        (tmp_path / 'cpu.max').write_text(text)
        assert usable_cores(str(tmp_path)) == cores
    (tmp_path / 'cpu.max').unlink()
    (tmp_path / 'cpu').mkdir()
    (tmp_path / 'cpu' / 'cpu.cfs_period_us').write_text('100000\n')
    for text, cores in (('-1\n', 64), ('400000\n', 4)):
        (tmp_path / 'cpu' / 'cpu.cfs_quota_us').write_text(text)
        assert usable_cores(str(tmp_path)) == cores


@pytest.mark.parametrize(
    ('line', 'folder', 'files'),
    [
        (
            '0::/job/inner',
            'job',
            {
                'memory.max': '3000000',
                'memory.current': '2500000',
                'memory.stat': 'anon 5\ninactive_file 400000\n',
                'memory.events': 'low 0\noom 9\noom_kill 2\n',
            },
        ),
        (
            '4:memory:/job/inner',
            'memory/job',
            {
                'memory.limit_in_bytes': '3000000',
                'memory.usage_in_bytes': '2500000',
                'memory.stat': 'inactive_file 1\ntotal_inactive_file 400000\n',
                'memory.oom_control': 'oom_kill_disable 0\nunder_oom 0\noom_kill 2\n',
            },
        ),
    ],
)
def test_memory_is_what_control_groups_allow(tmp_path, line, folder, files):
    groups, inside = tmp_path / 'cgroup', tmp_path / folder
    groups.write_text(f'3:cpuset:/else\n{line}\n')
    place = dict(root=str(tmp_path), groups=str(groups))
    assert available_memory(**place).limit is None
    assert memory_kills(**place) == 0
    inside.mkdir(parents=True)
    for name, text in files.items():
        (inside / name).write_text(text)
    found = available_memory(**place)
    assert found == (900000, 3000000)
    assert str(found) == '878.91 KiB, of 2.86 MiB by the limit of this container'
    assert memory_kills(**place) == 2
    unlimited = 'max' if 'memory.max' in files else str(2**63 - 4096)
    (inside / next(iter(files))).write_text(unlimited)
    assert available_memory(**place).limit is None


def test_memory_without_control_groups(tmp_path):
    place = dict(root=str(tmp_path), groups=str(tmp_path / 'none'))
    total = psutil.virtual_memory().total
    assert 0 < available_memory(**place).available <= total
    assert memory_kills(**place) == 0

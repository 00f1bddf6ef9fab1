"""Cores of a control group."""

import os

from mmdevplug.utils.host import usable_cores


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

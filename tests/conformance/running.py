"""Running the suite as a user does, in a process of its own."""

import json
import subprocess
import sys

from mmdevplug.conformance.checks import CHECKS
from tests.jobs import ROOT

CHECKED = ['detection', *CHECKS]


def conformance(folder, *arguments, env):
    """The command, its exit status and its JSON."""
    path = folder / 'results.json'
    done = subprocess.run(
        [sys.executable, '-m', 'mmdevplug.cli.main', 'conformance', *arguments, '--json', path],
        env=env,
        cwd=str(ROOT),
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert path.is_file(), done.stderr
    return done, json.loads(path.read_text())


def assert_passed(done, report, not_supported=()):
    """All checks have passed but for those that the device does not have."""
    results = {found['section']: found['level'] for found in report['findings']}
    expected = {name: 'not supported' if name in not_supported else 'passed' for name in CHECKED}
    assert results == expected, done.stdout
    assert done.returncode == 0
    assert report['exit_status'] == 0
    for name in CHECKED:
        assert f'| {name} | {results[name]} | ' in done.stdout

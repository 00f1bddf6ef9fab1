"""Running the suite as a user does, in a process of its own."""

import json
import subprocess
import sys

import pytest

from mmdevplug.checks.conformance.checks import CHECKS
from tests.jobs import ROOT

#: Checks that a test runs together: each starts processes of its own, and workers share the tests.
GROUPS = [list(CHECKS)[:2], list(CHECKS)[2:5], list(CHECKS)[5:8], list(CHECKS)[8:]]
in_groups = pytest.mark.parametrize('checks', GROUPS, ids=lambda checks: checks[0])


def measured(folder, accelerator, checks, env, not_supported=(), failed=()):
    """Run the command; what it measured by check, none of which has failed but those named."""
    path = folder / 'results.json'
    command = [sys.executable, '-m', 'mmdevplug.cli.main', 'conformance', '--checks', *checks]
    done = subprocess.run(
        [*command, '--accelerator', accelerator, '--json', path],
        env=env,
        cwd=str(ROOT),
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert path.is_file(), done.stderr
    report = json.loads(path.read_text())
    results = {found['section']: found['level'] for found in report['findings']}
    expected = dict.fromkeys(['detection', *checks], 'passed')
    expected.update(dict.fromkeys(failed, 'failed'))
    expected.update(dict.fromkeys(set(checks).intersection(not_supported), 'not supported'))
    assert results == expected, done.stdout
    assert done.returncode == report['exit_status'] == int('failed' in expected.values())
    for name, level in expected.items():
        assert f'| {name} | {level} | ' in done.stdout
    return {found['section']: found['found'] for found in report['findings']}

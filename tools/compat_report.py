"""A plugin of pytest's for ``tools/compat.sh``: a line of JSON about a run, from its reports."""

import importlib.util
import json
import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path

#: Distributions whose versions a line names.
SHOWN = ('torch', 'mmengine', 'numpy', 'mmcv', 'mmcv-lite', 'accelerate', 'transformers', 'peft')


class Report:
    """Counts outcomes; a test fails once, whichever of its phases failed.

    Args:
        path (str): The file that gets the line; failures go to ``<path>.failures`` as they come,
            so that a run that is stopped leaves something.
        args (list): What pytest was asked to run.
    """

    def __init__(self, path, args):
        self.path = Path(path)
        self.args = args
        self.outcomes = {}
        self.reasons = {}
        self.uncollected = []

    def pytest_runtest_logreport(self, report):
        """Note what became of one phase of a test."""
        known = self.outcomes.get(report.nodeid)
        if report.failed and known != 'failed':
            self.outcomes[report.nodeid] = 'failed'
            with open(f'{self.path}.failures', 'a') as file:
                file.write(f'{report.nodeid}\n{report.longreprtext}\n\n')
        elif report.skipped and known is None:
            self.outcomes[report.nodeid] = 'skipped'
            reason = str(report.longrepr[2]) if report.longrepr else 'expected to fail'
            reason = reason.replace('Skipped: ', '')
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        elif report.when == 'call' and report.passed and known is None:
            self.outcomes[report.nodeid] = 'passed'

    def pytest_collectreport(self, report):
        """Note a file that could not be read."""
        if report.failed and report.nodeid not in self.uncollected:
            self.uncollected.append(report.nodeid)
        if report.skipped:
            self.reasons.setdefault(str(report.longrepr[2]).replace('Skipped: ', ''), 0)

    def pytest_sessionfinish(self, exitstatus):
        """Append the line."""
        count = list(self.outcomes.values()).count
        line = dict(
            python=platform.python_version(),
            **versions(),
            ran=self.args,
            finished=int(exitstatus) in (0, 1),
            passed=count('passed'),
            failed=count('failed') + len(self.uncollected),
            skipped=count('skipped'),
            reasons=dict(sorted(self.reasons.items())),
            failing=sorted(
                [name for name, outcome in self.outcomes.items() if outcome == 'failed']
                + self.uncollected
            ),
        )
        with self.path.open('a') as file:
            file.write(json.dumps(line, ensure_ascii=False) + '\n')


def versions():
    """What is installed, by name; None for what is not."""
    found = {}
    for name in SHOWN:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    # OneDL's are named by their release: `onedl-0.10.12`. Its mmcv may be without operations.
    operations = (
        importlib.util.find_spec('mmcv._ext') if importlib.util.find_spec('mmcv') else None
    )
    for name, known in (('mmengine', 'mmengine'), ('mmcv', 'mmcv' if operations else 'mmcv-lite')):
        with suppress(metadata.PackageNotFoundError):
            found[known] = f'onedl-{metadata.version(f"onedl-{name}")}'
    if found['torch'] and importlib.util.find_spec('torch'):
        import torch

        found['torch'] = torch.__version__
    return found


def pytest_configure(config):
    """Report from the process that hears of all workers."""
    if not hasattr(config, 'workerinput'):
        report = Report(os.environ['MMDEVPLUG_COMPAT'], list(config.args))
        config.pluginmanager.register(report)

"""Section *collectives*: a job of real processes on this host, watched from outside."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

from mmdevplug.environments.stale import stale_variables

from . import sockets
from .comm_progress import laggards, read
from .findings import Finding
from .isolated import describe_status, end_tree

SECTION = 'collectives'
POLL_SECONDS = 0.1
#: Beyond the timeout of a collective: to start Python, and for ranks to leave their errors.
SLACK_SECONDS = 60.0

#: What torchrun says of the process that ended first.
_ROOT_CAUSE = re.compile(r'failed \(exitcode: (-?\d+)\) local_rank: (\d+)')
#: Errors that another rank's failure causes.
_CAUSED = re.compile(r'^RankFailedError|Connection (closed|reset)|[Tt]imed out|Broken pipe|gloo')


class Job(NamedTuple):
    """A test of collectives that is over.

    Attributes:
        status (int, optional): Its exit status, None if it had to be ended.
        results (dict, optional): What rank 0 wrote.
        reports (list): What the ranks told last.
        output (str): What the processes printed.
    """

    status: Optional[int]
    results: Optional[Dict[str, Any]]
    reports: List[Dict[str, Any]]
    output: str


def run_job(
    ranks: int,
    options: Dict[str, Any],
    largest_mb: float = 16.0,
    rounds: int = 5,
    timeout: float = 120.0,
) -> Job:
    """Start the processes under torchrun on the loopback interface, and wait for them.

    Args:
        ranks (int): How many.
        options (dict): Fields of :class:`mmdevplug.doctor.request.Setting`.
        largest_mb (float): Of a message. Defaults to 16.
        rounds (int): How often each is timed. Defaults to 5.
        timeout (float): Of a collective, in seconds. Defaults to 120.
    """
    with tempfile.TemporaryDirectory(prefix='mmdevplug-doctor-') as name:
        folder = Path(name)
        command = [sys.executable, '-m', 'mmdevplug.cli.torchrun_agent', '--nnodes=1']
        command += [f'--nproc_per_node={ranks}', '--master_addr=127.0.0.1', '--master_port=0']
        command += ['-m', 'mmdevplug.cli.comm_test', '--progress', name]
        command += ['--largest-mb', str(largest_mb), '--rounds', str(rounds)]
        command += ['--timeout', str(timeout), '--json', str(folder / 'results.json')]
        for option, value in options.items():
            command += [] if value is None else [f'--{option}', value]
        environ = {k: v for k, v in os.environ.items() if k not in stale_variables('none')}
        with open(str(folder / 'output'), 'wb') as output:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            status = _watch(process, folder, timeout + SLACK_SECONDS)
        finally:
            end_tree(process)
        written = folder / 'results.json'
        results = json.loads(written.read_text(encoding='utf-8')) if written.exists() else None
        text = (folder / 'output').read_text(encoding='utf-8', errors='replace')
        return Job(status, results, read(folder), text)


def _watch(process: subprocess.Popen, folder: Path, seconds: float) -> Optional[int]:
    """Wait until a job ends, as long as its ranks get on."""
    seen: Any = None
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        reports = read(folder)
        if reports != seen:
            seen, deadline = reports, time.monotonic() + seconds
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_SECONDS)
    return process.returncode


def examine(job: Job, ranks: int, timeout: float) -> List[Finding]:
    """Tell what a job showed.

    Args:
        job (Job): The job.
        ranks (int): How many ranks it had.
        timeout (float): Of a collective, in seconds.
    """
    if job.results is None:
        return list(_failure(job, ranks, timeout))
    findings = list(_outcomes(job.results))
    findings += sockets.examine(job.results['listening'], job.results['single_host'])
    return findings


def _outcomes(results: Dict[str, Any]) -> Iterator[Finding]:
    by_status: Dict[str, List[str]] = {'pass': [], 'fail': [], 'not offered': []}
    for check in results['checks']:
        by_status[check['status']].append(check['name'])
        for problem in check['problems']:
            yield Finding(
                SECTION,
                'error',
                f'{check["name"]}: {problem}',
                'what ranks send to each other does not arrive as it was sent.',
                f"accelerator = dict(type={results['accelerator']!r}, backend='gloo')",
            )
    where = f'{results["world_size"]} ranks on {", ".join(results["devices"])}'
    yield Finding(
        SECTION,
        'ok',
        f'{len(by_status["pass"])} collectives are right: {where}, backend '
        f'{results["backend"]!r}, which takes {results["tensors_on"]} tensors',
        data=results,
    )
    if by_status['not offered']:
        yield Finding(
            SECTION,
            'note',
            f'backend {results["backend"]!r} does not offer {", ".join(by_status["not offered"])}',
            'nothing in mmdevplug or MMEngine needs them.',
        )


def _failure(job: Job, ranks: int, timeout: float) -> Iterator[Finding]:
    """Name the ranks that failed by themselves, or that the others waited for."""
    named = {report['rank'] for report in job.reports}
    own = [r for r in job.reports if r['error'] is not None and not _CAUSED.search(r['error'])]
    told = [f'rank {r["rank"]} failed in {r["stage"]!r}: {r["error"]}' for r in own]
    remedy = ''
    if not told:
        remedy = 'sudo dmesg | tail  # tells of processes that were killed for want of memory'
        told = _ended_or_hanging(job, timeout)
    missing = [str(rank) for rank in range(ranks) if rank not in named]
    if missing and _ROOT_CAUSE.search(job.output) is None:
        told.append(f'rank(s) {", ".join(missing)} never began')
    if not told:
        told = [f'the job {_how(job)}: {_last_line(job.output)}']
    for one in told:
        yield Finding(
            SECTION,
            'error',
            one,
            f'a training of {ranks} processes would end or hang there.',
            remedy or _remedy_in(one),
        )


def _ended_or_hanging(job: Job, timeout: float) -> List[str]:
    root = _ROOT_CAUSE.search(job.output)
    if root is not None:
        status, rank = int(root.group(1)), int(root.group(2))
        found = [report for report in job.reports if report['rank'] == rank]
        stage = found[0]['stage'] if found else 'starting'
        # A status above 0 of a rank that told an error is that of an error caused by others.
        if status < 0 or not found or found[0]['error'] is None:
            return [f'rank {rank} in {stage!r}: {describe_status(status)}']
    return [
        f'rank {report["rank"]} hangs in {report["stage"]!r}: the others got no answer within '
        f'{timeout:g} s'
        for report in laggards(job.reports)
    ]


def _how(job: Job) -> str:
    return 'gave no answer' if job.status is None else describe_status(job.status)


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else 'it printed nothing'


def _remedy_in(message: str) -> str:
    return '' if message.rstrip().endswith('.') else 'mmdevplug doctor --accelerator cpu'

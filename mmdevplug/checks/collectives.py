"""Section *collectives*: a job of real processes on this host, watched from outside."""

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

from mmdevplug.environments.stale import stale_variables

from .findings import Finding, Section
from .isolated import describe_end, run_watched
from .network import examine_listening

section = Section('collectives')
#: Added to the timeout of a collective: to start Python, and for ranks to report their errors.
SLACK_SECONDS = 60.0

#: How torchrun names the process that ended first.
_ROOT_CAUSE = re.compile(r'failed \(exitcode: (-?\d+)\) local_rank: (\d+)')
#: Errors that another rank's failure causes.
_CAUSED = re.compile(r'^RankFailedError|Connection (closed|reset)|[Tt]imed out|Broken pipe|gloo')


def examine(
    ranks: int,
    options: Dict[str, Any],
    largest_mb: float = 16.0,
    rounds: int = 5,
    timeout: float = 120.0,
) -> List[Finding]:
    """Run :mod:`mmdevplug.cli.comm_test` under torchrun on the loopback interface.

    ``options`` has its ``config`` and ``accelerator``, each a str or None.
    """
    arguments = ['--largest-mb', str(largest_mb), '--rounds', str(rounds)]
    for option, value in options.items():
        arguments += [] if value is None else [f'--{option}', value]
    results, failures = run_job(ranks, 'mmdevplug.cli.comm_test', arguments, timeout)
    if results is not None:
        return [
            *describe_results(results),
            *examine_listening(results['listening'], results['single_host']),
        ]
    why = f'a training of {ranks} processes would end or hang there.'
    return [section.error(one, why, _remedy(one)) for one in failures]


def run_job(
    ranks: int,
    module: str,
    arguments: Sequence[str],
    timeout: float,
    say: Callable[[str], None] = lambda stages: None,
) -> Tuple[Any, List[str]]:
    """Run a module in ranks of this host under torchrun, and end the job when it hangs.

    Besides ``arguments`` the module gets ``--timeout``, ``--progress`` with the folder for its
    :class:`~mmdevplug.checks.collectives_rank.Progress`, and ``--json`` with the file for its
    results. ``say`` is called with the stages of the ranks when one has changed.

    Returns:
        tuple: The results, None if there are none, and else what failed.
    """
    with tempfile.TemporaryDirectory(prefix='mmdevplug-doctor-') as name:
        folder = Path(name)
        written, output = folder / 'results.json', folder / 'output'
        command = [sys.executable, '-m', 'mmdevplug.cli.torchrun_agent', '--nnodes=1']
        command += [f'--nproc_per_node={ranks}', '--master_addr=127.0.0.1', '--master_port=0']
        command += ['-m', module, '--progress', name, '--json', str(written)]
        command += ['--timeout', str(timeout), *arguments]
        environ = {k: v for k, v in os.environ.items() if k not in stale_variables('none')}
        told = ['']

        def read_stages() -> str:
            stages = '; '.join(f'rank {r["rank"]}: {r["stage"]}' for r in _read_reports(folder))
            if stages != told[-1]:
                told[-1] = stages
                say(stages)
            return stages

        status = run_watched(command, output, read_stages, timeout + SLACK_SECONDS, environ)
        if written.exists():
            return json.loads(written.read_text(encoding='utf-8')), []
        text = output.read_text(encoding='utf-8', errors='replace')
        failures = list(_failures(_read_reports(folder), text, ranks, timeout))
    if not failures:
        last = text.strip().splitlines()[-1:] or ['it printed nothing']
        how = describe_end(status, timeout + SLACK_SECONDS)
        failures = [f'the job {how}: {last[0][:600]}']
    return None, failures


def _remedy(found: str) -> str:
    if ' failed in ' not in found:
        return 'sudo dmesg | tail  # names processes that were killed when memory was full'
    # Our own errors say what to do, as whole sentences.
    return '' if found.rstrip().endswith('.') else 'mmdevplug doctor --accelerator cpu'


def _read_reports(folder: Path) -> List[Dict[str, Any]]:
    """Read what the ranks reported last, in the order of ranks."""
    files = folder.glob('rank-*.json')
    reports = [json.loads(path.read_text(encoding='utf-8')) for path in files]
    return sorted(reports, key=lambda report: report['rank'])


def describe_results(results: Dict[str, Any]) -> Iterator[Finding]:
    """Report the results of :func:`mmdevplug.checks.collectives_rank.run_rank`."""
    for check in results['checks']:
        for problem in check['problems']:
            yield section.error(
                f'{check["name"]}: {problem}',
                'training needs this collective, with the values that ranks sent.',
                f"accelerator = dict(type={results['accelerator']!r}, backend='gloo')",
            )
    passed = [check for check in results['checks'] if check['status'] == 'pass']
    yield section.ok(
        f'{len(passed)} collectives are right: {results["world_size"]} ranks on '
        f'{", ".join(results["devices"])}, backend {results["backend"]!r}, which takes '
        f'{results["tensors_on"]} tensors',
        data=results,
    )


def _failures(
    reports: List[Dict[str, Any]], output: str, ranks: int, timeout: float
) -> Iterator[str]:
    """Name the ranks that failed by themselves, or for which the others waited."""
    own = [r for r in reports if r['error'] is not None and not _CAUSED.search(r['error'])]
    failed: Dict[Tuple[str, str], List[int]] = {}
    for report in own:
        failed.setdefault((report['stage'], report['error']), []).append(report['rank'])
    for (stage, error), alike in failed.items():
        word = 'ranks' if len(alike) > 1 else 'rank'
        yield f'{word} {", ".join(map(str, alike))} failed in {stage!r}: {error}'
    root = _ROOT_CAUSE.search(output)
    missing = sorted({*range(ranks)} - {report['rank'] for report in reports})
    if root is None and missing:
        yield f'rank(s) {", ".join(map(str, missing))} never began'
    if own:
        return
    if root is not None:
        status, rank = int(root.group(1)), int(root.group(2))
        report = next(
            (r for r in reports if r['rank'] == rank), dict(stage='starting', error=None)
        )
        # A rank that reported an error ended because of another rank.
        if status < 0 or report['error'] is None:
            yield f'rank {rank} in {report["stage"]!r}: {describe_end(status, timeout)}'
            return
    silent = [report for report in reports if report['error'] is None]
    for report in silent:
        if report['count'] == min(each['count'] for each in silent):
            yield (
                f'rank {report["rank"]} hangs in {report["stage"]!r}: the others got no answer '
                f'within {timeout:g} s'
            )

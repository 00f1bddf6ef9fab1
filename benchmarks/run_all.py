"""Measure every table of the docs on one commit, one after the other, and fill the pages.

    make benchmark-all [TABLES="grad_sync_cpu scale"]
    python benchmarks/run_all.py --list
    python benchmarks/run_all.py --quick --folder FOLDER [TABLE ...]

Each table gets a file in ``docs/benchmarks``, from which ``docs/benchmark_pages.py`` makes the
pages. A table that was measured on this commit is not measured again, so a run that was
interrupted continues. Sizes and rounds are chosen for an hour on two cores without other load.
``--quick`` takes tiny sizes: it shows that everything works, and its figures mean nothing.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

from result_file import ROOT, current_commit

PAGES = ROOT / 'docs' / 'benchmark_pages.py'
FOLDER = ROOT / 'docs' / 'benchmarks'
#: Runnable processes for each core above which other programs disturb the figures.
QUIET = 0.25
XLA = dict(PJRT_DEVICE='CPU')
UNOPTIMIZED = dict(XLA, XLA_FLAGS='--xla_backend_optimization_level=0')


class Table(NamedTuple):
    """A file of figures.

    Attributes:
        command (str): The script and its arguments.
        quick (str): Arguments that replace some of these for ``--quick``.
        minutes (float): About what it takes on two cores without other load.
        variables (dict): Of the environment. With ``PJRT_DEVICE`` it runs on torch_xla.
    """

    command: str
    quick: str
    minutes: float
    variables: Dict[str, str] = {}


TABLES: Dict[str, Table] = dict(
    import_time=Table('import_time.py --rounds 5', '--rounds 1', 0.5),
    device_guard=Table(
        'device_guard.py --rounds 15', '--rounds 1', 0.5, dict(OMP_NUM_THREADS='1')
    ),
    placement=Table('placement.py --rounds 5', '--models "GPT-2 XL" --blocks 200 --rounds 1', 2),
    grad_sync_cpu=Table(
        'grad_sync.py --device cpu --ranks 2 4 --layers 12 32 --rounds 6 --steps 3',
        '--ranks 2 --layers 2 --width 64 --rounds 3 --steps 1',
        3.5,
    ),
    grad_sync_card=Table(
        'grad_sync.py --device card --ranks 2 --layers 12 --rounds 5',
        '--layers 2 --width 64 --rounds 1 --steps 1',
        0.5,
    ),
    grad_sync_native=Table(
        'grad_sync.py --device native --ranks 2 --layers 12 --rounds 5',
        '--layers 2 --width 64 --rounds 1 --steps 1',
        0.5,
    ),
    grad_sync_xla=Table(
        'grad_sync.py --device xla --ranks 2 --layers 8 32 --rounds 5 --steps 3',
        '--layers 2 --width 64 --rounds 1 --steps 1',
        1.5,
        XLA,
    ),
    checkpoint_cpu=Table(
        'checkpoint.py --device cpu --rounds 2 --saves 3',
        '--megabytes 2 --rounds 1 --saves 2 --interval 2',
        3,
    ),
    checkpoint_xla=Table(
        'checkpoint.py --device xla --megabytes 10 100 --rounds 2 --saves 3',
        '--megabytes 2 --rounds 1 --saves 2 --interval 2',
        2,
        XLA,
    ),
    exchange=Table(
        'exchange.py --loopback --ranks 2 8 --samples 16 128 1024 --memory 1',
        '--ranks 2 --samples 16 --bytes 4',
        4.5,
    ),
    staged_cpu=Table(
        'staged_collectives.py --device cpu --ranks 2 4 8 --rounds 5 '
        '--kilobytes 64 1024 4096 16384 65536',
        '--ranks 2 --rounds 1 --kilobytes 64 1024',
        1.5,
    ),
    staged_card=Table(
        'staged_collectives.py --device card --ranks 2 4 --rounds 5 '
        '--kilobytes 64 1024 4096 16384 65536',
        '--ranks 2 --rounds 1 --kilobytes 64 1024',
        1,
    ),
    start_time=Table('start_time.py --nproc 2 --rounds 5', '--rounds 1', 2),
    scale=Table('scale.py --nproc 2 8 32', '--nproc 2', 5),
    # torchrun's ranks take 340 MB each, and 96 of them do not fit into 24 GB.
    scale_96=Table('scale.py --nproc 96 --kinds mmdevplug', '--nproc 2', 1.5),
    training_loop=Table(
        'training_loop.py --models segformer retinanet --blocks 7',
        '--models segformer --size 64 --length 1 --blocks 1',
        2,
    ),
    training_loop_xla=Table(
        'training_loop.py --device xla --models segformer --length 2 --blocks 7',
        '--size 64 --length 1 --blocks 1',
        2.5,
        dict(XLA, CPU_NUM_DEVICES='2'),
    ),
    sync_bn=Table(
        'sync_bn.py --length 3 --rounds 5',
        '--models segformer --size 32 --length 1 --rounds 1',
        3,
        dict(XLA, CPU_NUM_DEVICES='2'),
    ),
    sharding_small=Table('sharding.py --models gpt2-tiny --nproc 2 4', '--nproc 2 --iters 3', 1.5),
    sharding_large=Table(
        'sharding.py --models gpt2-medium --ways fsdp2 sharded --nproc 4',
        '--models gpt2-tiny --nproc 2 --ways sharded --iters 3',
        2.5,
    ),
    llama_lora=Table('llama_lora.py', '--iters 4', 2),
    spmd=Table(
        'spmd.py --chips 2 4 --models mlp resnet18 --iters 10',
        '--chips 2 --models mlp --iters 8',
        6,
        XLA,
    ),
    host_losses=Table(
        'host_losses.py --jobs 2 --device-limit 20',
        'fcn_class_weight --limit 300 --ways cpu auto',
        10,
        UNOPTIMIZED,
    ),
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('tables', nargs='*', metavar='TABLE', help='some tables alone; see --list')
    parser.add_argument('--list', action='store_true', help='show the tables and their times')
    parser.add_argument('--folder', type=Path, default=FOLDER, help='for the files of figures')
    parser.add_argument('--quick', action='store_true', help='tiny sizes, to try the command')
    parser.add_argument(
        '--xla-python', default='.venv-xla/bin/python', help='a Python that has torch_xla'
    )
    args = parser.parse_args()
    unknown = sorted(set(args.tables) - set(TABLES))
    if unknown:
        parser.error(f'unknown tables {unknown}: expected some of {", ".join(TABLES)}')
    if args.quick and args.folder.resolve() == FOLDER:
        parser.error(f'--quick needs a --folder other than {FOLDER}: no page may show its figures')
    return args


def command_of(table: Table, python: str, path: Path, quick: bool) -> List[str]:
    """The command line that measures a table."""
    script, *arguments = table.command.split()
    words = shlex.split(table.quick) if quick else []
    # Models come first, since options with several values would take them for more.
    models = [words.pop(0)] if words and not words[0].startswith('-') else []
    command = [python, str(ROOT / 'benchmarks' / script), *models, *arguments, *words]
    return [*command, '--json', str(path)]


def measured_on(path: Path) -> Optional[str]:
    """The commit of a file of figures, if there is one."""
    if not path.exists():
        return None
    return str(json.loads(path.read_text(encoding='utf-8'))['commit'])


def measure(name: str, args: argparse.Namespace, commit: str) -> float:
    """Measure a table and write its file; seconds that it took."""
    table, path = TABLES[name], args.folder / f'{name}.json'
    python = args.xla_python if 'PJRT_DEVICE' in table.variables else sys.executable
    environ = dict(os.environ, PYTHONPATH=str(ROOT), **table.variables)
    load, began = os.getloadavg()[0], time.time()
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, 'found.json')
        command = command_of(table, python, found, args.quick)
        subprocess.run(command, cwd=ROOT, env=environ, check=True)
        figures: Dict[str, Any] = json.loads(found.read_text(encoding='utf-8'))
    if figures['commit'] != commit and not args.quick:
        raise SystemExit(
            f'{name} was measured on commit {figures["commit"]}, but the run began on {commit}: '
            f'the checkout changed meanwhile. Go back to {commit}, or start anew on another.'
        )
    seconds = time.time() - began
    variables = ' '.join(f'{name}={value}' for name, value in table.variables.items())
    figures.update(command=f'{variables} {figures["command"]}'.strip())
    figures.update(seconds=round(seconds), load_before=round(load, 2), quick=args.quick)
    # Written whole or not at all: a file says that its table needs no measuring.
    part = path.with_suffix('.part')
    part.write_text(json.dumps(figures, indent=1) + '\n', encoding='utf-8')
    part.replace(path)
    return seconds


def warn_of_load() -> None:
    """Say so if other programs compute."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > QUIET * cores:
        print(
            f'The load is {load:.1f} on {cores} cores: other programs disturb the figures. For '
            f'figures that pages show, stop them and start again below {QUIET * cores:.1f}.',
            flush=True,
        )


def run(args: argparse.Namespace, commit: str) -> List[str]:
    """Measure what has not been measured on this commit; names of tables that failed."""
    asked = args.tables or list(TABLES)
    done = [name for name in asked if measured_on(args.folder / f'{name}.json') == commit]
    left = [name for name in TABLES if name in asked and name not in done]
    if done:
        print(f'measured on {commit} already: {", ".join(done)}')
    print(f'to measure: {", ".join(left) or "nothing"}', flush=True)
    took: Dict[str, float] = {}
    failed: List[str] = []
    for name in left:
        print(f'\n== {name}: {TABLES[name].command}', flush=True)
        try:
            took[name] = measure(name, args, commit)
        except subprocess.CalledProcessError as error:
            print(f'{name} failed with status {error.returncode}, see above', flush=True)
            failed.append(name)
    print()
    for name, seconds in took.items():
        print(f'{name:<20}{seconds / 60:6.1f} min')
    print(f'{"in all":<20}{sum(took.values()) / 60:6.1f} min', flush=True)
    return failed


def main() -> None:
    """Measure, fill the pages, and fail if a table failed."""
    args = parse_args()
    if args.list:
        for name, table in TABLES.items():
            print(f'{name:<20}{table.minutes:5.1f} min  {table.command}')
        minutes = sum(table.minutes for table in TABLES.values())
        print(f'{"all":<20}{minutes:5.1f} min by estimate, on two cores without other load')
        return
    commit = current_commit()
    if commit.endswith('+') and not args.quick:
        raise SystemExit(
            f'files differ from commit {commit[:-1]}, so no commit has what would be measured: '
            f'commit or stash them; `git status -uno` lists them (docs do not count).'
        )
    args.folder.mkdir(parents=True, exist_ok=True)
    warn_of_load()
    failed = run(args, commit)
    if not args.quick and args.folder.resolve() == FOLDER:
        subprocess.run([sys.executable, str(PAGES)], check=True)
    if failed:
        raise SystemExit(f'failed: {", ".join(failed)}. Start again to measure these alone.')


if __name__ == '__main__':
    main()

"""Jobs of real processes: right, wrong, failing, hanging and killed."""

import io
import itertools
import json
import re
import subprocess
import sys

import psutil
import pytest
import torch
from rich.console import Console
from torch import distributed as torch_dist

from mmdevplug.checks import collectives
from mmdevplug.checks.collectives_rank import SIZED, Ranks, _barrier, run_rank
from mmdevplug.checks.report import print_collectives
from mmdevplug.cli import comm_test
from mmdevplug.runner.init_device import init_device
from tests.jobs import ROOT
from tests.native import needs_native, run_native
from tests.needs_card import needs_card
from tests.ranks import free_port, run_ranks

from .running import environment, the

SMALL = dict(largest=16 << 10, rounds=2, timeout=60)


def look(accelerator, spoilt=None):
    if accelerator == 'zeta':
        import card

        card.install('zeta')
    if spoilt is not None:
        spoil(*spoilt)
    return run_rank('pytorch', accelerator, **SMALL)


def look_at_config(path):
    return run_rank('pytorch', config=path, **SMALL)['passed']


@pytest.mark.parametrize('written', ["'cpu'", "dict(type='cpu')"])
def test_accelerator_may_be_a_name_alone(tmp_path, written):
    config = tmp_path / 'config.py'
    config.write_text(f'accelerator = {written}\n')
    assert run_ranks(look_at_config, 1, str(config)) == [True]


def spoil(name, rank, right=0):
    """Let a collective of one rank arrive with a wrong value, after the first calls."""
    original = getattr(torch_dist, name)
    calls = itertools.count()

    def spoilt(tensor, *args, **kwargs):
        work = original(tensor, *args, **kwargs)
        # Not what ranks exchange to compare their results.
        if torch_dist.get_rank() == rank and work is None and tensor.is_floating_point():
            tensor[-1] += next(calls) >= right
        return work

    setattr(torch_dist, name, spoilt)


@pytest.mark.parametrize(('accelerator', 'where'), [('cpu', 'cpu'), ('zeta', 'zeta:{}')])
def test_every_collective_is_right_and_timed(accelerator, where):
    everyone = run_ranks(look, 3, accelerator)
    assert everyone[0] == everyone[1] == everyone[2]
    results = everyone[0]
    assert results['passed']
    assert results['devices'] == [where.format(rank) for rank in range(3)]
    assert results['tensors_on'] == accelerator
    checks = {check['name']: check for check in results['checks']}
    assert checks.keys() == {*SIZED, 'barrier'}
    for name, check in checks.items():
        assert check['status'] == 'pass', check
        sizes = [point['bytes'] for point in check['points']]
        assert sizes == ([1 << 10, 16 << 10] if name in SIZED else [0])
        assert all(point['seconds'] > 0 for point in check['points'])
    if 'master_listen_fd' in (torch_dist.TCPStore.__init__.__doc__ or ''):  # can be held to one
        assert {one['address'] for one in results['listening']} <= {'127.0.0.1', '::1'}
        assert {'rank 0', 'rank 1', 'rank 2'} <= {one['who'] for one in results['listening']}


@needs_native
def test_a_vendors_backend_is_tried_with_tensors_of_its_device():
    everyone = run_native('npu', look, 3, 'npu')
    assert everyone[0] == everyone[1] == everyone[2]
    results = everyone[0]
    assert results['backend'] == 'hccl'
    assert results['tensors_on'] == 'npu'
    assert {check['name']: check['status'] for check in results['checks']} == dict.fromkeys(
        ['barrier', *SIZED], 'pass'
    )


# The third run of the first size is its last.
@pytest.mark.parametrize('spoilt', [('broadcast', 1), ('all_reduce', 2), ('all_reduce', 0, 2)])
def test_wrong_value_on_one_rank_is_a_failure_on_all(spoilt):
    for results in run_ranks(look, 3, 'cpu', spoilt):
        assert not results['passed']
        (failed,) = [check for check in results['checks'] if check['status'] == 'fail']
        assert failed['name'] == spoilt[0]
        assert f'rank {spoilt[1]} holds' in failed['problems'][0]
    (error,) = [f for f in collectives.describe_results(results) if f.level == 'error'][:1]
    assert f'rank {spoilt[1]} holds' in error.found


def test_collective_that_a_backend_lacks_is_a_failure_and_the_others_are_tried():
    for results in run_ranks(look_without_broadcast, 3):
        assert not results['passed']
        checks = {check['name']: check for check in results['checks']}
        assert checks.keys() == {*SIZED, 'barrier'}
        failed = checks.pop('broadcast')
        assert {check['status'] for check in checks.values()} == {'pass'}
        assert failed['status'] == 'fail'
        assert failed['points'] == []
        (problem,) = failed['problems']
        assert "backend 'gloo' does not offer it: Backend zeta does not support" in problem
    error = the(collectives.describe_results(results), 'error', 'broadcast')
    assert "backend 'gloo'" in error.found
    printed = Console(file=io.StringIO(), width=200)
    print_collectives(results, printed)
    assert 'broadcast: ' in printed.file.getvalue()


def look_without_broadcast():
    original = torch_dist.broadcast

    def broadcast(tensor, *args, **kwargs):
        # The model wrapper needs it as well.
        if sys._getframe(1).f_code.co_filename.endswith('collectives_rank.py'):
            raise RuntimeError('Backend zeta does not support broadcast')
        return original(tensor, *args, **kwargs)

    torch_dist.broadcast = broadcast
    return run_rank('pytorch', 'cpu', **SMALL)


def test_barrier_is_checked_each_time():
    assert run_ranks(look_at_barriers, 1) == [['rank 0 saw 1 ranks arrive, expected 2']]


def look_at_barriers():
    ranks = Ranks(init_device('pytorch', 'cpu'))
    case = _barrier(ranks, 1)
    case.run()
    assert case.problems() == []
    ranks.size = 2
    case.run()
    return case.problems()


def test_result_on_another_device_or_of_another_shape_is_a_failure():
    (results,) = run_ranks(look_at_misplaced, 1)
    assert 'is on cpu, expected zeta:0' in results[0]
    assert 'has shape (1,), expected (3,)' in results[1]


def look_at_misplaced():
    import card

    from mmdevplug.accelerators import DeviceContext, get_accelerator
    from mmdevplug.environments.launch_variables import LaunchEnv

    card.install('zeta')
    accelerator = get_accelerator('zeta')
    device = accelerator.device(0)
    context = DeviceContext(accelerator, '', device, LaunchEnv('none'), 'gloo')
    ranks, expected = Ranks(context), torch.ones(3)
    # All ones, but on the wrong device; the right device, but of a shape that broadcasts.
    return [
        *ranks.compare(expected, expected, device),
        *ranks.compare(torch.ones(1, device=device), expected, device),
    ]


# failures ---------------------------------------------------------------------------------------

ON_RANK_1 = "import os, time\nif os.environ.get('RANK') == '1':\n    {}\n"


def run_job(folder, monkeypatch, what, timeout=15):
    (folder / 'trouble.py').write_text(ON_RANK_1.format(what))
    config = folder / 'trouble_config.py'
    config.write_text("custom_imports = dict(imports=['trouble'], allow_failed_imports=False)\n")
    monkeypatch.setenv('PYTHONPATH', environment(folder)['PYTHONPATH'])
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    options = dict(config=str(config), accelerator='cpu')
    findings = collectives.examine(3, options, largest_mb=0.01, rounds=1, timeout=timeout)
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert left == []
    assert not [p for p in psutil.process_iter() if str(config) in _words(p)]
    return findings


def _words(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []  # it has ended


@pytest.mark.long
@pytest.mark.parametrize(
    ('what', 'told'),
    [
        ("raise ValueError('the card is on fire')", ['rank 1 failed', 'the card is on fire']),
        ('os._exit(3)', ['rank 1', 'exit status 3']),
        ('os.kill(os.getpid(), 9)', ['rank 1', 'SIGKILL']),
        ('time.sleep(1000)', ['rank 1 hangs in', 'loading the config', '15 s']),
    ],
)
def test_rank_that_fails_or_hangs_is_named_and_nothing_is_left_over(
    tmp_path, monkeypatch, what, told
):
    found = the(run_job(tmp_path, monkeypatch, what), 'error').found
    for word in told:
        assert word in found


@pytest.mark.long
def test_rank_that_stops_in_the_middle_is_named(tmp_path, monkeypatch):
    # From its own thread, when the collectives have begun.
    stop = (
        'import signal\n'
        '    from mmdevplug.checks.collectives_rank import Progress\n'
        '    enter = Progress.enter\n'
        '    def stop(self, stage):\n'
        '        enter(self, stage)\n'
        "        if stage.startswith('broadcast'):\n"
        '            os.kill(os.getpid(), signal.SIGSTOP)\n'
        '    Progress.enter = stop'
    )
    found = the(run_job(tmp_path, monkeypatch, stop), 'error').found
    assert "rank 1 hangs in 'broadcast" in found


def test_what_all_ranks_say_is_said_once():
    reports = [dict(rank=rank, stage='starting', error='E: no card') for rank in range(3)]
    reports.append(dict(rank=3, stage='starting', error='E: another'))
    told = list(collectives._failures(reports, '', 4, 30))
    assert told == [
        "ranks 0, 1, 2 failed in 'starting': E: no card",
        "rank 3 failed in 'starting': E: another",
    ]


@needs_card
def test_more_ranks_than_devices_are_refused(tmp_path, monkeypatch):
    config = tmp_path / 'zeta.py'
    config.write_text("custom_imports = dict(imports=['fakecard_from_env'])\n")
    for name, value in environment(FAKECARD_NAME='zeta', FAKECARD_COUNT='2').items():
        monkeypatch.setenv(name, value)
    options = dict(config=str(config), accelerator='zeta')
    findings = collectives.examine(3, options, 0.01, 1, 120)  # the first run compiles the card
    errors = [f.found for f in findings if f.level == 'error']
    assert any(re.match('ranks? (., )*2 failed', f) for f in errors), errors
    assert any('sees 2 zeta device(s)' in f for f in errors)


# the tool ---------------------------------------------------------------------------------------


def test_tool_under_torchrun(tmp_path):
    results = tmp_path / 'results.json'
    command = [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node=2']
    command += [f'--master_port={free_port()}', 'tools/comm_test.py', '--accelerator', 'cpu']
    command += ['--largest-mb', '0.01', '--rounds', '1', '--json', str(results)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('gradient averaging') == 1  # rank 0 speaks
    assert json.loads(results.read_text())['passed']


def test_a_rank_that_is_gone_when_the_test_has_passed_is_no_failure(monkeypatch):
    def gone():
        raise RuntimeError('Connection reset by peer')

    ranks = dict(RANK='1', LOCAL_RANK='1', WORLD_SIZE='2', LOCAL_WORLD_SIZE='2')
    for name, value in dict(ranks, MASTER_ADDR='127.0.0.1', MASTER_PORT='29500').items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(comm_test, 'run_rank', lambda *_: dict(passed=True))
    monkeypatch.setattr(comm_test.torch_dist, 'destroy_process_group', gone)
    assert comm_test.main([]) is None


@pytest.mark.long
def test_tool_under_mpi_and_a_rank_that_never_comes(tmp_path):
    """Open MPI's variables, set by hand."""
    port = free_port()
    for present, status, timeout in ((2, 0, '60'), (1, 1, '5')):
        command = [sys.executable, 'tools/comm_test.py', '--launcher', 'mpi']
        command += ['--accelerator', 'cpu', '--largest-mb', '0.01', '--rounds', '1']
        ranks = [
            subprocess.Popen(
                [*command, '--timeout', timeout],
                cwd=ROOT,
                env=environment(
                    OMPI_COMM_WORLD_RANK=str(rank),
                    OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
                    OMPI_COMM_WORLD_SIZE='2',
                    OMPI_COMM_WORLD_LOCAL_SIZE='2',
                    MASTER_ADDR='127.0.0.1',
                    MASTER_PORT=str(port),
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(present)
        ]
        outputs = [rank.communicate(timeout=200) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [status] * present, outputs
    assert 'all 2 ranks were started' in outputs[0][1]


@pytest.mark.parametrize('option', ['--rounds', '--timeout', '--largest-mb'])
def test_impossible_numbers_are_refused(option):
    command = [sys.executable, 'tools/comm_test.py', option, '0']
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert f'{option} 0: expected a number above 0' in done.stderr

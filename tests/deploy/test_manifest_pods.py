"""What the command of a manifest starts in each pod, under the variables that its operator sets.

The variables are those in the sources of Kubeflow Trainer 2.3, the training operator 1.9 and
Volcano 1.9.
"""

import pytest

from mmdevplug.cli import train
from tests.cli.starting import NoRanks
from tests.jobs import ROOT

from .test_manifests import DOCUMENTS, find


def train_job():
    """Yield the command of each pod of the TrainJob, and its variables."""
    document = DOCUMENTS['TrainJob']
    trainer, name = document['spec']['trainer'], document['metadata']['name']
    for index in range(trainer['numNodes']):
        variables = dict(
            PET_NNODES=str(trainer['numNodes']),
            PET_NPROC_PER_NODE=str(trainer['numProcPerNode']),
            PET_NODE_RANK=str(index),
            PET_MASTER_ADDR=f'{name}-node-0-0.{name}',
            PET_MASTER_PORT='29500',
        )
        yield trainer['command'], variables


def commands_of(replicas):
    return [
        pods['template']['spec']['containers'][0]['command']
        for pods in replicas
        for _ in range(pods['replicas'])
    ]


def pytorch_job():
    """The same of the PyTorchJob, whose WORLD_SIZE counts processes and RANK pods."""
    document = DOCUMENTS['PyTorchJob']
    spec, name = document['spec'], document['metadata']['name']
    commands = commands_of(spec['pytorchReplicaSpecs'][kind] for kind in ('Master', 'Worker'))
    address = dict(MASTER_ADDR=f'{name}-master-0', MASTER_PORT='23456')
    for rank, command in enumerate(commands):
        variables = dict(
            address,
            **{f'PET_{key}': value for key, value in address.items()},
            WORLD_SIZE=str(len(commands) * int(spec['nprocPerNode'])),
            RANK=str(rank),
            PET_NODE_RANK=str(rank),
            PET_NPROC_PER_NODE=spec['nprocPerNode'],
            PET_NNODES=str(len(commands)),
        )
        yield command, variables


def volcano_job():
    """The same of the job of Volcano, which says nothing of processes."""
    document = DOCUMENTS['Job']
    name, commands = document['metadata']['name'], commands_of(document['spec']['tasks'])
    address = dict(MASTER_ADDR=f'{name}-master-0.{name}', MASTER_PORT='23456')
    for rank, command in enumerate(commands):
        yield command, dict(address, WORLD_SIZE=str(len(commands)), RANK=str(rank))


@pytest.mark.parametrize('job', [train_job, pytorch_job, volcano_job])
def test_pods_join_one_job(monkeypatch, job):
    started = NoRanks(monkeypatch)
    pods = list(job())
    for rank, (command, environ) in enumerate(pods):
        with monkeypatch.context() as variables:
            for name, value in dict(environ, KUBERNETES_SERVICE_HOST='10.0.0.1').items():
                variables.setenv(name, value)
            arguments = [word.replace('/opt/mmdevplug', str(ROOT)) for word in command[2:]]
            train.main([*arguments, '--oversubscribe'])
        address = environ.get('MASTER_ADDR') or environ['PET_MASTER_ADDR']
        port = environ.get('MASTER_PORT') or environ['PET_MASTER_PORT']
        assert started.told == (8, 2, 2, 0, 'static', f'{address}:{port}', rank)
    assert len(pods) == 2


def test_every_command_is_started_here():
    commands = [
        command for kind in ('TrainJob', 'PyTorchJob', 'Job')
        for command in find(DOCUMENTS[kind], 'command')
    ]  # fmt: skip
    started = [command for job in (train_job, pytorch_job, volcano_job) for command, _ in job()]
    assert all(command in started for command in commands)

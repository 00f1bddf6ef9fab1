"""What the manifests may hold: the parts of Kubernetes' API that they use.

Written by hand from the API references of Kubernetes 1.33, Kubeflow Trainer 2.0 to 2.3, the
training operator 1.8 and 1.9, and Volcano 1.8 and later. In a shape a class stands for a value of
it, a tuple for one of several values, a list for a list of its only item, and ``Map`` for any
names. Names that end in ``?`` may be left out.
"""

from typing import NamedTuple


class Map(NamedTuple):
    """A dict of any names."""

    value: object


def check(value, shape, path=''):
    """Compare a part of a manifest with its shape; AssertionError if they differ."""
    if isinstance(shape, Map):
        assert isinstance(value, dict), f'{path}: {value!r}'
        for key, each in value.items():
            check(each, shape.value, f'{path}.{key}')
    elif isinstance(shape, dict):
        assert isinstance(value, dict), f'{path}: {value!r}'
        names = {name.rstrip('?'): inner for name, inner in shape.items()}
        assert set(value) <= set(names), f'{path}: unknown {set(value) - set(names)}'
        needed = {name for name in shape if not name.endswith('?')}
        assert needed <= set(value), f'{path}: missing {needed - set(value)}'
        for key, each in value.items():
            check(each, names[key], f'{path}.{key}')
    elif isinstance(shape, list):
        assert isinstance(value, list), f'{path}: {value!r}'
        for index, each in enumerate(value):
            check(each, shape[0], f'{path}[{index}]')
    elif isinstance(shape, tuple):
        assert value in shape, f'{path}: {value!r}, expected one of {shape}'
    else:
        assert type(value) is shape, f'{path}: {value!r}, expected {shape.__name__}'


RESOURCES = {'limits?': Map(str), 'requests?': Map(str)}
ENV = [{'name': str, 'value': str}]
CONTAINER = {
    'name': str,
    'image': str,
    'command?': [str],
    'args?': [str],
    'env?': ENV,
    'resources?': RESOURCES,
    'securityContext?': {'readOnlyRootFilesystem?': bool},
    'volumeMounts?': [{'name': str, 'mountPath': str}],
}
POD = {
    'spec': {
        'restartPolicy?': ('Always', 'OnFailure', 'Never'),
        'terminationGracePeriodSeconds?': int,
        'shareProcessNamespace?': bool,
        'securityContext?': {'runAsNonRoot?': bool, 'runAsUser?': int, 'fsGroup?': int},
        'containers': [CONTAINER],
        'volumes?': [
            {
                'name': str,
                'persistentVolumeClaim?': {'claimName': str},
                'emptyDir?': {'medium?': ('', 'Memory'), 'sizeLimit?': str},
            }
        ],
    }
}
METADATA = {'name': str, 'labels?': Map(str)}

TRAINING_RUNTIME = {
    'apiVersion': ('trainer.kubeflow.org/v1alpha1',),
    'kind': ('TrainingRuntime',),
    'metadata': METADATA,
    'spec': {
        'mlPolicy': {'numNodes': int, 'torch': {}},
        'template': {
            'spec': {
                'failurePolicy?': {'maxRestarts': int},
                'replicatedJobs': [
                    {
                        'name': str,
                        'template': {'metadata': {'labels': Map(str)}, 'spec': {'template': POD}},
                    }
                ],
            }
        },
    },
}
TRAIN_JOB = {
    'apiVersion': ('trainer.kubeflow.org/v1alpha1',),
    'kind': ('TrainJob',),
    'metadata': METADATA,
    'spec': {
        'runtimeRef': {
            'apiGroup': ('trainer.kubeflow.org',),
            'kind': ('TrainingRuntime', 'ClusterTrainingRuntime'),
            'name': str,
        },
        'trainer': {
            'image?': str,
            'command': [str],
            'args?': [str],
            'env?': ENV,
            'numNodes?': int,
            'numProcPerNode?': int,
            'resourcesPerNode?': RESOURCES,
        },
    },
}
REPLICAS = {
    'replicas': int,
    'restartPolicy': ('Always', 'OnFailure', 'Never', 'ExitCode'),
    'template': POD,
}
PYTORCH_JOB = {
    'apiVersion': ('kubeflow.org/v1',),
    'kind': ('PyTorchJob',),
    'metadata': METADATA,
    'spec': {
        'nprocPerNode?': str,
        'runPolicy?': {'cleanPodPolicy?': ('All', 'Running', 'None'), 'backoffLimit?': int},
        'pytorchReplicaSpecs': {'Master?': REPLICAS, 'Worker?': REPLICAS},
    },
}
POLICIES = [
    {
        'event': ('PodEvicted', 'PodFailed', 'TaskCompleted', 'TaskFailed', 'Unknown', '*'),
        'action': ('RestartJob', 'RestartTask', 'CompleteJob', 'AbortJob', 'TerminateJob'),
    }
]
VOLCANO_JOB = {
    'apiVersion': ('batch.volcano.sh/v1alpha1',),
    'kind': ('Job',),
    'metadata': METADATA,
    'spec': {
        'schedulerName': str,
        'minAvailable': int,
        'maxRetry?': int,
        'plugins': {'pytorch': [str]},
        'policies?': POLICIES,
        'tasks': [{'name': str, 'replicas': int, 'policies?': POLICIES, 'template': POD}],
    },
}
SHAPES = {
    'TrainingRuntime': TRAINING_RUNTIME,
    'TrainJob': TRAIN_JOB,
    'PyTorchJob': PYTORCH_JOB,
    'Job': VOLCANO_JOB,
}

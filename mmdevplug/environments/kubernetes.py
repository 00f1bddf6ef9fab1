"""The variables of a pod of Kubernetes, whose processes are still to be started.

Kubeflow's PyTorchJob and TrainJob, Volcano, Alibaba's PAI-DLC and Baidu's AIHC set ``RANK`` and
``WORLD_SIZE`` for each pod, or torchrun's options as ``PET_*``, or both.
"""

import re
from typing import Dict, Mapping, Optional, Tuple, Union

from mmdevplug.config.launch_options import COUNTED
from mmdevplug.errors import LaunchError

from .base import (
    DEFAULT_PORT,
    Environment,
    Hosts,
    LaunchEnv,
    check_address,
    check_port,
    format_variables,
)
from .loopback import is_loopback
from .stale import AGENT_VARIABLES, TORCHRUN_VARIABLES, stale_variables, unset_line

#: What torchrun reads in place of its options; the first ones say that there is a job.
_MARKS = ('PET_NNODES', 'PET_NODE_RANK', 'PET_NPROC_PER_NODE', 'PET_RDZV_ENDPOINT')
_OPTIONS = (*_MARKS, 'PET_MASTER_ADDR', 'PET_MASTER_PORT', 'PET_RDZV_BACKEND', 'PET_RDZV_ID')


class Kubernetes(Environment):
    """A pod, which an operator told how many pods there are and which of them it is."""

    name = 'kubernetes'
    command = 'an operator of Kubernetes'
    names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'PET_NPROC_PER_NODE')
    per_host = True

    def detect(self) -> Dict[str, str]:
        """Recognize a pod that is part of a job."""
        names = [name for name in self.environ if re.fullmatch(r'VC_\w+_HOSTS', name)]
        if self._has_rank() or any(name in self.environ for name in _MARKS):
            names = ['RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'] if self._trusted() else []
            names += _OPTIONS
        elif not any(',' in self.environ[name] for name in names):
            return {}  # Volcano's, of one host
        return {name: self.environ[name] for name in names if name in self.environ}

    def _trusted(self) -> bool:
        """Whether RANK and WORLD_SIZE are this pod's, and not of a process of torchrun."""
        names = ('LOCAL_RANK', *TORCHRUN_VARIABLES, *AGENT_VARIABLES)
        found = {name: self.environ[name] for name in names if name in self.environ}
        # What LaunchEnv.export has written for the only process of a pod.
        return not found or found == dict(LOCAL_RANK='0', LOCAL_WORLD_SIZE='1')

    def _has_rank(self) -> bool:
        there = [name in self.environ for name in ('RANK', 'WORLD_SIZE')]
        complete = any(there) if 'KUBERNETES_SERVICE_HOST' in self.environ else all(there)
        return complete and self._trusted()

    def world_size(self) -> int:
        """Read the number of pods, for one process in each."""
        return self.read().world_size

    def rank(self) -> int:
        """Read the index of this pod."""
        return self.read().rank

    def local_world_size(self) -> Optional[int]:
        """Return 1: there is one process."""
        return 1

    def read(self, port: Optional[int] = None) -> LaunchEnv:
        """Read the place of the only process of this pod."""
        hosts = self.hosts()
        if not self.detect() or hosts.node_rank is None or hosts.nproc not in (None, 1):
            raise LaunchError(
                f'launcher={self.name!r} is for one process in each pod, which RANK or '
                f'PET_NODE_RANK numbers, but found {self.describe_variables() or "neither"}. '
                'Start several with mmdevplug train CONFIG, or torchrun SCRIPT --launcher '
                'pytorch; pass --launcher none for a single process.'
            )
        found = hosts.master_port if port is None else check_port(port, 'env_cfg.dist_cfg.port')
        env = LaunchEnv(self.name, hosts.node_rank, 0, int(hosts.nnodes))
        env = env._replace(master_port=found or DEFAULT_PORT)
        return env if env.world_size == 1 else env._replace(master_addr=str(hosts.master_addr))

    def hosts(self) -> Hosts:
        """Read the pods of the job, the index of this one and the processes of each."""
        found = self.detect()
        if not found:
            return Hosts()
        if all(name.startswith('VC_') for name in found):
            raise self._refuse('RANK', "this pod's, which Volcano's plugin `pytorch` sets")
        words, least, most = self._count(found)
        job = Hosts(least, 0, self._processes(found))
        job = job._replace(max_restarts=self.number('PET_MAX_RESTARTS', default=None))
        if most > least:
            address, number = self._rendezvous(found)
            job = job._replace(nnodes=words, node_rank=None)
            port = 'PET_RDZV_ENDPOINT'
        else:
            address, number, port = self._meeting_place(found)
            job = job._replace(node_rank=self._index(found, least))
        if job.nnodes == 1:
            return job
        if not address:
            raise self._refuse('MASTER_ADDR', 'the name or the address of the first pod')
        job = job._replace(master_addr=check_address(address, 'MASTER_ADDR'))
        return job._replace(master_port=check_port(number or DEFAULT_PORT, port))

    def _count(self, found: Mapping[str, str]) -> Tuple[str, int, int]:
        """How many pods there are, in words, at least and at most; 0 where that is fixed."""
        # Kubeflow counts processes in WORLD_SIZE, others pods.
        words = _text(found, 'PET_NNODES') or _text(found, 'WORLD_SIZE')
        if not any(name in found for name in ('RANK', 'PET_NODE_RANK', 'PET_MASTER_ADDR')):
            words = words or '1'
        match = re.fullmatch('([0-9]{1,9})(?::([0-9]{1,9}))?', words)
        least, most = (int(one or 0) for one in match.groups()) if match else (0, 0)
        if least < 1 or 0 < most < least:
            of_torchrun = _text(found, 'PET_NNODES') or 'WORLD_SIZE' not in found
            name = 'PET_NNODES' if of_torchrun else 'WORLD_SIZE'
            raise self._refuse(name, 'the number of pods, such as 2, or as PET_NNODES 1:3')
        return words, least, most

    def _processes(self, found: Mapping[str, str]) -> Union[None, int, str]:
        """How many processes a pod has: a number, a word of torchrun, or None."""
        nproc = _text(found, 'PET_NPROC_PER_NODE') or None
        if nproc is None or nproc in COUNTED:
            return nproc
        if self.number('PET_NPROC_PER_NODE') < 1:
            raise self._refuse('PET_NPROC_PER_NODE', '1 or more, or auto')
        return int(nproc)

    def _rendezvous(self, found: Mapping[str, str]) -> Tuple[str, str]:
        """The address and the port where pods meet that may join and leave."""
        address, _, number = _text(found, 'PET_RDZV_ENDPOINT').rpartition(':')
        if not address or _text(found, 'PET_RDZV_BACKEND') not in ('c10d', ''):
            raise self._refuse('PET_RDZV_BACKEND', 'c10d, with PET_RDZV_ENDPOINT=HOST:PORT')
        return address, number

    def _meeting_place(self, found: Mapping[str, str]) -> Tuple[str, str, str]:
        """The address and the port of the first pod, and the variable of the port."""
        port = 'PET_MASTER_PORT' if _text(found, 'PET_MASTER_PORT') else 'MASTER_PORT'
        given = [_text(found, name) for name in ('PET_MASTER_ADDR', 'MASTER_ADDR')]
        given = [one for one in given if one]
        # Some operators call the first pod localhost in one of the two.
        address = ([one for one in given if not is_loopback(one)] or given or [''])[0]
        return address, _text(found, port), port

    def _index(self, found: Mapping[str, str], pods: int) -> int:
        """The index of this pod."""
        indices = {_text(found, name) for name in ('PET_NODE_RANK', 'RANK') if name in found}
        index = indices.pop() if len(indices) == 1 else '' if indices or pods > 1 else '0'
        if re.fullmatch('[0-9]{1,9}', index) is None or int(index) >= pods:
            name = 'RANK' if 'RANK' in found else 'PET_NODE_RANK'
            raise self._refuse(name, f'0 to {pods - 1}, another in each of {pods} pods')
        return int(index)

    def refuse_to_run_alone(self) -> None:
        """See :meth:`Environment.refuse_to_run_alone`."""
        pods = self.hosts().nnodes
        if pods == 1:
            return
        found = self.detect()
        stale = {**stale_variables('none', self.environ), **found}
        raise LaunchError(
            f'{format_variables(found)} say that this process is in one of {pods} pods of a job '
            'of Kubernetes, but no launcher is named: it would train alone. To join the others, '
            'start in each pod: mmdevplug train CONFIG, which reads them; or a script of your '
            'own: torchrun with --nnodes, --node_rank, --master_addr, and SCRIPT --launcher '
            f'pytorch. For this host alone: {unset_line(stale)}'
        )

    def _refuse(self, name: str, expected: str) -> LaunchError:
        found = self.detect()
        return LaunchError(
            f'{format_variables(found)} contradict each other or lack something: expected {name} '
            f'to be {expected}. They come from {self.command}: correct the job, or give --nproc, '
            f'--nnodes, --node-rank and --master-addr; if they are left over, for a job of this '
            f'host alone: {unset_line(found)}'
        )


def _text(found: Mapping[str, str], name: str) -> str:
    return found.get(name, '').strip()

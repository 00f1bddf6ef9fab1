"""The variables of a pod of Kubernetes, whose processes are still to be started.

Kubeflow's PyTorchJob and TrainJob, Volcano, Alibaba's PAI-DLC and Baidu's AIHC set ``RANK`` and
``WORLD_SIZE`` for each pod, or torchrun's options as ``PET_*``, or both.
"""

import os
import re
import socket
from typing import Dict, List, Mapping, Optional, Tuple, Union

from mmdevplug.config.fields import shortened
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
        """Recognize a pod that is part of a job.

        ``RANK`` is a pod's if nothing that torchrun sets for each of its processes is there.
        """
        names: Tuple[str, ...] = ()
        if self._has_rank():
            names += ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')
        if any(name in self.environ for name in _MARKS):
            names += _OPTIONS
        if not names and self._has_rank_of_process():
            names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'KUBERNETES_SERVICE_HOST')
        found = {name: self.environ[name] for name in names if name in self.environ}
        return found or self._volcano()

    # the questions, for one process in each pod -------------------------------------------------

    def world_size(self) -> int:
        """Read the number of pods."""
        return self.read().world_size

    def rank(self) -> int:
        """Read the index of this pod."""
        return self.read().rank

    def local_rank(self) -> int:
        """Return 0: there is one process."""
        return 0

    def local_world_size(self) -> Optional[int]:
        """Return 1: there is one process."""
        return 1

    def node_rank(self) -> Optional[int]:
        """Read the index of this pod, None where pods are numbered as they join."""
        return self.hosts().node_rank

    def read(self, port: Optional[int] = None) -> LaunchEnv:
        """Read the place of the only process of this pod."""
        if not self.detect():
            raise LaunchError(
                f"RANK is not set, but launcher={self.name!r} expects a pod's index there, or "
                f'PET_NODE_RANK. Start the job with {self.command}, or pass --launcher none for a '
                f'single process.'
            )
        hosts = self.hosts()
        if hosts.rendezvous or hosts.nproc not in (None, 1):
            raise LaunchError(
                f'launcher={self.name!r} is for one process in each pod, but '
                f'{self.describe_variables()} ask for several, or for pods that come and go. '
                'Start them: mmdevplug train CONFIG, or torchrun SCRIPT --launcher pytorch.'
            )
        env = LaunchEnv(self.name, hosts.node_rank or 0, 0, int(hosts.nnodes))
        if env.world_size > 1:
            env = env._replace(master_addr=hosts.master_addr)
        found = hosts.master_port if port is None else check_port(port, 'env_cfg.dist_cfg.port')
        return env._replace(master_port=found or DEFAULT_PORT)

    # hosts --------------------------------------------------------------------------------------

    def hosts(self) -> Hosts:
        """Read the pods of the job, the index of this one and the processes of each."""
        found = self.detect()
        if 'LOCAL_RANK' in found:
            raise LaunchError(
                f'{format_variables(found)}: LOCAL_RANK says that a launcher started this process '
                'in the pod, but none is named. If one did, pass --launcher pytorch; if not, '
                "RANK is the pod's and LOCAL_RANK is left over: "
                f'{unset_line(_per_process(self.environ))}'
            )
        if not found:
            return Hosts()
        if all(name.startswith('VC_') for name in found):
            return self._volcano_hosts(found)
        nproc = self._nproc()
        nnodes = self._nnodes(nproc)
        restarts = self.number('PET_MAX_RESTARTS', default=None)
        rendezvous = self._rendezvous(nnodes)
        if rendezvous:
            return Hosts(nnodes, None, nproc, max_restarts=restarts, rendezvous=rendezvous)
        node_rank = self._node_rank(int(nnodes))
        if nnodes == 1:
            return Hosts(nproc=nproc, max_restarts=restarts)
        port = self._either('PET_MASTER_PORT', 'MASTER_PORT')
        return Hosts(
            nnodes=nnodes,
            node_rank=node_rank,
            nproc=nproc,
            master_addr=check_address(self._address(), 'MASTER_ADDR'),
            master_port=check_port(self.number(port), port) if port else DEFAULT_PORT,
            max_restarts=restarts,
        )

    def _has_rank(self) -> bool:
        """Whether RANK and WORLD_SIZE are this pod's; in a pod one of them asks for the other."""
        there = [name in self.environ for name in ('RANK', 'WORLD_SIZE')]
        complete = any(there) if 'KUBERNETES_SERVICE_HOST' in self.environ else all(there)
        return complete and not _per_process(self.environ)

    def _has_rank_of_process(self) -> bool:
        """Whether a launcher may run this in a pod; torchrun's own variables are left over."""
        names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'KUBERNETES_SERVICE_HOST')
        of_torchrun = any(name in self.environ for name in AGENT_VARIABLES)
        there = all(name in self.environ for name in names)
        return there and not of_torchrun and self.text('WORLD_SIZE') != '1'

    def _nproc(self) -> Union[None, int, str]:
        word = self.text('PET_NPROC_PER_NODE')
        if word in COUNTED:
            return word
        if not word:
            return None
        count = self.number('PET_NPROC_PER_NODE')
        if count < 1:
            raise LaunchError(
                f'PET_NPROC_PER_NODE={count}: expected 1 or more processes, or one of '
                f'{", ".join(COUNTED)}. Correct the job, or: unset PET_NPROC_PER_NODE'
            )
        return count

    def _nnodes(self, nproc: Union[None, int, str]) -> Union[int, str]:
        words = self.text('PET_NNODES')
        nnodes: Union[None, int, str] = None
        if words:
            match = re.fullmatch('([0-9]{1,9})(?::([0-9]{1,9}))?', words)
            least, most = (int(one or 0) for one in match.groups()) if match else (0, 0)
            if least < 1 or (most and most < least):
                raise LaunchError(
                    f'PET_NNODES={shortened(words)}: expected a number of pods such as 2, or the '
                    f'least and the most such as 1:3. Correct the job, or: unset PET_NNODES'
                )
            nnodes = words if most > least else least
        if not self._has_rank():
            if nnodes is None and (self.text('PET_NODE_RANK') or self.text('PET_MASTER_ADDR')):
                raise self._disagree('PET_NNODES', 'the number of pods')
            return nnodes or 1
        size = self.number('WORLD_SIZE')
        # Kubeflow counts processes here, others pods.
        factor = nproc if isinstance(nproc, int) else 1
        if size < 1 or (isinstance(nnodes, int) and size not in (nnodes, nnodes * factor)):
            raise self._disagree('WORLD_SIZE', 'the number of pods or of processes')
        return size if nnodes is None else nnodes

    def _node_rank(self, nnodes: int) -> int:
        name = self._either('PET_NODE_RANK', 'RANK')
        if name is None and nnodes == 1:
            return 0
        if name is None:
            missing = 'RANK' if self._has_rank() else 'PET_NODE_RANK'
            raise self._disagree(missing, f'0 to {nnodes - 1}, another in each pod')
        found = self.number(name)
        if found >= nnodes:
            raise self._disagree(name, f'0 to {nnodes - 1}, one for each of {nnodes} pods')
        return found

    def _address(self) -> str:
        names = self._given('PET_MASTER_ADDR', 'MASTER_ADDR')
        # Some operators call the first pod localhost in one of the two.
        known = [name for name in names if not is_loopback(self.text(name))] or names
        if not known:
            raise self._disagree('MASTER_ADDR', 'the name or the address of the first pod')
        if len({self.text(name) for name in known}) > 1:
            raise self._disagree('PET_MASTER_ADDR', 'the same as MASTER_ADDR')
        return self.text(known[0])

    def _rendezvous(self, nnodes: Union[int, str]) -> Tuple[str, ...]:
        """The options of torchrun with which pods find each other, where not by their index."""
        endpoint = self.text('PET_RDZV_ENDPOINT')
        backend = self.text('PET_RDZV_BACKEND') or 'static'
        if backend == 'static' and isinstance(nnodes, int) and not endpoint:
            return ()
        if backend == 'static' or not endpoint:
            raise self._disagree(
                'PET_RDZV_BACKEND', 'c10d, with PET_RDZV_ENDPOINT, the host and port of one pod'
            )
        options = [f'--rdzv_backend={backend}', f'--rdzv_endpoint={endpoint}']
        for name in ('RDZV_ID', 'RDZV_CONF'):
            if self.text(f'PET_{name}'):
                options.append(f'--{name.lower()}={self.text(f"PET_{name}")}')
        return tuple(options)

    def _given(self, of_torchrun: str, of_pod: str) -> List[str]:
        names = [of_torchrun] if self.text(of_torchrun) else []
        # RANK and MASTER_ADDR of a process, left over from another job, say nothing of this pod.
        trusted = self._has_rank() or not _per_process(self.environ)
        return [*names, of_pod] if trusted and self.text(of_pod) else names

    def _either(self, of_torchrun: str, of_pod: str) -> Optional[str]:
        """The one of two variables that is set; refuse two that contradict each other."""
        names = self._given(of_torchrun, of_pod)
        if len({self.text(name) for name in names}) > 1:
            raise self._disagree(of_torchrun, f'the same as {of_pod}')
        return names[0] if names else None

    def _disagree(self, name: str, expected: str) -> LaunchError:
        found = self.detect()
        return LaunchError(
            f'{format_variables(found)} contradict each other or lack something: expected {name} '
            f'to be {expected}. They come from {self.command}: correct the job; if they are left '
            f'over, for a job of this host alone: {unset_line(found)}'
        )

    # Volcano without its plugin for PyTorch -----------------------------------------------------

    def _volcano(self) -> Dict[str, str]:
        """The lists of hosts of Volcano, if they name more than one host."""
        groups = [name for name in self.environ if re.fullmatch(r'VC_\w+_HOSTS', name)]
        roles = [name for name in ('VC_MASTER_HOSTS', 'VC_WORKER_HOSTS') if name in groups]
        if not roles and len(groups) != 1:
            return {}  # Which of them train is not known.
        found = {name: self.environ[name] for name in roles or groups}
        return found if len(','.join(found.values()).split(',')) > 1 else {}

    def _volcano_hosts(self, found: Mapping[str, str]) -> Hosts:
        names = [name.strip() for name in ','.join(found.values()).split(',')]
        own = self.environ.get('HOSTNAME') or socket.gethostname()
        here = [i for i, name in enumerate(names) if name.split('.')[0] == own.split('.')[0]]
        if len(here) != 1:
            raise LaunchError(
                f'{format_variables(found)}: expected the name of this pod, {shortened(own)}, '
                'once among these hosts of Volcano. Give --nnodes, --node-rank and '
                '--master-addr, or pass --launcher none for a job of this pod alone.'
            )
        address = check_address(names[0], next(iter(found)))
        return Hosts(len(names), here[0], None, address, self.master_port())


def _per_process(environ: Mapping[str, str]) -> List[str]:
    """Those variables that torchrun sets for each process, and no operator for a pod."""
    names = ('LOCAL_RANK', *TORCHRUN_VARIABLES, *AGENT_VARIABLES)
    found = [name for name in names if name in environ]
    # What LaunchEnv.export has written for the only process of a pod.
    only = dict(LOCAL_RANK='0', LOCAL_WORLD_SIZE='1')
    return [] if {name: environ[name] for name in found} == only else found


def refuse_to_run_alone(environ: Optional[Mapping[str, str]] = None) -> None:
    """Refuse a single process where the variables say that it is one of several.

    torchrun sets more than operators do, so its variables of an earlier job are not taken for
    these.
    """
    environ = os.environ if environ is None else environ
    pod = Kubernetes(environ)
    found = {name: value for name, value in pod.detect().items() if not name.startswith('VC_')}
    if not found:
        return
    hosts = pod.hosts()
    if hosts.nnodes == 1:
        return
    options = hosts.rendezvous or (
        f'--node_rank {hosts.node_rank}',
        f'--master_addr {hosts.master_addr} --master_port {hosts.master_port}',
    )
    raise LaunchError(
        f'{format_variables(found)} say that this process is in one of {hosts.nnodes} pods of a '
        'job of Kubernetes, but no launcher is named: it would train alone. To join the others, '
        'start in each pod: mmdevplug train CONFIG, which reads them; or a script of your own: '
        f'torchrun --nproc_per_node {hosts.nproc or "N"} --nnodes {hosts.nnodes} '
        f'{" ".join(options)} SCRIPT --launcher pytorch. For a job of this host alone: '
        f'{unset_line({**stale_variables("none", environ), **found})}'
    )

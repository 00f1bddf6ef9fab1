"""The variables of mpirun: Open MPI, and MPICH or Intel MPI with their launcher Hydra."""

import re
import socket
from typing import Dict, Mapping, Optional

import psutil

from mmdevplug.config.fields import shortened
from mmdevplug.errors import LaunchError

from .base import Environment
from .loopback import LOOPBACK

_OPEN_MPI = tuple(
    f'OMPI_COMM_WORLD_{part}' for part in ('RANK', 'SIZE', 'LOCAL_RANK', 'LOCAL_SIZE')
)
_HYDRA = ('PMI_RANK', 'PMI_SIZE', 'MPI_LOCALRANKID', 'MPI_LOCALNRANKS')


class MPI(Environment):
    """mpirun of Open MPI or of Hydra, which sets no ``MASTER_ADDR``."""

    name = 'mpi'
    command = 'mpirun'

    def __init__(self, environ: Optional[Mapping[str, str]] = None) -> None:
        super().__init__(environ)
        # srun may set PMI_RANK, too.
        marks = ('MPI_LOCALRANKID',) if 'SLURM_PROCID' in self.environ else _HYDRA
        hydra = any(name in self.environ for name in marks)
        of_open_mpi = any(name in self.environ for name in _OPEN_MPI[:3])
        self.names = _HYDRA if hydra and not of_open_mpi else _OPEN_MPI

    def detect(self) -> Dict[str, str]:
        """Recognize a process of mpirun by its rank, the number of ranks or its local rank."""
        if not any(name in self.environ for name in self.names[:3]):
            return {}
        names = (*self.names, 'MASTER_ADDR', 'MASTER_PORT')
        return {name: self.environ[name] for name in names if name in self.environ}

    def master_addr(self) -> str:
        """Read ``MASTER_ADDR``, or else where mpirun runs, which has to be the host of rank 0."""
        if self.text('MASTER_ADDR'):
            return super().master_addr()
        if self.local_world_size() == self.world_size():
            return LOOPBACK
        for name, pattern in _MPIRUN_HOST.items():
            value = self.text(name)
            found = re.search(pattern, value)
            if found:
                return self._of_mpirun(found.group(1), name, value)
        return super().master_addr()

    def _of_mpirun(self, host: str, name: str, value: str) -> str:
        if self.rank() == 0 and not _is_here(host):
            raise LaunchError(
                f'{name}={shortened(value)}: mpirun runs on {host}, but rank 0 on '
                f'{socket.gethostname()}, where the other ranks cannot find it. Put the host of '
                f'mpirun first into the host file, or name that of rank 0: mpirun -x '
                f'MASTER_ADDR=<host> ...'
            )
        return host


#: Where Open MPI tells on which host mpirun runs.
_MPIRUN_HOST = {
    # Releases 1 to 4: '8.0;tcp://10.0.0.1,172.17.0.1:37581'.
    'OMPI_MCA_orte_hnp_uri': r'tcp://([^,:;]+)',
    # Release 5: 'prterun-node1-9857@1'.
    'PMIX_NAMESPACE': r'^prterun-(.+)-[0-9]+@[0-9]+$',
}


def _is_here(host: str) -> bool:
    here = [a.address for each in psutil.net_if_addrs().values() for a in each]
    return host in (*here, socket.gethostname())

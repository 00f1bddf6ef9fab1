"""The flags of ``mmdevplug train`` that start processes."""

import re
from dataclasses import dataclass
from typing import Optional, Tuple, Union

from mmdevplug.errors import LaunchError

from .fields import Check, Options, option, positive, whole

#: Words of torchrun for a number of processes that depends on the host.
COUNTED = ('auto', 'gpu', 'cpu')
_COUNT = Check(
    lambda value: whole(1).holds(value) or (isinstance(value, str) and value in COUNTED),
    "1 or more processes on each host, or 'auto' for one on each device",
    'int, str',
)
#: Restarts of an elastic job that names no number: without any, the first host lost ends it.
ELASTIC_RESTARTS = 3
#: The least and the most hosts of a job that they may join and leave.
_RANGE = re.compile(r'([1-9][0-9]{0,8}):([1-9][0-9]{0,8})', re.ASCII)


@dataclass(frozen=True)
class LaunchOptions(Options):
    """How a job is started; ``--node-rank`` is the flag of ``node_rank``."""

    key, error = 'launch', LaunchError

    nproc: Union[None, int, str] = option(
        None,
        'Processes on each host; `auto`: one for each device, or each core where it trains on the '
        'CPU. In a pod `PET_NPROC_PER_NODE` sets it.',
        check=_COUNT,
    )
    nnodes: Union[int, str] = option(
        1,
        'Hosts; each runs the same command with another `--node-rank`. `MIN:MAX`, such as `1:4`: '
        'hosts may join and leave, and take no `--node-rank`.',
        check=Check(
            lambda value: whole(1).holds(value) or bool(read_range(value)),
            '1 or more hosts, or the least and the most, such as 1:4',
            'int, str',
        ),
    )
    node_rank: Optional[int] = option(
        None,
        'Which of the hosts this is, from 0; another on each. `srun` sets it by `SLURM_NODEID`.',
        check=whole(0),
    )
    master_addr: Optional[str] = option(
        None,
        'Name or address of host 0; of an elastic job, of the host where all meet.',
        check=Check(
            lambda value: bool(re.fullmatch(r'[\w.:-]+', value, re.ASCII)),
            'the name or the address of host 0',
            'str',
        ),
    )
    master_port: Optional[int] = option(
        None,
        'A free port of host 0; without it a single host finds one, and several take 29500.',
        check=whole(1, 65535, 'a port from 1 to 65535'),
    )
    max_restarts: Optional[int] = option(
        None,
        'How often failed processes are started again; they resume from the newest checkpoint. '
        f'Without it 0, and {ELASTIC_RESTARTS} in an elastic job, where a host that joins does '
        'not count.',
        check=whole(0, 10000),
    )
    timeout: Optional[float] = option(
        None, 'Seconds until ranks give up waiting for each other.', check=positive()
    )

    @property
    def elastic(self) -> bool:
        """Whether hosts may join and leave."""
        return read_range(self.nnodes) is not None

    @property
    def several_hosts(self) -> bool:
        """Whether there are more hosts than this one, or may be."""
        return self.nnodes != 1


def read_range(nnodes: Union[int, str]) -> Optional[Tuple[int, int]]:
    """Return the least and the most hosts of an elastic job, None for a number of hosts."""
    match = _RANGE.fullmatch(nnodes) if isinstance(nnodes, str) else None
    if match is None:
        return None
    least, most = (int(number) for number in match.groups())
    return (least, most) if least < most else None

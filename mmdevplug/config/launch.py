"""The keys of a launch file, which are flags of ``mmdevplug train``, too."""

import re
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple, Union

from mmdevplug.errors import LaunchError

from .fields import Check, Options, option, positive, whole

_NAME = Check(
    lambda value: isinstance(value, str) and bool(re.fullmatch(r'[\w.:-]+', value, re.ASCII)),
    "a name such as 'auto', 'cpu' or 'gcu'",
    'str',
)
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
#: What a launch file may set for the job's processes. Nothing that could hold a secret, and not
#: the variables that hide devices, which belong to whoever shares out the host.
_VARIABLES = re.compile(
    r'(OMP|MKL)_NUM_THREADS|(GLOO|TP)_SOCKET_IFNAME|TORCH_GLOO_LAZY_INIT|PJRT_DEVICE'
    r'|CPU_NUM_DEVICES|MMDEVPLUG_ACCELERATOR|TORCH_DISTRIBUTED_DEBUG'
    r'|(TORCH_)?NCCL_\w+|[HE]CCL_\w+'
)


@dataclass(frozen=True)
class LaunchOptions(Options):
    """How a job is started: the keys of a launch file."""

    key, error = 'launch file', LaunchError

    accelerator: Optional[str] = option(
        None, 'The family of devices; `auto` takes what is present.', check=_NAME
    )
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
        check=whole(0).named('0 or more'),
    )
    master_addr: Optional[str] = option(
        None,
        'Name or address of host 0; of an elastic job, of the host or the `mmdevplug rendezvous` '
        'where hosts meet.',
        check=_NAME.named('the name or the address of host 0'),
    )
    master_port: Optional[int] = option(
        None,
        'A free port of host 0; without it a single host finds one, and several take 29500.',
        check=whole(1, 65535).named('a port from 1 to 65535'),
    )
    max_restarts: Optional[int] = option(
        None,
        'How often failed processes are started again; they resume from the newest checkpoint. '
        f'Without it 0, and {ELASTIC_RESTARTS} in an elastic job, where a host that comes or '
        'goes does not count.',
        check=whole(0, 10000),
    )
    timeout: Optional[float] = option(
        None,
        'Seconds until ranks give up waiting for each other.',
        check=positive().named('a number of seconds above 0'),
    )
    env: Dict[str, str] = option(
        {},
        'Variables for the processes; those set in the shell win.',
        check=Check(
            lambda value: isinstance(value, dict), 'a mapping of variables to values', 'dict'
        ),
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


def read_variables(env: Dict[Any, Any], key: str) -> Dict[str, str]:
    """Refuse variables that are not for a launch file, and return their values as words."""
    for name, value in env.items():
        if not isinstance(name, str) or _VARIABLES.fullmatch(name) is None:
            raise LaunchError(
                f'{key}: {name!r} is not for a launch file; expected names such as '
                f'OMP_NUM_THREADS, GLOO_SOCKET_IFNAME or NCCL_DEBUG. Set it in the shell.'
            )
        plain = isinstance(value, (str, int)) and not isinstance(value, bool)
        if not plain or not str(value).isprintable() or len(str(value)) > 4096:
            raise LaunchError(
                f'{key}: {name}={value!r}: expected a word or a whole number. Put other values '
                f"into quotes, e.g. '1'."
            )
    return {name: str(value) for name, value in env.items()}

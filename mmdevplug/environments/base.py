"""The questions that every launcher answers, and how the answers are read and checked."""

import os
import re
import socket
from abc import ABC, abstractmethod
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Union

from mmdevplug.config.fields import REQUIRED, shortened
from mmdevplug.errors import LaunchError

from .stale import stale_variables

DEFAULT_PORT = 29500  # torch.distributed's own
#: PyTorch counts ranks in 32 bits.
_MOST = 2**31 - 1


class LaunchEnv(NamedTuple):
    """How this process was started."""

    launcher: str = 'none'  # one of LAUNCHERS
    rank: int = 0  # of this process among all, 0 to world_size - 1
    local_rank: int = 0  # among those of its host
    world_size: int = 1  # number of processes
    local_world_size: Optional[int] = 1  # number of processes on this host, where known
    master_addr: str = '127.0.0.1'  # host name or address of rank 0
    master_port: int = DEFAULT_PORT

    @property
    def single_host(self) -> bool:
        """Whether all processes are known to run on this host."""
        return self.local_world_size == self.world_size

    def describe(self) -> str:
        """Name this process for a message."""
        return f'rank {self.rank} of {self.world_size} on host {socket.gethostname()}'

    def export(self) -> None:
        """Write the variables that MMEngine and torch.distributed read, and drop stale ones."""
        for name in stale_variables(self.launcher):
            # With TORCHELASTIC_USE_AGENT_STORE of an ended job no rank would hold the store.
            del os.environ[name]
        if self.local_world_size is not None:
            os.environ['LOCAL_WORLD_SIZE'] = str(self.local_world_size)
        os.environ.update(
            RANK=str(self.rank),
            LOCAL_RANK=str(self.local_rank),
            WORLD_SIZE=str(self.world_size),
            MASTER_ADDR=self.master_addr,
            MASTER_PORT=str(self.master_port),
        )


class Hosts(NamedTuple):
    """The hosts of a job whose processes are still to be started, one of which is this one."""

    nnodes: Union[int, str] = 1  # '1:3' where hosts may join and leave
    node_rank: Optional[int] = 0  # None where hosts are numbered as they join
    nproc: Union[None, int, str] = None  # on each host; a word of torchrun, such as 'auto'
    master_addr: Optional[str] = None
    master_port: Optional[int] = None
    max_restarts: Optional[int] = None


class Environment(ABC):
    """What a launcher tells a process about its job; a subclass for each launcher.

    A launcher that gives each number a variable of its own sets :attr:`names` and overrides
    :meth:`detect`; what it does otherwise is another method to override.

    Args:
        environ (Mapping, optional): The variables. Defaults to ``os.environ``.

    Attributes:
        name (str): The value of ``--launcher``.
        command (str): What starts processes with this launcher, for messages.
        names (tuple[str]): The variables of rank, world size, local rank and processes per host.
        per_host (bool): Whether it starts one process on each host, which starts the ranks.
        starts_starters (bool): Whether it may start one process on each host for that.
    """

    name: str = ''
    command: str = ''
    names: Sequence[str] = ('', '', '', '')
    per_host: bool = False
    starts_starters: bool = True

    def __init__(self, environ: Optional[Mapping[str, str]] = None) -> None:
        self.environ: Mapping[str, str] = os.environ if environ is None else environ

    # questions ----------------------------------------------------------------------------------

    @abstractmethod
    def detect(self) -> Dict[str, str]:
        """Return the variables that tell of this launcher; none if it did not start this."""

    def world_size(self) -> int:
        """Read the number of processes."""
        return self.number(self.names[1])

    def rank(self) -> int:
        """Read the index of this process."""
        return self.number(self.names[0])

    def local_rank(self) -> int:
        """Read the index of this process among those of its host."""
        return self.number(self.names[2])

    def local_world_size(self) -> Optional[int]:
        """Read the number of processes on this host, None where it is not known."""
        return self.number(self.names[3], default=None)

    def node_rank(self) -> Optional[int]:
        """Read the index of this host, None where it is not known."""
        return self.rank() if self.local_world_size() == 1 else None

    def master_addr(self) -> str:
        """Read the name or the address of the host of rank 0."""
        address = self.text('MASTER_ADDR')
        if not address:
            raise LaunchError(
                f'MASTER_ADDR is not set, but launcher={self.name!r} needs the address of rank 0. '
                f'Set it on every rank, e.g. MASTER_ADDR=127.0.0.1 on a single host.'
            )
        return address

    def master_port(self) -> int:
        """Read the port at which rank 0 listens."""
        return check_port(self.number('MASTER_PORT', DEFAULT_PORT), 'MASTER_PORT')

    # answers ------------------------------------------------------------------------------------

    def read(self, port: Optional[int] = None) -> LaunchEnv:
        """Read and check the place of this process in its job; ``port`` wins over the variable."""
        env = LaunchEnv(
            launcher=self.name,
            rank=self.rank(),
            local_rank=self.local_rank(),
            world_size=self.world_size(),
            local_world_size=self.local_world_size(),
            master_port=self.master_port(),
        )
        self._check(env)
        env = env._replace(master_addr=check_address(self.master_addr(), 'MASTER_ADDR'))
        if port is not None:
            env = env._replace(master_port=check_port(port, 'env_cfg.dist_cfg.port'))
        return env

    def hosts(self) -> Hosts:
        """Read the hosts on which processes are to be started: one process here for each host."""
        env = self.read()
        if env.world_size == 1:
            return Hosts()
        if env.local_world_size != 1 or not self.starts_starters:
            raise self._started_already()
        return Hosts(env.world_size, env.rank, None, env.master_addr, env.master_port)

    def refuse_to_run_alone(self) -> None:
        """Refuse a process without a launcher if the variables say that it is one of several."""

    def refuse_to_stay_alone(self, starts: bool) -> None:
        """Refuse a process if its job holds more; ``starts``: it starts others on its host."""

    def refuse_several_starters(self) -> None:
        """Refuse each of several processes of this host to start the host's processes."""
        if (self.local_world_size() or 1) > 1:
            raise self._started_already()

    def _started_already(self) -> LaunchError:
        return LaunchError(
            f'--nproc starts processes, but {self.describe_variables()} say that {self.command} '
            f'has started {self.world_size()} already. Leave out --nproc, or start one process '
            f'on each host with srun or mpirun.'
        )

    def describe_variables(self) -> str:
        """The variables that tell of this launcher, for a message."""
        return format_variables(self.detect())

    def found(self, place: str) -> str:
        """Say that this launcher was found, and where it puts this process."""
        return f'launcher {self.name!r}, found by {self.describe_variables()}: {place}.'

    # reading ------------------------------------------------------------------------------------

    def text(self, name: str) -> str:
        """Read a variable, empty where it is not set."""
        return self.environ.get(name, '').strip()

    def number(self, name: str, default: object = REQUIRED) -> Any:
        """Read a variable that holds a number of 0 or more."""
        value = self.environ.get(name)
        if value is None:
            if default is not REQUIRED:
                return default
            raise LaunchError(
                f'{name} is not set, but launcher={self.name!r} expects a number there. Start the '
                f'job with {self.command}, or pass --launcher none for a single process.'
            )
        digits = value.strip()
        # Python refuses to read thousands of digits.
        if re.fullmatch('[0-9]{1,10}', digits) is None or int(digits) > _MOST:
            raise LaunchError(
                f'{name}={shortened(value)}: expected a number of 0 or more. It is set by '
                f'{self.command}; unset a value left over from another job: unset {name}'
            )
        return int(digits)

    def _check(self, env: LaunchEnv) -> None:
        rank, world_size, local_rank, local_world_size = self.names
        remedy = (
            f'These variables come from {self.command}; a value left over from another job '
            f'contradicts them: unset {rank} {world_size} {local_rank} {local_world_size}, and '
            f'start again.'
        )
        if env.world_size < 1:
            raise LaunchError(f'{world_size}={env.world_size}: expected 1 or more. {remedy}')
        if env.rank >= env.world_size:
            raise LaunchError(
                f'{rank}={env.rank} and {world_size}={env.world_size} disagree: expected a rank '
                f'from 0 to {env.world_size - 1}. {remedy}'
            )
        name, most = local_world_size, env.local_world_size
        if most is None:
            name, most = world_size, env.world_size
        if not 1 <= most <= env.world_size:
            raise LaunchError(
                f'{name}={most} and {world_size}={env.world_size} disagree: expected 1 to '
                f'{env.world_size} processes on this host. {remedy}'
            )
        if env.local_rank >= most:
            raise LaunchError(
                f'{local_rank}={env.local_rank} and {name}={most} disagree: expected a local rank '
                f'from 0 to {most - 1}. {remedy}'
            )


def format_variables(variables: Mapping[str, str]) -> str:
    """Write variables as in a shell, long and unprintable values shortened."""
    return ' '.join(
        f'{name}={value if value.isprintable() and len(value) <= 60 else shortened(value)}'
        for name, value in variables.items()
    )


def check_port(port: Union[int, str], origin: str) -> int:
    """Refuse what is no port."""
    if re.fullmatch('[0-9]{1,5}', str(port)) is None or not 0 < int(port) < 65536:
        raise LaunchError(
            f'{origin}={shortened(port)}: expected a port from 1 to 65535. Set {origin} to a free '
            f'one.'
        )
    return int(port)


def check_address(address: str, origin: str) -> str:
    """Refuse what can be neither the name nor the address of a host."""
    if not address.isprintable() or ' ' in address or len(address) > 255:
        raise LaunchError(
            f'{origin}={shortened(address)}: expected the name or the address of the host of '
            f'rank 0, e.g. MASTER_ADDR=127.0.0.1 on a single host. Correct it.'
        )
    return address

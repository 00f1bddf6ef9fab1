"""Find launch variables that an earlier job left behind in the shell."""

import logging
import os
import re
from contextlib import contextmanager
from pathlib import Path
from typing import Dict, Iterable, Iterator, Mapping, Optional

from mmdevplug.errors import LaunchError

#: What a rank is and where it meets the others; every launcher of a job sets these.
RANK_VARIABLES = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')
#: What torchrun alone sets besides.
TORCHRUN_VARIABLES = (
    *('LOCAL_WORLD_SIZE', 'GROUP_RANK', 'GROUP_WORLD_SIZE'),
    *('ROLE_NAME', 'ROLE_RANK', 'ROLE_WORLD_SIZE', 'TORCHELASTIC_ERROR_FILE'),
)
#: What torchrun sets all together or not at all.
AGENT_VARIABLES = (
    *('TORCHELASTIC_RUN_ID', 'TORCHELASTIC_RESTART_COUNT'),
    *('TORCHELASTIC_MAX_RESTARTS', 'TORCHELASTIC_USE_AGENT_STORE'),
)


def stale_variables(launcher: str, environ: Optional[Mapping[str, str]] = None) -> Dict[str, str]:
    """Find the launch variables that are not meant for this process, by name.

    Without a launcher every launch variable is stale; under Slurm and MPI those of torchrun are;
    under torchrun its agent's variables are if some of them are missing, because it sets all of
    them. A scheduler's own variables (``SLURM_*``, ``OMPI_*``) are never stale: inside an
    allocation they are set for every process, and a single process does not read them.

    Examples:
        >>> stale_variables('none', {'RANK': '3', 'HOME': '/root'})
        {'RANK': '3'}
    """
    environ = os.environ if environ is None else environ
    names: Iterable[str]
    if launcher == 'none':
        names = RANK_VARIABLES + TORCHRUN_VARIABLES + AGENT_VARIABLES
    elif launcher == 'pytorch':
        complete = all(name in environ for name in AGENT_VARIABLES)
        names = () if complete else AGENT_VARIABLES
    else:
        names = TORCHRUN_VARIABLES + AGENT_VARIABLES
    return {name: environ[name] for name in names if name in environ}


def refuse_to_run_alone(environ: Optional[Mapping[str, str]] = None) -> None:
    """Refuse a single process where the variables say that it is one of several.

    Operators of Kubernetes set ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR`` in every pod of a job.
    torchrun sets more, so its variables of an earlier job are not taken for these.
    """
    environ = os.environ if environ is None else environ
    rank, world_size, address, port = (
        environ.get(name, '').strip()
        for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')
    )
    numbers = all(re.fullmatch('[0-9]{1,9}', value) for value in (rank, world_size))
    if not (address and numbers and int(rank) < int(world_size) > 1):
        return
    if any(name in environ for name in ('LOCAL_RANK', *TORCHRUN_VARIABLES, *AGENT_VARIABLES)):
        return
    flags = f'--nproc N --nnodes {world_size} --node-rank {rank} --master-addr {address}'
    if port:
        flags += f' --master-port {port}'
    raise LaunchError(
        f'RANK={rank} WORLD_SIZE={world_size} MASTER_ADDR={address} say that this process is one '
        f'of {world_size}, as in a pod of Kubernetes, but no launcher is named: it would train '
        f'alone. To join the others, start on each host, with N processes: mmdevplug train CONFIG '
        f'{flags}. For a job of this host alone: {unset_line(stale_variables("none", environ))}'
    )


def unset_line(names: Iterable[str]) -> str:
    """The shell command that removes variables."""
    return f'unset {" ".join(names)}'


def forget_stale_variables(launcher: str) -> Dict[str, str]:
    """Remove the stale variables from this process and return them.

    Raises:
        LaunchError: If torchrun is running this process as one of several, or the variables of a
            pod say that it is, but no launcher was named: each process would train alone and
            write the same files.
    """
    if launcher == 'none':
        refuse_to_run_alone()
    stale = stale_variables(launcher)
    if launcher == 'none' and _parent_is_torchrun() and os.environ.get('WORLD_SIZE', '1') != '1':
        raise LaunchError(
            f"launcher='none', but torchrun runs this process as one of WORLD_SIZE="
            f'{os.environ["WORLD_SIZE"]}; each of them would train alone. Pass --launcher '
            f'pytorch, or for a single process: {unset_line(stale)}'
        )
    for name in stale:
        del os.environ[name]
    return stale


def describe_stale(launcher: str, stale: Mapping[str, str]) -> str:
    """One line that names the variables and the command that removes them."""
    found = ' '.join(f'{name}={value}' for name, value in stale.items())
    return (
        f'launcher={launcher!r}: left over from an earlier job and ignored: {found}. To remove '
        f'them from your shell: {unset_line(stale)}'
    )


@contextmanager
def stale_variables_hidden(launcher: str) -> Iterator[Dict[str, str]]:
    """Hide the stale variables from vendors' packages inside this context."""
    stale = stale_variables(launcher)
    for name in stale:
        del os.environ[name]
    try:
        yield stale
    finally:
        os.environ.update(stale)
        if stale:
            logging.getLogger(__name__).warning(describe_stale(launcher, stale))


def _parent_is_torchrun() -> bool:
    """Whether torchrun started this process; False where the system does not say."""
    try:
        words = Path(f'/proc/{os.getppid()}/cmdline').read_bytes().split(b'\0')
    except OSError:
        return False
    pattern = rb'(.*/)?torchrun|torch\.distributed\.(run|launch)|mmdevplug\.cli\.torchrun_agent'
    return any(re.fullmatch(pattern, word) for word in words)

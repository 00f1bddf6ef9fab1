"""Find launch variables that an earlier job left behind in the shell."""

import logging
import os
from contextlib import contextmanager
from typing import Callable, Dict, Iterable, Iterator, Mapping, Optional

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
        complete = set(AGENT_VARIABLES).issubset(environ)
        names = () if complete else AGENT_VARIABLES
    else:
        names = TORCHRUN_VARIABLES + AGENT_VARIABLES
    return {name: environ[name] for name in names if name in environ}


def open_job(environ: Optional[Mapping[str, str]] = None) -> Dict[str, str]:
    """Find the variables of a rank in a job of several; call it where no launcher is known."""
    environ = os.environ if environ is None else environ
    found = {name: environ[name].strip() for name in RANK_VARIABLES if environ.get(name)}
    return found if len(found) == len(RANK_VARIABLES) and found['WORLD_SIZE'] != '1' else {}


def unset_line(names: Iterable[str]) -> str:
    """The shell command that removes variables."""
    return f'unset {" ".join(names)}'


def report_stale(launcher: str, stale: Mapping[str, str], tell: Callable[[str], None]) -> None:
    """Tell in one line the variables and the command that removes them.

    An address alone makes no process a rank: ``mim`` sets MASTER_PORT for each command.
    """
    if stale.keys() <= {'MASTER_ADDR', 'MASTER_PORT'}:
        return
    found = ' '.join(f'{name}={value}' for name, value in stale.items())
    tell(
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
        report_stale(launcher, stale, logging.getLogger(__name__).warning)

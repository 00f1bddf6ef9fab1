"""Find launch variables that an earlier job left behind in the shell."""

import os
from contextlib import contextmanager
from typing import Dict, Iterable, Iterator, Mapping, Optional

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


def unset_line(names: Iterable[str]) -> str:
    """The shell command that removes variables."""
    return f'unset {" ".join(names)}'


@contextmanager
def stale_variables_hidden() -> Iterator[None]:
    """Hide what an earlier job left from vendors' packages, in a process without a launcher."""
    stale = stale_variables('none')
    for name in stale:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(stale)

"""The variables of torchrun, for each process that it starts."""

import os
import re
from typing import Dict, Optional

import psutil

from .base import Environment
from .stale import AGENT_VARIABLES

#: How the command lines of launchers name them: torchrun, those that run its agent in their own
#: process, and DeepSpeed's, which sets the same variables.
_PATTERN = (
    r'(.*/)?(torchrun|accelerate|accelerate-launch|deepspeed)'
    r'|torch\.distributed\.(run|launch)'
    r'|accelerate\.commands\.\w+|deepspeed\.launcher\.\w+'
)

#: What our command sets for its ranks: its process id, and '1' where hosts may join and leave.
AGENT, ELASTIC = 'MMDEVPLUG_AGENT', 'MMDEVPLUG_ELASTIC'


class Torchrun(Environment):
    """torchrun, or what sets the same variables."""

    name = 'pytorch'
    command = 'torchrun (tools/dist_train.sh)'
    names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')
    starts_starters = False  # Its own store holds the port at which they would meet.

    def detect(self) -> Dict[str, str]:
        """Recognize a process that runs below torchrun.

        The variables alone do not tell: shells keep those of an earlier job, and the pods of
        Kubernetes have some of the same names.
        """
        names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')
        if self.environ.keys().isdisjoint(names) or not runs_below_torchrun():
            return {}
        found = (*names, 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT', AGENT_VARIABLES[0])
        return {name: self.environ[name] for name in found if name in self.environ}

    def node_rank(self) -> Optional[int]:
        """Read the index of this host, None where it is not known."""
        return self.number('GROUP_RANK', default=None)


def runs_below_torchrun() -> bool:
    """Whether torchrun started this process, or one that did; False where no one can say."""
    try:
        parents = psutil.Process().parents()
    except psutil.Error:
        return False
    agent = os.environ.get(AGENT)
    for parent in parents:
        if str(parent.pid) == agent:
            return True
        try:
            words = parent.cmdline()
        except psutil.Error:  # It ended, or belongs to another user.
            continue
        for word in words:
            if re.fullmatch(_PATTERN, word):
                return True
    return False

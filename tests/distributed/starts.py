"""Start jobs of several ranks again and again, and report how each rank ended.

    python -m tests.distributed.starts TIMES RANKS

Ranks are forked from one process that has imported everything, and end as scripts do: through
``atexit``, the end of the interpreter and the destructors of C++.
"""

import faulthandler
import json
import os
import sys
import tempfile
import time

import torch
from torch import distributed as torch_dist

from mmdevplug import init_device
from mmdevplug.distributed.waiting import wait_for_everyone
from mmdevplug.samples import balance_samples
from tests.ranks import PRELOAD, free_port, launch_variables

#: How long the ranks of one job may take.
SECONDS = 120


def exchange():
    """Collectives and an exchange of samples; afterwards ranks end at different times."""
    context = init_device('pytorch', 'cpu', timeout=60)
    rank = context.env.rank
    for _ in range(3):
        balance_samples([dict(x=torch.randn(256), name='a')] * (4 if rank == 0 else 0))
    torch_dist.barrier()
    wait_for_everyone('the end')
    time.sleep(0.02 * (rank % 3))


def start(rank, ranks, port, output):
    """Fork a rank; True in the child."""
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(launch_variables(rank, ranks, port))
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    exchange()
    return None


def run_job(ranks):
    """Exit statuses of all ranks, and what they printed; None in a rank that is done."""
    with tempfile.TemporaryFile('w+') as output:
        port, pids = free_port(), []
        for rank in range(ranks):
            pid = start(rank, ranks, port, output)
            if pid is None:
                return None
            pids.append(pid)
        deadline = time.monotonic() + SECONDS
        statuses = {}
        while len(statuses) < ranks:
            for rank, pid in enumerate(pids):
                ended, status = os.waitpid(pid, os.WNOHANG) if rank not in statuses else (0, 0)
                if ended:
                    signaled = os.WIFSIGNALED(status)
                    statuses[rank] = -os.WTERMSIG(status) if signaled else os.WEXITSTATUS(status)
                elif rank not in statuses and time.monotonic() > deadline:
                    os.kill(pid, 9)
            time.sleep(0.005)
        output.seek(0)
        return statuses, output.read()


def main():
    times, ranks = map(int, sys.argv[1:])
    for module in PRELOAD:
        __import__(module)
    torch.set_num_threads(1)
    faulthandler.enable()
    bad = []
    for _ in range(times):
        found = run_job(ranks)
        if found is None:
            return  # a rank, which ends as scripts do
        statuses, printed = found
        if any(statuses.values()):
            bad.append(dict(statuses=statuses, printed=printed[-2000:]))
    print(json.dumps(dict(jobs=times, bad=bad)))


if __name__ == '__main__':
    main()

"""Hooks with which tests make trouble inside a job, and look at it from inside."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class KillOnce(Hook):
    """Kills one rank, as the system does when memory runs out, in the job's first start alone."""

    def __init__(self, rank, iteration):
        self.rank = rank
        self.iteration = iteration

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'
        here = (int(os.environ['RANK']), runner.iter) == (self.rank, self.iteration)
        if first and here:
            os.kill(os.getpid(), signal.SIGKILL)


@HOOKS.register_module()
class NoteListeners(Hook):
    """Writes down on which addresses the processes of this host's job listen."""

    def __init__(self, path, iteration):
        self.path = path
        self.iteration = iteration

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter != self.iteration or not is_main_process():
            return
        import psutil

        command = psutil.Process(multiprocessing.parent_process().pid)
        processes = [command, *command.children(recursive=True)]
        found = [
            [process.pid, socket.laddr.ip, socket.laddr.port]
            for process in processes
            for socket in process.net_connections('inet')
            if socket.status == psutil.CONN_LISTEN
        ]
        Path(self.path).write_text(json.dumps(dict(command=command.pid, sockets=found)))

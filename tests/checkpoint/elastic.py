"""torchrun's agent with workers that fork from a server, which start in a fraction of the time.

python -m tests.checkpoint.elastic CONFIG NPROC MAX_RESTARTS
"""

import inspect
import multiprocessing
import os
import sys
import time

from tests.ranks import PRELOAD


def work(path):
    """Train in a worker; go on at once when a signal has stopped training in good order."""
    from mmengine.config import Config
    from mmengine.registry import RUNNERS

    import mmdevplug
    import tests.checkpoint.killing
    import tests.checkpoint.training  # noqa: F401

    stopped = True
    while stopped:
        cfg = Config.fromfile(path)
        mmdevplug.follow_runner_type()  # as a base config does
        # As each process would have: its own message hub and logger.
        cfg.update(launcher='pytorch', experiment_name=f'at {time.time()}')
        try:
            RUNNERS.build(cfg).train()
            stopped = False
        except SystemExit as status:
            if status.code != 0:
                raise
            if os.environ['RANK'] == '0':
                attempt = os.environ['TORCHELASTIC_RESTART_COUNT']
                noted = os.path.join(os.path.dirname(path), f'stopped_{attempt}')
                with open(noted, 'a') as file:
                    file.write('stopped\n')


def main():
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    path, nproc, max_restarts = sys.argv[1:]
    multiprocessing.set_forkserver_preload(['tests.checkpoint.killing', *PRELOAD])
    options = dict(local_addr='127.0.0.1')
    known = inspect.signature(LaunchConfig).parameters  # PyTorch 1 works the address out by itself
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(nproc),
        run_id='survival',
        max_restarts=int(max_restarts),
        monitor_interval=0.05,
        start_method='forkserver',
        rdzv_backend='c10d',
        rdzv_endpoint='127.0.0.1:0',
        **{name: value for name, value in options.items() if name in known},
    )
    elastic_launch(config, work)(path)


if __name__ == '__main__':
    main()

"""torchrun's agent with workers that fork from a server, which start in a fraction of the time.

python -m tests.checkpoint.elastic CONFIG NPROC MAX_RESTARTS
"""

import inspect
import multiprocessing
import sys

from tests.distributed import PRELOAD


def work(path):
    """Train in a worker."""
    from mmengine.config import Config
    from mmengine.registry import RUNNERS

    import tests.checkpoint.killing
    import tests.checkpoint.training  # noqa: F401

    cfg = Config.fromfile(path)
    cfg.launcher = 'pytorch'
    RUNNERS.build(cfg).train()


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

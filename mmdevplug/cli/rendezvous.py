"""Keep the place where the hosts of an elastic job meet, on a host that stays."""

import argparse
import signal
import sys
from datetime import timedelta
from typing import List, Optional

from torch.distributed import TCPStore

from mmdevplug.environments.launch_variables import DEFAULT_PORT
from mmdevplug.errors import LaunchError, first_line

from . import say
from .arguments import Parser
from .common import run


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = Parser(
        prog='mmdevplug rendezvous',
        description='Keep the place where hosts of `mmdevplug train --nnodes MIN:MAX` meet. Any '
        'of them may then leave, and join again. It listens on every interface and answers '
        'whoever connects: use a network that you trust.',
    )
    parser.add_argument('--port', type=int, default=DEFAULT_PORT, help='where it listens')
    return parser


def main(argv: Optional[List[str]] = None) -> None:
    """Hold the store of torchrun's ``c10d`` rendezvous until a signal ends it."""
    port = build_parser().parse_args(argv).port
    if not 0 <= port <= 65535:
        raise LaunchError(f'--port={port}: expected 0 to 65535; 0 takes a free one.')
    # Blocked first: threads of the store inherit it, and the signal waits for sigwait().
    ends = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        store = TCPStore(
            '0.0.0.0', port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
    except (RuntimeError, OSError) as error:  # PyTorch 2 has a class for it, below RuntimeError
        raise LaunchError(
            f'--port={port} cannot be opened: {first_line(error)}. Choose a free port, and give '
            f'it to the hosts as --master-port.'
        ) from error
    say(
        f'hosts can meet at port {store.port} of this host: mmdevplug train CONFIG --nnodes '
        f'MIN:MAX --master-addr THIS_HOST --master-port {store.port}. Ctrl-C ends it.'
    )
    found = signal.sigwait(ends)
    say(f'ended by {signal.Signals(found).name}.')


if __name__ == '__main__':
    sys.exit(run(main))

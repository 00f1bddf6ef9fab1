"""PyTorch's launcher, which writes what each rank prints to a file."""

import os
import subprocess
import warnings
from datetime import datetime

from torch.distributed.elastic.multiprocessing.api import SubprocessHandler
from torch.distributed.run import get_args_parser, run


def _start_with_log(self, args, env):
    name = f'{env["RANK"]}_log_{datetime.now():%Y%m%d_%H%M%S}.txt'
    print(f'the gcu {env["RANK"]} log in {os.getcwd()}/{name}')
    file = open(name, 'w')  # noqa: SIM115  the process keeps it
    return subprocess.Popen(args=args, env=env, stdout=file, stderr=file)


SubprocessHandler._popen = _start_with_log


def parse_args(args):
    parser = get_args_parser()
    parser.add_argument('--use_env', default=False, action='store_true')
    return parser.parse_args(args)


def launch(args):
    if args.no_python and not args.use_env:
        raise ValueError(
            "When using the '--no_python' flag, you must also set the '--use_env' flag."
        )
    run(args)


def main(args=None):
    warnings.warn('The module torch.distributed.launch is deprecated', stacklevel=2)
    launch(parse_args(args))


if __name__ == '__main__':
    main()

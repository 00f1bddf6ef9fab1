"""Train a model; see ``python tools/train.py --help``."""

import sys

from mmdevplug.cli.common import run
from mmdevplug.cli.train import main

if __name__ == '__main__':
    sys.exit(run(main))

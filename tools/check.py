"""Check a config with one training step: ``python tools/check.py CONFIG``."""

import sys

from mmdevplug.cli.check import main
from mmdevplug.cli.common import run

if __name__ == '__main__':
    sys.exit(run(main))

"""Test a model; see ``python tools/test.py --help``."""

import sys

from mmdevplug.cli.common import run
from mmdevplug.cli.test import main

if __name__ == '__main__':
    sys.exit(run(main))

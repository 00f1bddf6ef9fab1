"""Test collectives: ``torchrun --nproc_per_node 4 tools/comm_test.py``, or with ``--launcher``."""

import sys

from mmdevplug.cli.comm_test import main
from mmdevplug.cli.common import run

if __name__ == '__main__':
    sys.exit(run(main))

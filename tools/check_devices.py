"""Check a config's devices: ``python tools/check_devices.py CONFIG --model-parallel auto``."""

import sys

from mmdevplug.cli.check_devices import main
from mmdevplug.cli.common import run

if __name__ == '__main__':
    sys.exit(run(main))

"""``python -m mmdevplug``, for environments whose folder of scripts is not on the path."""

import sys

from .cli.main import main

if __name__ == '__main__':
    sys.exit(main())

"""The command ``mmdevplug`` and the scripts in ``tools/``."""

import sys


def say(text: str) -> None:
    """Print a line of this package on the standard error."""
    print(f'mmdevplug: {text}', file=sys.stderr, flush=True)

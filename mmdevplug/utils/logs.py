"""Write to MMEngine's log."""

import logging

from mmengine.logging import print_log


def log_warning(text: str) -> None:
    """Log a warning with the current logger."""
    print_log(text, 'current', logging.WARNING)

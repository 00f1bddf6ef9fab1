"""Write to the log: MMEngine's where it is in use, and Python's elsewhere."""

import logging
import sys
from contextlib import contextmanager
from typing import Iterator, Optional


def log(text: str, level: int = logging.INFO) -> None:
    """Log a line with MMEngine's current logger, or with Python's logger ``mmdevplug``."""
    module = sys.modules.get('mmengine.logging')
    if module is None:
        logging.getLogger('mmdevplug').log(level, text)
    else:
        module.print_log(text, 'current', level)


def current_logger() -> Optional[logging.Logger]:
    """The current logger of MMEngine, None where there is none yet."""
    module = sys.modules.get('mmengine.logging')
    if module is None or not module.MMLogger._instance_dict:
        return None
    return module.MMLogger.get_current_instance()


def log_warning(text: str) -> None:
    """Log a warning."""
    log(text, logging.WARNING)


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Drop what a logger of another package logs, but its errors."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

"""Show on the terminal what a user waits for; the log file keeps everything."""

import logging

#: How lines begin that a user has not caused and does not wait for: MMEngine's and ours.
LEFT_OUT = (
    '\n----',  # MMEngine's "System environment"
    'Config:\n',
    'Hooks will be executed in the following order',
    'Exp name: ',
    'Text logs will be saved to ',
    'paramwise_options -- ',  # one for each option of each parameter
    'The prefix is not set in metric class ',
    '"FileClient" will be deprecated in future',
    '"HardDiskBackend" is the alias of ',
)


class BriefTerminal(logging.Filter):
    """Leaves out what a user has not caused, up to the level of warnings."""

    #: Whether runners of this process write briefly; the command decides.
    wanted = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is shown."""
        return record.levelno > logging.WARNING or not record.getMessage().startswith(LEFT_OUT)


def shorten_terminal(logger: logging.Logger, log_file: str) -> None:
    """Write briefly to the terminal, if that is wanted, and say where the rest is."""
    if not BriefTerminal.wanted:
        return
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:
            handler.addFilter(BriefTerminal())
    logger.info(f'The terminal shows results; everything is in {log_file} (--verbose shows it).')

"""Run one task at a time in the background, and keep its error."""

import threading
from typing import Callable, Optional


class Background:
    """Runs functions in a thread, none before the one that was started before has ended."""

    def __init__(self) -> None:
        self._thread: Optional[threading.Thread] = None
        self._error: Optional[BaseException] = None

    def start(self, function: Callable[[], None]) -> None:
        """Start a function; wait for the one before.

        Raises:
            Exception: What the one before raised.
        """
        self.join()
        # Not a daemon: the interpreter waits for it, also when training ends with an error.
        self._thread = threading.Thread(
            target=self._run, args=(function,), name='mmdevplug-checkpoint', daemon=False
        )
        self._thread.start()

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # raised again in `join`, where it is known what to do
            self._error = error

    @property
    def busy(self) -> bool:
        """Whether something is running."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout: Optional[float] = None) -> bool:
        """Wait.

        Args:
            timeout (float, optional): In seconds. Defaults to None: as long as it takes.

        Returns:
            bool: Whether nothing runs any more.

        Raises:
            Exception: What the function raised, once.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

"""A single process that no launcher started."""

from typing import Dict, Optional

from .base import Environment, Hosts, LaunchEnv


class NoLauncher(Environment):
    """A process alone, whatever the variables say."""

    name = 'none'

    def detect(self) -> Dict[str, str]:
        """Return nothing: this is what is left where no launcher is recognized."""
        return {}

    def read(self, port: Optional[int] = None) -> LaunchEnv:
        """Return the place of a single process."""
        return LaunchEnv()

    def hosts(self) -> Hosts:
        """Return this host alone."""
        return Hosts()

"""What a user asked the doctor to look at, as it travels to processes of their own."""

import os
from typing import Any, Dict, Mapping, NamedTuple, Optional

from mmengine.config import Config

from mmdevplug.device.detection import accelerator_options
from mmdevplug.dist.options import RUNNER_OPTIONS


class Setting(NamedTuple):
    """What to look at.

    Attributes:
        config (str, optional): Path of a config.
        accelerator (str, optional): A name that wins over the config's.
    """

    config: Optional[str] = None
    accelerator: Optional[str] = None

    def load(self) -> Optional[Config]:
        """Load the config, which imports what its ``custom_imports`` name."""
        return None if self.config is None else Config.fromfile(self.config)

    def accelerator_options(self, cfg: Optional[Mapping[str, Any]]) -> Dict[str, Any]:
        """The arguments of the accelerator: those of the config, with the name that was given."""
        found = accelerator_options(None if cfg is None else cfg.get('accelerator'))
        options = {key: value for key, value in found.items() if key not in RUNNER_OPTIONS}
        if self.accelerator is not None:
            if options.get('type') != self.accelerator:
                options = {}
            options['type'] = self.accelerator
        return options


def gigabytes(size: float) -> str:
    """Bytes for people.

    Examples:
        >>> gigabytes(3 * 2**29)
        '1.50 GB'
    """
    for unit, power in (('GB', 30), ('MB', 20), ('KB', 10)):
        if size >= 2**power:
            return f'{size / 2**power:.2f} {unit}'
    return f'{size:.0f} bytes'


def usable_cores() -> int:
    """The cores that this process may run on."""
    affinity = getattr(os, 'sched_getaffinity', None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1

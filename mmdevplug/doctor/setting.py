"""What a user asked the doctor to look at, as it travels to processes of their own."""

from typing import Any, Dict, Mapping, NamedTuple, Optional

from mmengine.config import Config

from mmdevplug.accelerators.detection import accelerator_options
from mmdevplug.config.accelerator import RUNNER_OPTIONS


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

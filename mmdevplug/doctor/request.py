"""What a user asked the doctor to look at, as it travels to processes of their own."""

from dataclasses import replace
from typing import Any, Mapping, NamedTuple, Optional

from mmengine.config import Config

from mmdevplug.config.accelerator import AcceleratorOptions


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

    def options(self, cfg: Optional[Mapping[str, Any]]) -> AcceleratorOptions:
        """The config key ``accelerator``, with the name that was given in place of the config's.

        Wrong values of other options are reported by the section of the config.
        """
        given = None if cfg is None else cfg.get('accelerator')
        options = AcceleratorOptions.from_config(given, problems=[], backend='auto')
        if self.accelerator is None:
            return options
        same = isinstance(options.device, dict) and options.device.get('type') == self.accelerator
        return replace(options, device=options.device if same else dict(type=self.accelerator))

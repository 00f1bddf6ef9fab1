"""The config key ``accelerator``: every option of ours, and the arguments of the accelerator."""

from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Mapping, Optional, Union

from mmdevplug.errors import AcceleratorError, DevPlugError

from .fields import Options, choice, did_you_mean, flag, option
from .pad_to import PadTo, read_pad_to


@dataclass(frozen=True)
class AcceleratorOptions(Options):
    """The config key ``accelerator``, parsed and checked by :meth:`from_config`.

    ``device`` holds ``type`` and the arguments of that accelerator, or an accelerator.
    """

    key = 'accelerator'

    device: Union[Dict[str, Any], Any] = field(default_factory=dict)
    backend: Optional[str] = option(
        None,
        'Backend of torch.distributed, which wins over `env_cfg.dist_cfg.backend`. '
        "`'auto'` takes that of `env_cfg` only where it suits the device.",
        accepts="None, 'auto', str",
    )  # checked by accelerators/backend.py, since every accelerator takes others
    compilations: bool = flag(
        True, 'On a lazy device: log `device/compiles`, and warn where compiling does not end.'
    )
    host_losses: Union[bool, str] = option(
        'auto',
        'On a lazy device: whether heads of detectors and segmentors compute their losses on the '
        "host, from copies of the network's outputs. `'auto'`: where shapes in the loss depend on "
        'values, so that each batch would be compiled anew.',
        accepts="'auto', bool",
        check=choice('auto', True, False),
    )
    initial_weights: str = option(
        'auto',
        "Where a model's first weights are drawn: `'host'` gives equal ones on all devices for "
        "one seed, `'device'` those that MMEngine alone draws there. `'auto'`: on the device with "
        'CUDA, on the host elsewhere and for a model over several devices. Those of a sharded '
        'model are always drawn on the host.',
        check=choice('auto', 'host', 'device'),
    )
    memory: bool = flag(
        True, 'Log memory of the host, and warn if it doubles; log that of each device of several.'
    )
    pad_to: Optional[PadTo] = option(
        None,
        'Size to which the images of a batch are padded: a multiple, one size, or several '
        'of which the smallest is taken that holds the batch.',
        accepts='None, int, (int, int), [(int, int), ...]',
        read=read_pad_to,
    )
    preemption: bool = flag(
        True, 'Save a checkpoint and end on SIGTERM, SIGINT, SIGHUP and SIGUSR1.'
    )
    resume_settings: str = option(
        'checkpoint',
        'Where a checkpoint that is resumed and the config differ in settings of optimizers or '
        "schedulers: `'checkpoint'` keeps those of the checkpoint, `'config'` takes the "
        "config's, with schedules at the step that training has reached. A warning names them.",
        check=choice('checkpoint', 'config'),
    )

    @classmethod
    def from_config(
        cls, config: Any, problems: Optional[List[DevPlugError]] = None, **defaults: Any
    ) -> 'AcceleratorOptions':
        """Parse and check the config key: a name, a dict, or an accelerator.

        Args:
            config (str, dict or Accelerator, optional): The key.
            problems (list, optional): Collects the errors of single options, which keep their
                defaults. Defaults to None: the first error is raised.
            **defaults: Replace the defaults of fields.

        Examples:
            >>> AcceleratorOptions.from_config(dict(type='xla', pad_to=64)).pad_to.multiple
            64
        """
        if not isinstance(config, Mapping) and hasattr(config, 'device_type'):
            # An accelerator, whose class is above this package.
            return cls(device=config, **defaults)
        given = {**defaults, **to_dict(config)}
        device = {name: value for name, value in given.items() if name not in cls.names()}
        return cls(device=device, **cls.read(given, problems))


def suggest_option(names: Iterable[str], others: Iterable[str] = ()) -> str:
    """The end of a sentence about unknown options, with the nearest of ours and of others."""
    return did_you_mean(names, [*AcceleratorOptions.names(), *others])


def to_dict(config: Union[str, Mapping[str, Any], None]) -> Dict[str, Any]:
    """Return the config key ``accelerator``, a name or a dict, as a new dict."""
    if config is None:
        return {}
    if isinstance(config, str):
        return dict(type=config)
    if isinstance(config, Mapping) and isinstance(config.get('type', ''), (str, type(None))):
        return dict(config)
    raise AcceleratorError(
        f"accelerator={config!r}: expected a name such as 'gcu' or a dict such as "
        f"dict(type='gcu', backend='gloo')."
    )

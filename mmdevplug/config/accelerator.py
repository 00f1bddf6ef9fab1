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

    device: Any = field(default_factory=dict)
    backend: Optional[str] = option(
        None,
        'Backend of torch.distributed; it overrides `env_cfg.dist_cfg.backend`. '
        "`'auto'` takes the backend of `env_cfg` only if it suits the device.",
        accepts="None, 'auto', str",
    )  # checked by accelerators/backend.py, since every accelerator takes others
    compilations: bool = flag(
        True, 'On a lazy device: log `device/compiles`, and warn if compiling does not end.'
    )
    host_losses: Union[bool, str] = option(
        'auto',
        'On a lazy device: heads of detectors and segmentors compute their losses on the host. '
        "`'auto'`: if shapes in the loss depend on values.",
        accepts="'auto', bool",
        check=choice('auto', True, False),
    )
    initial_weights: str = option(
        'auto',
        "Place where first weights are drawn: `'host'` gives equal weights on all devices, "
        "`'device'` the weights of MMEngine alone. `'auto'`: the device for CUDA, the host "
        'elsewhere and for a model over several devices. Sharded models always use the host.',
        check=choice('auto', 'host', 'device'),
    )
    memory: bool = flag(
        True, "Log memory of the host, and of each of several devices; warn if the host's doubles."
    )
    pad_to: Optional[PadTo] = option(
        None,
        'Size of padded images: a multiple, one size, or several, of which a batch takes the '
        'smallest that holds it.',
        accepts='None, int, (int, int), [(int, int), ...]',
        read=read_pad_to,
    )
    preemption: bool = flag(
        True, 'Save a checkpoint and end on SIGTERM, SIGINT, SIGHUP and SIGUSR1.'
    )
    resume_settings: str = option(
        'checkpoint',
        'If the checkpoint and the config differ in settings of optimizers or schedulers: '
        "`'checkpoint'` keeps the checkpoint's, `'config'` takes the config's, at the current "
        'step. A warning names them.',
        check=choice('checkpoint', 'config'),
    )

    @classmethod
    def from_config(
        cls, config: object, problems: Optional[List[DevPlugError]] = None, **defaults: Any
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


def to_dict(config: object) -> Dict[str, Any]:
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

"""The options of hooks that the config key ``accelerator`` holds as dicts."""

from dataclasses import dataclass
from typing import Any, Optional

from mmdevplug.errors import DevPlugError, ModelError

from .fields import option


@dataclass(frozen=True)
class DeviceHookOptions:
    """Options of :class:`mmdevplug.hooks.DeviceHook`: ``accelerator.hook``."""

    on_mismatch: str = option(
        'repair',
        accepts="'repair', 'error'",
        meaning='What happens before a run to tensors that are not on the device of their rank: '
        'they are moved with a warning, or the job stops.',
    )

    def __post_init__(self) -> None:
        if self.on_mismatch not in ('repair', 'error'):
            raise ModelError(
                f"DeviceHook.on_mismatch={self.on_mismatch!r}: expected 'repair' or 'error'."
            )


@dataclass(frozen=True)
class MemoryOptions:
    """Options of :class:`mmdevplug.hooks.MemoryHook`: ``accelerator.memory``."""

    interval: Optional[int] = option(
        None,
        accepts='None, int',
        meaning='Iterations between two collections of garbage, which also return cached memory '
        'of the device; `None` for never.',
    )
    sample_interval: int = option(
        50, accepts='int', meaning='Iterations between two samples of memory.'
    )
    warmup: int = option(200, accepts='int', meaning='Iterations in which memory may grow.')
    growth_mb: Optional[float] = option(
        32.0,
        accepts='None, float',
        meaning='Least growth that is reported, in MB; `None` for no report.',
    )

    def __post_init__(self) -> None:
        self._check('interval', least=1, optional=True)
        self._check('sample_interval', least=1)
        self._check('warmup', least=0)
        self._check('growth_mb', least=0, optional=True)

    def _check(self, name: str, least: int, optional: bool = False) -> None:
        value: Any = getattr(self, name)
        if value is None and optional:
            return
        kinds = (int, float) if name == 'growth_mb' else (int,)
        if isinstance(value, kinds) and not isinstance(value, bool) and value >= least:
            return
        kind = 'number' if float in kinds else 'whole number'
        raise DevPlugError(
            f'MemoryHook.{name}={value!r} (accelerator.memory.{name}): expected a {kind} of at '
            f'least {least}{", or None" if optional else ""}.'
        )


@dataclass(frozen=True)
class CompilationOptions:
    """Options of :class:`mmdevplug.hooks.CompilationHook`: ``accelerator.compilations``."""

    warmup: int = option(20, accepts='int', meaning='Iterations in which graphs may be compiled.')
    patience: int = option(
        3,
        accepts='int',
        meaning='Iterations after the warm-up that may compile graphs before the warning.',
    )

    def __post_init__(self) -> None:
        for name, least in (('warmup', 0), ('patience', 1)):
            value: Any = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise DevPlugError(
                    f'CompilationHook.{name}={value!r} (accelerator.compilations.{name}): '
                    f'expected a whole number of at least {least}.'
                )

"""What the config's key ``accelerator`` may hold besides arguments of the accelerator."""

from typing import Any, Dict

#: The runner's own options and their defaults.
RUNNER_OPTIONS: Dict[str, Any] = dict(
    backend=None,
    compilation_cache=None,
    compilations=True,
    heartbeat_timeout=None,
    hook={},
    memory=True,
    mmcv_ops='host',
    monitor=True,
    on_nan=None,
    pad_to=None,
    preemption=True,
    safe_checkpoints=True,
)

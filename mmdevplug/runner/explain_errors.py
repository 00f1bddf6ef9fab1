"""End all ranks together, and say in words of ours what PyTorch and MMEngine leave open."""

from contextlib import contextmanager
from typing import Any, Iterator

from mmdevplug.accelerators import device_context
from mmdevplug.data.checking import explain_no_batch
from mmdevplug.fault_tolerance.failure import fail_together
from mmdevplug.utils.model import unwrap_model


@contextmanager
def explained(runner: Any, stage: str) -> Iterator[None]:
    """Explain an error of a loop, ``'train'``, ``'val'`` or ``'test'``; tell the other ranks."""
    with fail_together(stage), explain_no_batch():
        try:
            yield
        except (RuntimeError, TypeError, ValueError):
            context = device_context()
            if context is None:
                raise
            from mmdevplug.device_guard.explain import explain_mixed_devices

            place = f'rank {runner.rank}, {stage}'
            with explain_mixed_devices(unwrap_model(runner.model), context.devices, place):
                raise

"""End all ranks together, and say in words of ours what PyTorch and MMEngine leave open."""

from contextlib import contextmanager
from typing import Any, Iterator
from weakref import ref

from torch import distributed as torch_dist

from mmdevplug.data.checking import explain_no_batch
from mmdevplug.device_guard.explain import explain_cuda
from mmdevplug.errors import LaunchError
from mmdevplug.fault_tolerance.failure import fail_together
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.model import unwrap_model


@contextmanager
def explained(runner: AnyRunner, stage: str) -> Iterator[None]:
    """Explain an error of a loop, ``'train'``, ``'val'`` or ``'test'``; tell the other ranks."""
    if current_group() != runner.process_group:
        raise LaunchError(
            'the process group is not the one that this runner was built with: delete '
            'destroy_process_group() and init_process_group() from the script; the runner starts '
            'the group, with the backend of accelerator.backend.'
        )
    devices = runner.device_context.devices
    with fail_together(stage), explain_no_batch(), explain_cuda(devices[0]):
        try:
            yield
        except (RuntimeError, TypeError, ValueError):
            from mmdevplug.device_guard.explain import explain_mixed_devices

            place = f'rank {runner.rank}, {stage}'
            with explain_mixed_devices(unwrap_model(runner.model), devices, place):
                raise


def current_group() -> Any:
    """A weak reference: threads of a group that is kept run until the interpreter ends."""
    started = torch_dist.is_available() and torch_dist.is_initialized()
    return ref(torch_dist.distributed_c10d._get_default_group()) if started else None

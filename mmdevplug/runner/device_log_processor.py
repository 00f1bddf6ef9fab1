"""Fill the memory column of the log on any accelerator."""

from typing import Any, Tuple, Union

from mmengine.registry import LOG_PROCESSORS
from mmengine.runner import LogProcessor

from mmdevplug.distributed.rank_device import enter_rank_device
from mmdevplug.utils.annotations import AnyRunner

MB = 2**20


@LOG_PROCESSORS.register_module()
class DeviceLogProcessor(LogProcessor):
    """MMEngine's log processor, with the memory of the accelerator in use.

    MMEngine fills the column ``memory`` on CUDA and MUSA only. Here every log line of training,
    validation and testing has it where the vendor reports peak memory. Arguments are those of
    :class:`mmengine.runner.LogProcessor`.
    """

    def get_log_after_iter(self, runner: AnyRunner, batch_idx: int, mode: str) -> Tuple[dict, str]:
        """See :meth:`mmengine.runner.LogProcessor.get_log_after_iter`."""
        tag, line = super().get_log_after_iter(runner, batch_idx, mode)
        peak = _peak()
        if peak is not None and 'memory' not in tag:
            tag['memory'] = peak
            line = f'{line.rstrip()}  memory: {peak}'
        return tag, line

    def _get_max_memory(self, runner: AnyRunner) -> int:
        # MMEngine calls it where CUDA or MUSA is present, also if another device is in use.
        return _peak() or 0


def _peak() -> Union[int, None]:
    accelerator, device = enter_rank_device()
    peak = accelerator.max_memory_allocated(device)
    return None if peak is None else peak // MB


def device_log_processor(cfg: object) -> Any:
    """Replace MMEngine's log processor in a config; others stay."""
    if isinstance(cfg, dict) and cfg.get('type', 'LogProcessor') in ('LogProcessor', LogProcessor):
        return dict(cfg, type=DeviceLogProcessor)
    return cfg

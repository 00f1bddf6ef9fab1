"""Fill the memory column of the log on any accelerator, and average losses over ranks."""

import re
from typing import Dict, List, Tuple, Union

from mmengine.registry import LOG_PROCESSORS
from mmengine.runner import LogProcessor

from mmdevplug.accelerators import context_of
from mmdevplug.errors import DevPlugError
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.loops import length_of, loader_of

MB = 2**20


@LOG_PROCESSORS.register_module()
class DeviceLogProcessor(LogProcessor):
    """MMEngine's log processor, with the memory of the accelerator in use.

    MMEngine fills the column ``memory`` on CUDA and MUSA only. Here every log line of training,
    validation and testing has it where the vendor reports peak memory.

    Args:
        average_losses (bool): Whether losses and accuracies of training, and losses of validation,
            are logged as the mean of all ranks; they meet for it once for each line of the log.
            Defaults to False: as in MMEngine, those of rank 0.
        **options: Those of :class:`mmengine.runner.LogProcessor`.
    """

    lost = 'the log has no memory of other devices than CUDA, and losses are not averaged'

    def __init__(self, average_losses: bool = False, **options: object) -> None:
        super().__init__(**options)
        if not isinstance(average_losses, bool):
            raise DevPlugError(
                f'log_processor.average_losses={average_losses!r}: expected True or False.'
            )
        self.average_losses = average_losses
        #: Pattern of the values that the next log line averages; '' if it averages none.
        self._averaged = ''

    def get_log_after_iter(self, runner: AnyRunner, batch_idx: int, mode: str) -> Tuple[dict, str]:
        """See :meth:`mmengine.runner.LogProcessor.get_log_after_iter`."""
        # Ranks may validate different numbers of batches, and meet only after the last.
        self._averaged = 'loss|acc' if mode == 'train' else ''
        tag, line = super().get_log_after_iter(runner, batch_idx, mode)
        peak = _peak(runner)
        if peak is not None and 'memory' not in tag:
            tag['memory'] = peak
            line = f'{line.rstrip()}  memory: {peak}'
        return tag, line

    def get_log_after_epoch(
        self, runner: AnyRunner, batch_idx: int, mode: str, *args: object, **options: object
    ) -> Tuple[dict, str]:
        """See :meth:`mmengine.runner.LogProcessor.get_log_after_epoch`."""
        self._averaged = 'loss' if mode == 'val' else ''
        return super().get_log_after_epoch(runner, batch_idx, mode, *args, **options)

    def _collect_scalars(
        self, custom_cfg: List[dict], runner: AnyRunner, mode: str, *args: object
    ) -> dict:
        tag = super()._collect_scalars(custom_cfg, runner, mode, *args)
        if self.average_losses and self._averaged:
            tag.update(_average({key: tag[key] for key in tag if re.search(self._averaged, key)}))
        return tag

    def _get_dataloader_size(self, runner: AnyRunner, mode: str) -> int:
        """The batches of a pass, or all iterations where a stream has no length."""
        loop = self._get_cur_loop(runner, mode)
        known = getattr(loop, 'total_length', None) or length_of(loader_of(loop))  # mmagic's loops
        return runner.max_iters if known is None else known

    def _get_max_memory(self, runner: AnyRunner) -> int:
        # MMEngine calls it where CUDA or MUSA is present, also if another device is in use.
        return _peak(runner) or 0


def _average(values: Dict[str, float]) -> Dict[str, float]:
    """The mean of each value over the ranks that have it; this rank keeps its names."""
    from mmdevplug.samples import gather_samples

    ranks = gather_samples([values], same_structure=False)
    means = {}
    for name in values:
        values_of_ranks = [rank[name] for rank in ranks if name in rank]
        means[name] = sum(values_of_ranks) / len(values_of_ranks)
    return means


def _peak(runner: AnyRunner) -> Union[int, None]:
    context = context_of(runner)
    peak = context.accelerator.max_memory_allocated(context.device)
    return None if peak is None else peak // MB

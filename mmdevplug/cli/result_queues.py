"""Send each rank the queue for its own result: PyTorch sends all queues to all ranks.

Two descriptors of each other rank stayed open in a rank, and no more than some 120 ranks could be
started, since Linux sends a process at most 253 of them.
"""

from typing import TYPE_CHECKING, Dict, Tuple

from mmdevplug.utils.patching import OWN, Patch, patch_symbol

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue


class SentOneByOne(Dict[int, 'SimpleQueue']):
    """Queues by local rank, of which each process is sent the next: they start in this order."""

    def __init__(self, queues: Dict[int, 'SimpleQueue']) -> None:
        super().__init__(queues)
        self._next = iter(list(self.items()))

    def __reduce__(self) -> Tuple[object, ...]:
        return dict, (dict([next(self._next)]),)


def send_one_by_one() -> Patch:
    """Have PyTorch's elastic agent start ranks in this way, until that is restored."""
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

    start = MultiprocessContext._start

    def started(context: MultiprocessContext) -> None:
        context._ret_vals = SentOneByOne(context._ret_vals)
        start(context)

    return patch_symbol(MultiprocessContext, '_start', started, OWN)

"""Let metrics gather their results through the process group."""

import sys
from functools import wraps
from itertools import chain, zip_longest
from typing import Callable, Optional

from mmengine.dist import dist as dist_functions, get_world_size
from torch import distributed as torch_dist

from mmdevplug.distributed.gather_results import gather_results
from mmdevplug.distributed.waiting import run_on_main
from mmdevplug.fault_tolerance.failure import current_watch
from mmdevplug.utils.annotations import AnyGroup
from mmdevplug.utils.patching import KEPT, patch_symbol

#: For how long a rank that is alive is waited for.
MOST_SECONDS = 30 * 24 * 3600.0
_TRACKING = 'mmdet.evaluation.metrics.base_video_metric'


def patch_result_collection() -> None:
    """Replace what ``mmengine.dist.collect_results`` calls for each ``collect_device``."""
    for name in ('collect_results_cpu', '_collect_results_device'):
        patch_symbol(dist_functions, name, _collect_results)
    for owner, name in (
        (torch_dist, 'broadcast_object_list'),
        (dist_functions, '_broadcast_object_list'),
    ):
        if hasattr(owner, name):
            patch_symbol(owner, name, _after_main(getattr(owner, name)))


def _after_main(broadcast: Callable) -> Callable:
    """Begin when rank 0 has come: a metric may take it longer than the timeout."""

    @wraps(broadcast)
    def wait_and_broadcast(
        object_list: list,
        src: Optional[int] = 0,
        group: AnyGroup = None,
        *args: object,
        **options: object,
    ) -> object:
        of_all = group is None or group == torch_dist.GroupMember.WORLD
        if of_all and not (src or options.get('group_src')):
            # While it lives, which its heartbeat tells; else the timeout holds.
            limit = None if current_watch() is None else MOST_SECONDS
            run_on_main('computing metrics', lambda: None, limit)
        return broadcast(object_list, src, group, *args, **options)

    return wait_and_broadcast


def patch_video_metrics() -> None:
    """Let mmdet's metrics of videos gather results as others do, if mmdet was imported."""
    module = sys.modules.get(_TRACKING)
    of_mmdet = getattr(module, 'collect_tracking_results_cpu', None)
    if of_mmdet is not None and not hasattr(of_mmdet, '__wrapped__'):
        patch_symbol(module, of_mmdet.__name__, _collecting_videos(of_mmdet), KEPT)


def _collect_results(results: list, size: int, tmpdir: Optional[str] = None) -> Optional[list]:
    """See ``mmengine.dist.collect_results``: results of all ranks by turns, without None.

    A folder, such as a metric's ``collect_dir``, is not needed.
    """
    if get_world_size() == 1:
        return results[:size]
    parts = gather_results(results)
    if parts is None:
        return None
    return [each for each in chain.from_iterable(zip_longest(*parts)) if each is not None][:size]


def _collecting_videos(of_mmdet: Callable) -> Callable:
    @wraps(of_mmdet)
    def collect(result_part: list, tmpdir: Optional[str] = None) -> Optional[list]:
        if get_world_size() == 1:
            return of_mmdet(result_part, tmpdir)
        parts = gather_results(result_part)
        return None if parts is None else list(chain.from_iterable(parts))

    return collect

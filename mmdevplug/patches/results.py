"""Let metrics gather their results through the process group."""

import sys
from functools import wraps
from itertools import chain, zip_longest
from typing import Any, Callable, List, Optional

from mmengine.dist import dist as dist_functions, get_world_size
from torch import distributed as torch_dist

from mmdevplug.accelerators import to_device
from mmdevplug.distributed.results import check_shared_folder, gather_results
from mmdevplug.distributed.waiting import run_on_main
from mmdevplug.fault_tolerance.failure import current_watch
from mmdevplug.utils.annotations import AnyGroup
from mmdevplug.utils.loops import metrics_of
from mmdevplug.utils.patching import patch_symbol

#: For how long a rank that is alive is waited for.
MOST_SECONDS = 30 * 24 * 3600.0
_TRACKING = 'mmdet.evaluation.metrics.base_video_metric'


def patch_result_collection() -> None:
    """Replace what ``mmengine.dist.collect_results`` calls for each ``collect_device``.

    With a ``collect_dir`` of the config MMEngine's own function uses that folder.
    """
    in_folder = dist_functions.collect_results_cpu

    @wraps(in_folder)
    def collect_results_cpu(result_part: list, size: int, tmpdir: Optional[str] = None) -> Any:
        if tmpdir is not None:
            return in_folder(to_device(result_part, 'cpu'), size, tmpdir)
        return _collect_results(result_part, size)

    patch_symbol(dist_functions, 'collect_results_cpu', collect_results_cpu)
    patch_symbol(dist_functions, '_collect_results_device', _collect_results)
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
        objects: list, src: Optional[int] = 0, group: AnyGroup = None, *args: Any, **options: Any
    ) -> Any:
        of_all = group is None or group == torch_dist.GroupMember.WORLD
        if of_all and not (src or options.get('group_src')):
            # While it lives, which its heartbeat tells; else the timeout holds.
            limit = None if current_watch() is None else MOST_SECONDS
            run_on_main('computing metrics', lambda: None, limit)
        return broadcast(objects, src, group, *args, **options)

    return wait_and_broadcast


def prepare_metrics(loops: List[Any]) -> None:
    """Check the folders that metrics of some loops name, and patch mmdet's metrics of videos.

    All ranks have to call it, when the loops are built.
    """
    for loop in loops:
        for metric in metrics_of(loop):
            folder = getattr(metric, 'collect_dir', None)
            if folder is not None:
                check_shared_folder(folder, f'{type(metric).__name__}.collect_dir')
    module = sys.modules.get(_TRACKING)
    of_mmdet = getattr(module, 'collect_tracking_results_cpu', None)
    if of_mmdet is not None and not hasattr(of_mmdet, '__wrapped__'):
        patch_symbol(module, of_mmdet.__name__, _collecting_videos(of_mmdet))


def _collect_results(results: list, size: int) -> Optional[list]:
    """See ``mmengine.dist.collect_results``: results of all ranks by turns, without None."""
    if get_world_size() == 1:
        return results[:size]
    parts = gather_results(results)
    if parts is None:
        return None
    return [each for each in chain.from_iterable(zip_longest(*parts)) if each is not None][:size]


def _collecting_videos(of_mmdet: Callable) -> Callable:
    @wraps(of_mmdet)
    def collect(result_part: list, tmpdir: Optional[str] = None) -> Optional[list]:
        if tmpdir is not None or get_world_size() == 1:
            return of_mmdet(result_part, tmpdir)
        parts = gather_results(result_part)
        return None if parts is None else list(chain.from_iterable(parts))

    return collect

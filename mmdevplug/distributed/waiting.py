"""Wait for the other ranks in PyTorch's store, and name the missing ranks and their phases."""

import json
from datetime import timedelta
from typing import Any, Callable, List, Optional, Tuple

from torch import distributed as torch_dist

from mmdevplug.accelerators import group_timeout
from mmdevplug.accelerators.context import group_env
from mmdevplug.distributed.process_group import Timeout, to_timeout
from mmdevplug.environments.launch_variables import LaunchEnv
from mmdevplug.fault_tolerance.failure import current_job
from mmdevplug.fault_tolerance.store_barrier import (
    leave_together,
    meet,
    next_meeting,
    run_on_every_rank,
)
from mmdevplug.utils.torch_compat import get_text, set_text


def wait_for_everyone(phase: str, timeout: Timeout = None) -> None:
    """Wait until every rank has come here; does nothing in a single process.

    It is no collective: it uses the store. Once a minute one rank says where each rank is.

    Args:
        phase (str): What is being done, for messages; the same on all ranks.
        timeout (float or timedelta, optional): In seconds. Defaults to None: the timeout of the
            process group.

    Raises:
        RankFailedError: If a rank has not come in time, or failed meanwhile.

    Examples:
        >>> wait_for_everyone('data preparation')
    """
    job = _job(timeout)
    if job is None:
        return
    store, env, limit = job
    # The same keys every time: some callers come here in every iteration, and the store lives in
    # the memory of one process.
    prefix = f'mmdevplug/waiting/{phase}'
    leave_together(store, env, prefix, meet(store, env, prefix, phase, limit))


def run_on_main(phase: str, function: Callable[[], object], timeout: Timeout = None) -> Any:
    """Call a function on rank 0 while the others wait for its result.

    Args:
        phase (str): What is being done, for messages; the same on all ranks.
        function (callable): Called without arguments; returns what JSON can hold.
        timeout (float or timedelta, optional): See :func:`wait_for_everyone`.

    Returns:
        Any: The function's result, on every rank; tuples have become lists on the others.

    Raises:
        Exception: On rank 0, what the function raised.
        RankFailedError: On the other ranks in that case, or if rank 0 is not ready in time.

    Examples:
        >>> run_on_main('finding the newest checkpoint', lambda: 'epoch_3.pth')
        'epoch_3.pth'
    """
    job = _job(timeout)
    if job is None:
        return function()
    store, env, limit = job
    key = next_meeting(store, env, f'result/{phase}')

    def run() -> object:
        if env.rank:
            return None
        result = function()
        set_text(store, key, json.dumps(result))
        return result

    result = run_on_every_rank(store, env, phase, run, limit)
    return result if env.rank == 0 else json.loads(get_text(store, key))


def decide_together(
    phase: str, value: object, decide: Callable[[List[Any]], Any], timeout: Timeout = None
) -> Any:
    """Wait for all ranks, and let rank 0 decide from the values of all ranks.

    Args:
        phase (str): What is being done, for messages; the same on all ranks.
        value: The value of this rank, as JSON can hold it.
        decide (callable): Called on rank 0 with the values in the order of ranks; returns what
            JSON can hold.
        timeout (float or timedelta, optional): See :func:`wait_for_everyone`.

    Returns:
        Any: The decision, on every rank; tuples have become lists on the others.

    Raises:
        RankFailedError: If a rank has not come in time, or failed meanwhile.

    Examples:
        >>> decide_together('counting', 3, sum)
        3
    """
    job = _job(timeout)
    if job is None:
        return decide([value])
    store, env, _ = job
    prefix = next_meeting(store, env, f'values/{phase}')
    set_text(store, f'{prefix}/{env.rank}', json.dumps(value))
    wait_for_everyone(phase, timeout)

    def run() -> object:
        values = []
        for rank in range(env.world_size):
            values.append(json.loads(get_text(store, f'{prefix}/{rank}')))
        return decide(values)

    return run_on_main(phase, run, timeout)


def _job(timeout: Timeout) -> Optional[Tuple['torch_dist.Store', LaunchEnv, timedelta]]:
    """The store, how this process was started, and how long to wait; None in a single process."""
    found = current_job()
    if found is None:
        if not (torch_dist.is_available() and torch_dist.is_initialized()):
            return None
        if torch_dist.get_world_size() == 1:
            return None
        # Under a stock runner, whose process group was not made here.
        store = torch_dist.distributed_c10d._get_default_store()
        found = torch_dist.PrefixStore('mmdevplug', store), group_env()
    return (*found, to_timeout(timeout, group_timeout(), 'timeout'))

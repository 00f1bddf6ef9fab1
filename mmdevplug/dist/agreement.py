"""Failing together: errors of one rank made known to all through the store."""

import json
import logging
from collections import Counter
from datetime import timedelta
from typing import Any, Optional

from mmdevplug.errors import RankFailedError

from .launch import LaunchEnv

#: How often this process met the others, by stage; equal on all ranks.
_meetings: Counter = Counter()


def raise_on_any_rank(
    store: Any, env: LaunchEnv, stage: str, error: Optional[Exception], timeout: timedelta
) -> None:
    """Meet with the other ranks and raise everywhere if any of them met an error.

    Costs one round trip for each rank, and one more for the ranks that failed.

    Args:
        store (torch.distributed.Store): A store that all ranks share.
        env (LaunchEnv): How this process was started.
        stage (str): What was being done.
        error (Exception, optional): This rank's error, None if all went well.
        timeout (timedelta): How long to wait for the slowest rank.

    Raises:
        DevPlugError: On every rank, if any rank had an error: its own on a rank that failed, and
            one that names the failing ranks on the others.
    """
    if env.world_size == 1:
        if error is not None:
            raise error
        return
    # A store outlives a process group: a second meeting must not find the first one's marks.
    _meetings[stage] += 1
    prefix = f'mmdevplug/{stage}/{_meetings[stage]}'
    if error is not None:
        ticket = store.add(f'{prefix}/failures', 1)
        report = {'who': env.describe(), 'message': str(error)}
        store.set(f'{prefix}/failure/{ticket}', json.dumps(report))
    if store.add(f'{prefix}/arrived', 1) == env.world_size:
        store.set(f'{prefix}/complete', '1')
    try:
        store.wait([f'{prefix}/complete'], timeout)
    except RuntimeError as lost:
        if error is not None:
            raise error from lost
        arrived = store.add(f'{prefix}/arrived', 0)
        raise RankFailedError(
            f'{env.describe()} waited {timeout.total_seconds():.0f} s at {stage!r}, where '
            f'{arrived} of {env.world_size} ranks arrived. Look at the log of the missing ranks; '
            f'a slow start needs a longer env_cfg.dist_cfg.timeout.'
        ) from lost
    count = store.add(f'{prefix}/failures', 0)
    if not count:
        return
    reports = [json.loads(store.get(f'{prefix}/failure/{i + 1}')) for i in range(count)]
    _leave_together(store, env, prefix)
    if error is not None:
        raise error
    told = '\n'.join(f'  {report["who"]}: {report["message"]}' for report in reports)
    raise RankFailedError(f'{count} of {env.world_size} ranks failed at {stage!r}:\n{told}')


def _leave_together(store: Any, env: LaunchEnv, prefix: str) -> None:
    """Keep the rank that holds the store alive until the others have read the reports."""
    if store.add(f'{prefix}/read', 1) == env.world_size:
        store.set(f'{prefix}/read_by_all', '1')
    try:
        store.wait([f'{prefix}/read_by_all'], timedelta(seconds=10))
    except RuntimeError as gone:
        # The holder of the store may have left already; the reports are in hand.
        logging.getLogger(__name__).debug('the store ended early: %s', gone)

"""One rank of the test of collectives: runs them all, times them, and agrees with the others."""

import itertools
import os
import statistics
import time
from contextlib import suppress
from typing import Any, Dict, List, NamedTuple, Sequence

import torch
from torch import distributed as torch_dist

from mmdevplug.distributed.json_messages import gather_json
from mmdevplug.distributed.process_group import DeviceContext
from mmdevplug.environments.launch import read_launch_env
from mmdevplug.runner.init_device import init_device

from .collectives import SIZED, Case, Peers, is_lacking, problems
from .comm_progress import Progress
from .request import Setting
from .sockets import listening_here

SIZES = (1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
FLOAT_BYTES = 4


class Measure(NamedTuple):
    """How collectives are tried.

    Attributes:
        largest (int): Bytes of the largest message.
        rounds (int): How often each is timed.
        timeout (float): Seconds that a collective may take.
    """

    largest: int = SIZES[-1]
    rounds: int = 5
    timeout: float = 120.0

    def sizes(self) -> List[int]:
        """Bytes of the messages."""
        return [size for size in SIZES if size <= self.largest] or [self.largest]


def run_rank(launcher: str, setting: Setting, measure: Measure, progress: Progress) -> Any:
    """Take part in the test.

    Args:
        launcher (str): How this process was started.
        setting (Setting): Config and accelerator.
        measure (Measure): Sizes and numbers.
        progress (Progress): Learns what this rank is doing.

    Returns:
        dict: The results, the same on all ranks.
    """
    progress.at('loading the config')
    cfg = setting.load()
    progress.at('starting the process group')
    context = _start(launcher, setting, cfg, measure)
    progress.store = torch_dist.distributed_c10d._get_default_store()
    progress.at('meeting the others')
    torch_dist.barrier()
    takes = context.accelerator.takes_tensors(context.backend)
    peers = Peers(
        context,
        context.env.rank,
        context.env.world_size,
        context.device if takes else torch.device('cpu'),
    )
    outcomes = [_try_unsized('barrier', _barrier_problem, peers, measure, progress)]
    for name in SIZED:
        outcomes.append(_try_sized(name, peers, measure, progress))
    progress.at('comparing results')
    results = _agree(outcomes, peers)
    progress.at('done')
    torch_dist.barrier()
    return results


def _start(launcher: str, setting: Setting, cfg: Any, measure: Measure) -> DeviceContext:
    options = setting.options(cfg)
    dist_cfg = {} if cfg is None else (cfg.get('env_cfg') or {}).get('dist_cfg') or {}
    return init_device(
        launcher,
        options.device,
        forced_backend=options.backend,
        backend=dist_cfg.get('backend'),
        timeout=measure.timeout,
    )


_barriers = itertools.count()


def _barrier_problem(peers: Peers) -> str:
    """Count arrivals in the store: behind a barrier, all ranks have arrived before it."""
    key = f'mmdevplug/doctor/barrier/{next(_barriers)}'
    store = torch_dist.distributed_c10d._get_default_store()
    store.add(key, 1)
    torch_dist.barrier()
    arrived = store.add(key, 0)
    return '' if arrived == peers.size else f'rank {peers.rank} saw {arrived} ranks arrive'


def _try_unsized(
    name: str, problem: Any, peers: Peers, measure: Measure, progress: Progress
) -> Dict[str, Any]:
    progress.at(name)
    outcome: Dict[str, Any] = dict(name=name, offered=True, problems=[], times={})
    times = []
    for _ in range(measure.rounds):
        begin = time.perf_counter()
        try:
            found = problem(peers)
        except Exception as error:
            if not is_lacking(error):
                raise
            return dict(outcome, offered=False)
        times.append(time.perf_counter() - begin)
        outcome['problems'] += [found] if found else []
    outcome['times'] = {'0': times}
    return outcome


def _try_sized(name: str, peers: Peers, measure: Measure, progress: Progress) -> Dict[str, Any]:
    outcome: Dict[str, Any] = dict(name=name, offered=True, problems=[], times={})
    for size in measure.sizes():
        progress.at(f'{name} of {size} bytes')
        try:
            case = SIZED[name](peers, max(1, size // FLOAT_BYTES))
            outcome['times'][str(size)] = _time(case, peers, measure.rounds)
        except Exception as error:
            if not is_lacking(error):
                raise
            return dict(outcome, offered=False)
        outcome['problems'] += problems(case, peers)
    return outcome


def _time(case: Case, peers: Peers, rounds: int) -> List[float]:
    accelerator, device = peers.context.accelerator, peers.context.device
    times = []
    for _ in range(rounds + 1):
        case.reset()
        accelerator.synchronize(device)
        torch_dist.barrier()
        begin = time.perf_counter()
        case.run()
        accelerator.synchronize(device)
        times.append(time.perf_counter() - begin)
    return times[1:]  # the first of a size allocates


def _agree(outcomes: Sequence[Dict[str, Any]], peers: Peers) -> Dict[str, Any]:
    """Bring the outcomes of all ranks together; the same result on all of them."""
    context = peers.context
    mine = dict(
        outcomes=outcomes, device=str(context.device), listening=listening_here(peers.rank)
    )
    everyone = gather_json(mine)
    checks = []
    for number, outcome in enumerate(outcomes):
        of_ranks = [told['outcomes'][number] for told in everyone]
        checks.append(_merge(outcome['name'], of_ranks))
    return dict(
        passed=all(check['status'] != 'fail' for check in checks),
        world_size=peers.size,
        accelerator=context.accelerator.name,
        backend=context.backend,
        single_host=context.env.single_host,
        tensors_on=peers.device.type,
        devices=[told['device'] for told in everyone],
        listening=[one for told in everyone for one in told['listening']],
        checks=checks,
    )


def _merge(name: str, of_ranks: List[Dict[str, Any]]) -> Dict[str, Any]:
    found = [problem for outcome in of_ranks for problem in outcome['problems']]
    offered = [outcome['offered'] for outcome in of_ranks]
    if any(offered) != all(offered):
        found.append(f'offered on some ranks alone: {offered}')
    status = 'fail' if found else 'pass' if all(offered) else 'not offered'
    points = []
    for size in of_ranks[0]['times'] if all(offered) else ():
        # A collective is over when the slowest rank is.
        rounds = zip(*[outcome['times'][size] for outcome in of_ranks])
        seconds = statistics.median(max(times) for times in rounds)
        points.append(dict(bytes=int(size), seconds=seconds))
    return dict(name=name, status=status, problems=found[:8], points=points)


def rank_and_size(launcher: str) -> Any:
    """This process's rank and the number of ranks, checked."""
    env = read_launch_env(launcher)
    return env.rank, env.world_size


def leave() -> None:
    """End the process group; a peer that is gone is no reason to fail now."""
    if torch_dist.is_initialized():
        with suppress(RuntimeError):
            torch_dist.destroy_process_group()


def is_first() -> bool:
    """Whether this process speaks for all."""
    return os.environ.get('RANK', '0') == '0'

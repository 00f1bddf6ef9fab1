"""Run one rank of the test of collectives: compare with known values, time, and agree.

Rank r of N puts in ``(r + 1) * pattern``, where the pattern repeats 1 to 7. All values are whole
numbers that float32 holds exactly; only averages are rounded.
"""

import itertools
import json
import os
import re
import statistics
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional

import torch
from mmengine.config import Config
from torch import Tensor, distributed as torch_dist, nn

from mmdevplug.accelerators import DeviceContext
from mmdevplug.accelerators.backend import takes_tensors
from mmdevplug.distributed.byte_exchange import gather_json
from mmdevplug.fault_tolerance.failure import enter_phase, fail_together
from mmdevplug.gradients import DeviceDistributedDataParallel
from mmdevplug.runner.init_device import init_device

from .accelerators import accelerator_options
from .network import listening_here

#: Bytes of the messages.
SIZES = (1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
FLOAT_BYTES = 4
#: Relative to the largest expected value.
TOLERANCE = 1e-6
#: Of a collective; more say nothing new.
MOST_PROBLEMS = 8

#: What a backend says that lacks a collective, on all ranks and before anything is sent.
_LACKING = re.compile(r'does not (support|implement)|not (yet )?(supported|implemented)', re.I)


class Case(NamedTuple):
    """A collective with tensors of one size."""

    run: Callable[[], Any]
    #: Says what is wrong with the results of the last run.
    problems: Callable[[], Iterable[str]]
    #: Restores the inputs; not timed.
    reset: Callable[[], Any] = lambda: None


class Ranks:
    """The ranks of a process group, their values, and the device for them."""

    def __init__(self, context: DeviceContext) -> None:
        self.context = context
        self.rank, self.size = context.env.rank, context.env.world_size
        takes = takes_tensors(context.accelerator, context.backend)
        self.device = context.device if takes else torch.device('cpu')

    def pattern(self, count: int, factor: float = 1.0) -> Tensor:
        return factor * (torch.arange(count, device='cpu') % 7 + 1).float()

    def own(self, count: int) -> Tensor:
        return self.pattern(count, self.rank + 1)

    @property
    def total(self) -> int:
        """The sum of ``r + 1`` over all ranks."""
        return self.size * (self.size + 1) // 2

    def compare(
        self, found: Tensor, expected: Tensor, device: Optional[torch.device] = None
    ) -> Iterator[str]:
        """Say what is wrong with a result: its device (default ``self.device``), shape, values."""
        device = device or self.device
        which = f'a tensor of rank {self.rank}'
        if found.device != device:
            yield f'{which} is on {found.device}, expected {device}'
        if found.shape != expected.shape:
            yield f'{which} has shape {tuple(found.shape)}, expected {tuple(expected.shape)}'
            return
        if found.device.type != 'cpu':
            (found,) = self.context.accelerator.copies.to_host([found])
        difference = (found.detach() - expected).abs()
        # Written so that NaN fails as well.
        wrong = ~(difference <= TOLERANCE * expected.abs().max())
        if wrong.any():
            at = int(wrong.nonzero()[0])
            yield f'{which} holds {found[at].item():g} at {at}, expected {expected[at].item():g}'


def _barrier(ranks: Ranks, count: int) -> Case:
    store = torch_dist.distributed_c10d._get_default_store()
    rounds, problems = itertools.count(), []

    def run() -> None:
        # Behind a barrier, all ranks have counted themselves in the store.
        key = f'mmdevplug/checks/barrier/{next(rounds)}'
        store.add(key, 1)
        torch_dist.barrier()
        arrived = store.add(key, 0)
        if arrived != ranks.size:
            problems.append(f'rank {ranks.rank} saw {arrived} ranks arrive, expected {ranks.size}')

    return Case(run, lambda: problems)


def _in_place(ranks: Ranks, count: int, collective: Callable[[Tensor], Any], factor: int) -> Case:
    """A collective that replaces the values of every rank by ``factor * pattern``."""
    own = ranks.own(count).to(ranks.device)
    tensor = own.clone()
    return Case(
        lambda: collective(tensor),
        lambda: ranks.compare(tensor, ranks.pattern(count, factor)),
        lambda: tensor.copy_(own),
    )


def _all_reduce(ranks: Ranks, count: int) -> Case:
    return _in_place(ranks, count, torch_dist.all_reduce, ranks.total)


def _broadcast(ranks: Ranks, count: int) -> Case:
    last = ranks.size - 1
    return _in_place(ranks, count, lambda own: torch_dist.broadcast(own, last), last + 1)


def _all_gather(ranks: Ranks, count: int) -> Case:
    own = ranks.own(count).to(ranks.device)
    gathered = [torch.zeros_like(own) for _ in range(ranks.size)]

    def problems() -> Iterator[str]:
        for rank, tensor in enumerate(gathered):
            yield from ranks.compare(tensor, ranks.pattern(count, rank + 1))

    return Case(
        lambda: torch_dist.all_gather(gathered, own),
        problems,
        lambda: [tensor.zero_() for tensor in gathered],
    )


class _Weighted(nn.Module):
    """One parameter, whose gradient is the input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, device='cpu'))

    def forward(self, factors: Tensor) -> Tensor:
        return (self.weight * factors).sum()


def _gradient_averaging(ranks: Ranks, count: int) -> Case:
    """A backward pass of the model wrapper, as in training."""
    device = ranks.context.device
    wrapper = DeviceDistributedDataParallel(_Weighted(count))
    factors, weight = ranks.own(count).to(device), wrapper.module.weight

    expected = ranks.pattern(count, ranks.total / ranks.size)
    return Case(
        lambda: wrapper(factors).backward(),
        lambda: ranks.compare(weight.grad, expected, device),
        lambda: setattr(weight, 'grad', None),
    )


#: Timed with messages of several sizes.
SIZED: Dict[str, Callable[[Ranks, int], Case]] = {
    'all_reduce': _all_reduce,
    'broadcast': _broadcast,
    'all_gather': _all_gather,
    'gradient averaging': _gradient_averaging,
}


class Progress:
    """Report what this rank does: to the other ranks, and in a file if there is a folder."""

    def __init__(self, rank: int, folder: Optional[str] = None) -> None:
        self._path = None if folder is None else Path(folder) / f'rank-{rank}.json'
        self._report: Dict[str, Any] = dict(rank=rank, count=0, stage='', error=None)

    @property
    def stage(self) -> str:
        return self._report['stage']

    def enter(self, stage: str) -> None:
        """Begin a stage."""
        enter_phase(stage)
        self._write(stage=stage, count=self._report['count'] + 1)

    def fail(self, error: BaseException) -> None:
        """Leave the error of this rank."""
        self._write(error=f'{type(error).__name__}: {error}')

    def _write(self, **changed: Any) -> None:
        self._report.update(changed)
        if self._path is not None:
            unfinished = self._path.with_suffix('.unfinished')
            unfinished.write_text(json.dumps(self._report), encoding='utf-8')
            os.replace(str(unfinished), str(self._path))


@contextmanager
def reporting(progress: Progress) -> Iterator[None]:
    """Report an error of this rank, and end the job together with the others."""
    try:
        yield
    except Exception as error:
        progress.fail(error)
        # Not around all of it: only the timeout ends the wait for a rank that hangs.
        with fail_together(progress.stage):
            raise


def run_rank(
    launcher: str,
    accelerator: Optional[str] = None,
    config: Optional[str] = None,
    largest: int = SIZES[-1],
    rounds: int = 5,
    timeout: float = 120.0,
    progress: Optional[Progress] = None,
) -> Dict[str, Any]:
    """Take part in the test; return the results, the same on all ranks."""
    progress = progress or Progress(0)
    progress.enter('loading the config')
    cfg = Config() if config is None else Config.fromfile(config)
    progress.enter('starting the process group')
    options = accelerator_options(cfg, accelerator)
    context = init_device(
        launcher,
        options.device,
        forced_backend=options.backend,
        backend=((cfg.get('env_cfg') or {}).get('dist_cfg') or {}).get('backend'),
        timeout=timeout,
    )
    progress.enter('barrier')
    ranks = Ranks(context)
    outcomes = [_try('barrier', _barrier, 0, ranks, rounds)]
    for name, make in SIZED.items():
        for size in [size for size in SIZES if size <= largest] or [largest]:
            progress.enter(f'{name} of {size} bytes')
            outcomes.append(_try(name, make, size, ranks, rounds))
    progress.enter('comparing results')
    results = _agree(outcomes, ranks)
    progress.enter('done')
    torch_dist.barrier()
    return results


def _try(
    name: str, make: Callable[[Ranks, int], Case], size: int, ranks: Ranks, rounds: int
) -> Dict[str, Any]:
    """Time a collective after a first run that allocates; check its first and last results."""
    accelerator, device = ranks.context.accelerator, ranks.context.device
    problems: List[str] = []
    seconds: List[float] = []
    try:
        case = make(ranks, max(1, size // FLOAT_BYTES))
        for number in range(rounds + 1):
            case.reset()
            accelerator.synchronize(device)
            torch_dist.barrier()
            begin = time.perf_counter()
            case.run()
            accelerator.synchronize(device)
            seconds.append(time.perf_counter() - begin)
            if number in (0, rounds):
                problems += case.problems()
    except RuntimeError as error:
        if not _LACKING.search(str(error)):
            raise
        problems.append(f'backend {ranks.context.backend!r} does not offer it: {error}')
    return dict(name=name, bytes=size, problems=problems, seconds=seconds[1:])


def _agree(outcomes: List[Dict[str, Any]], ranks: Ranks) -> Dict[str, Any]:
    """Bring the outcomes of all ranks together; the same result on all of them."""
    context = ranks.context
    everyone = gather_json(
        dict(outcomes=outcomes, device=str(context.device), listening=listening_here(ranks.rank))
    )
    checks: Dict[str, Dict[str, Any]] = {}
    for of_ranks in zip(*[each['outcomes'] for each in everyone]):
        name, size = of_ranks[0]['name'], of_ranks[0]['bytes']
        check = checks.setdefault(name, dict(name=name, status='pass', problems=[], points=[]))
        problems = [problem for one in of_ranks for problem in one['problems']]
        check['problems'] = list(dict.fromkeys(check['problems'] + problems))[:MOST_PROBLEMS]
        check['status'] = 'fail' if check['problems'] else 'pass'
        # A collective is over when the slowest rank is.
        slowest = [max(times) for times in zip(*[one['seconds'] for one in of_ranks])]
        if slowest:
            check['points'].append(dict(bytes=size, seconds=statistics.median(slowest)))
    return dict(
        passed=all(check['status'] == 'pass' for check in checks.values()),
        world_size=ranks.size,
        accelerator=context.accelerator.name,
        backend=context.backend,
        single_host=context.env.single_host,
        tensors_on=ranks.device.type,
        devices=[each['device'] for each in everyone],
        listening=[one for each in everyone for one in each['listening']],
        checks=list(checks.values()),
    )

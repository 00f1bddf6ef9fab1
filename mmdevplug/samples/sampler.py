"""Draw rounds of samples on all ranks until the pool of all ranks is full."""

import functools
import logging
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from mmdevplug.accelerators import enter_rank_device, rank_context
from mmdevplug.accelerators.move_nested import to_device
from mmdevplug.distributed.wire import dumps, loads
from mmdevplug.errors import SampleError
from mmdevplug.fault_tolerance.failure import enter_phase, fail_together
from mmdevplug.utils.annotations import AnyGroup, SavedState, StateDict
from mmdevplug.utils.logs import log

from .balancing import balance_samples
from .rounds import (
    DESCRIBED,
    GO_ON,
    SHORT,
    Drawn,
    Pool,
    Rounds,
    Tally,
    decide,
    draw,
    round_name,
    too_few,
)
from .stacking import stack_samples
from .structures import describe_samples

#: Pools between two that rank 0 logs.
LOG_INTERVAL = 10


class SamplingReport(NamedTuple):
    """How one pool was filled; numbers are samples of all ranks unless said otherwise."""

    pool: int  #: Its number, from 1.
    target: int  #: Samples that were requested.
    samples: int  #: What all ranks got together; below ``target`` after ``on_short='fewer'``.
    resamples: int  #: Rounds after the first.
    generated: int  #: What all ranks generated for it.
    valid: int  #: Those of them that were valid.
    reused: int  #: Valid ones that were left over from pools before.
    surplus: int  #: Valid ones that are left for the next pool.
    by_rank: Tuple[int, ...]  #: What each rank had to give, whether drawn for this pool or before.
    slice: Tuple[int, int]  #: Which part of the pool this rank got, as ``[begin:end]``.
    short: Optional[str] = None  #: ``'fewer'`` if there were too few.

    @property
    def kept(self) -> float:
        """The share of what was generated that was valid; 0 if nothing was."""
        return self.valid / self.generated if self.generated else 0.0


class DynamicSampler:
    """Draws samples on all ranks until together they have enough that are valid.

    In each round every rank generates samples and keeps the groups that are valid. Then all ranks
    learn how many the others have, and decide by the sum: they go on, or they stop in the same
    round. The pool, the groups of rank 0, then those of rank 1 and so on, is shared out evenly,
    and each rank gets its slice as one batch on its device. A rank whose own groups would suffice
    goes on drawing with the others, so none waits for one that has stopped.

    Groups that are left over stay on their rank and open the next pool.

    Args:
        generate (callable): Draws this rank's next batch of data and returns a list of samples,
            whole groups one after the other; ``[]`` if there are none. A sample is what
            :func:`mmdevplug.samples.gather_samples` takes. It raises ``StopIteration`` when the
            data of this rank have ended, and is not called again in this pass over the data.
        is_valid (callable): Gets the list of a group's samples, in host memory, and returns
            whether the group is kept. With ``per_group=1`` it gets the sample itself.
        target (int): Samples of a pool, of all ranks together.
        max_resamples (int): How many rounds may follow the first. Defaults to 10.
        per_group (int): Samples of a group, which stays whole. Defaults to 1.
        on_short (str): What happens if ``max_resamples`` is reached, or the data of all ranks have
            ended: ``'error'``, or ``'fewer'``: the largest number of groups that all ranks can
            share evenly. With ``'error'`` an unfinished pool at the end of the data is dropped
            with a warning, unless it is the first. Defaults to ``'error'``.
        group (ProcessGroup, optional): The ranks that share a pool. Defaults to None: all ranks.
        collate (str or callable, optional): How a rank's samples become its batch. None:
            what is alike in all samples is stacked; what differs (tensors of several shapes, None
            in some samples) and lists without tensors, such as token ids, become lists with a
            value for each sample. ``'stack'``: see :func:`mmdevplug.samples.stack_samples`, which
            refuses what differs. ``'list'``: the list of samples. A function gets the list of
            samples in host memory. What it returns is moved to this rank's device. Defaults to
            None.

    Attributes:
        last (SamplingReport, optional): How the last pool was filled.

    Raises:
        SampleError: If an argument has a value that does not work.

    Examples:
        >>> sampler = DynamicSampler(generate, is_valid, target=64, per_group=8)
        >>> for batch in sampler:  # each rank gets 64 / world size samples on its device
        ...     train_on(batch)
    """

    def __init__(
        self,
        generate: Callable[[], Sequence[object]],
        is_valid: Callable[[object], object],
        target: int,
        max_resamples: int = 10,
        per_group: int = 1,
        on_short: str = 'error',
        group: AnyGroup = None,
        *,
        collate: Union[None, str, Callable[..., object]] = None,
    ) -> None:
        for name, function in (('generate', generate), ('is_valid', is_valid)):
            if not callable(function):
                raise SampleError(f'DynamicSampler: {name}={function!r}: expected a function.')
        if not callable(collate) and collate not in (None, 'stack', 'list'):
            raise SampleError(
                f"DynamicSampler: collate={collate!r}: expected None, 'stack', 'list' or a "
                f'function.'
            )
        stack = functools.partial(stack_samples, device='cpu', ragged=collate is None)
        collates: Dict[object, object] = {None: stack, 'stack': stack, 'list': list}
        self._collate: Any = collates.get(collate, collate)
        self._generate, self._is_valid = generate, is_valid
        self._exchange: Dict[str, Any] = dict(group=group, device='cpu')
        self._accelerator, self._device = enter_rank_device()
        self._pool = Pool(target, per_group, max_resamples, on_short)
        self._rounds = Rounds(self._pool, group)
        self._rank, self._world_size = self._rounds.rank, self._rounds.world_size
        self._held: List[object] = []  # those left over first
        self._ended = self._over = False
        self._pools = 0
        #: What all ranks know; None if only this rank knows what it has.
        self._tally: Optional[Tally] = Tally.empty(self._world_size)
        self.last: Optional[SamplingReport] = None

    def __iter__(self) -> Iterator[object]:
        """Begin, or begin another pass over the data if the one before has ended."""
        if self._over:
            self._over = self._ended = False
            self._tally = Tally.empty(self._world_size)
        return self

    def __next__(self) -> object:
        """Fill a pool; all ranks take part.

        Returns:
            Any: This rank's slice as a batch on its device.

        Raises:
            StopIteration: On all ranks, when the data of all of them have ended.
            SampleError: On all ranks, if the pool cannot be filled and ``on_short='error'``, or if
                samples do not fit together.
            Exception: What this rank's ``generate``, ``is_valid`` or ``collate`` raised.
            RankFailedError: If that happened on another rank, or a rank is gone.
        """
        batch = None
        if not self._over:
            with fail_together('dynamic sampling'):
                samples = self._next_samples()
                batch = None if samples is None else self._make_batch(samples)
        if batch is None:
            self._over = True
            raise StopIteration
        return batch

    def _make_batch(self, samples: List[object]) -> object:
        try:
            batch = self._collate(samples)
        except StopIteration as error:
            # It would end a loop without a message.
            raise SampleError('DynamicSampler: collate() raised StopIteration.') from error
        if batch is None:
            raise SampleError('DynamicSampler: collate() returned None; expected a batch.')
        return to_device(batch, self._device)

    # one pool -----------------------------------------------------------------------------------

    def _next_samples(self) -> Optional[List[object]]:
        """This rank's samples of the next pool; None if there is none."""
        tally = self._fill()
        if decide(tally, self._pool) != SHORT:
            return self._share(tally, self._pool.groups)
        return self._share_too_few(tally)

    def _fill(self) -> Tally:
        tally, self._tally = self._tally, None
        old = len(self._held)
        if tally is None:
            nothing = Drawn([], ended=self._ended)
            tally = self._rounds.exchange(0, [old, 0], nothing, Tally.empty(self._world_size))
            tally = tally._replace(rounds=0)
        while decide(tally, self._pool) == GO_ON:
            number = tally.rounds
            drawn = self._draw(number)
            self._held += drawn.groups
            self._ended = drawn.ended
            tally = self._rounds.exchange(number, [old, len(self._held) - old], drawn, tally)
            found = tally.valid * self._pool.per_group
            self._log(f'{round_name(number)}: {found}/{self._pool.target}')
        return tally

    def _draw(self, number: int) -> Drawn:
        if self._ended:
            return Drawn([], ended=True)
        enter_phase(f'generating, {round_name(number)}')
        drawn = draw(self._generate, self._is_valid, self._pool.per_group)
        # A lazy device goes on from the random state of what it has recorded: without this, each
        # number of rounds would be a graph of its own, for training as well.
        self._accelerator.compilation.materialize_all(rank_context().devices)
        return drawn

    def _share(self, tally: Tally, count: int, short: Optional[str] = None) -> List[object]:
        """Share a number of valid groups; the others open the next pool."""
        enter_phase('sharing samples')
        offered = tally.offers(count)
        mine = offered[self._rank]
        per_rank = count // self._world_size
        shared, _ = balance_samples(self._held[:mine], per_rank, **self._exchange)
        self._held = self._held[mine:]
        return self._finish(shared, tally, tally.after(offered), short)

    def _share_too_few(self, tally: Tally) -> Optional[List[object]]:
        found, on_short, over = tally.valid, self._pool.on_short, all(tally.ended)
        per_rank = found // self._world_size
        if over and self._pools and (found == 0 or on_short == 'error'):
            self._give_up(found, 'the data of all ranks have ended')
            return None
        if on_short == 'fewer':
            if per_rank == 0:
                self._give_up(found, 'too few for all ranks to get one group each')
                return None
            return self._share(tally, per_rank * self._world_size, on_short)
        raise too_few(tally, self._pool)

    def _give_up(self, groups: int, why: str) -> None:
        self._held = []
        if groups:
            self._log(
                f'{why}; {groups * self._pool.per_group} valid sample(s) of an unfinished pool of '
                f'{self._pool.target} are dropped.',
                logging.WARNING,
            )

    def _finish(
        self, groups: List[Any], tally: Tally, rest: Tally, short: Optional[str]
    ) -> List[object]:
        """Report a pool, and return the samples of this rank's groups."""
        self._tally = rest
        size = self._pool.per_group
        mine = len(groups) * size
        self.last = SamplingReport(
            pool=self._pools + 1,
            target=self._pool.target,
            samples=mine * self._world_size,
            resamples=max(0, tally.rounds - 1),
            generated=tally.generated * size,
            valid=sum(tally.new) * size,
            reused=sum(tally.old) * size,
            surplus=rest.valid * size,
            by_rank=tuple(count * size for count in tally.by_rank),
            slice=(self._rank * mine, (self._rank + 1) * mine),
            short=short,
        )
        self._report(self.last)
        self._pools += 1
        return groups if size == 1 else [sample for group in groups for sample in group]

    def _report(self, report: SamplingReport) -> None:
        if report.short is not None:
            self._log(
                f'{sum(report.by_rank)}/{report.target} samples, too few; '
                f'on_short={report.short!r} goes on with {report.samples}.',
                logging.WARNING,
            )
        each, others = report.samples // self._world_size, self._world_size - DESCRIBED
        shown = range(min(self._world_size, DESCRIBED))
        slices = ' '.join(f'[{rank * each}:{(rank + 1) * each}]' for rank in shown)
        self._log(
            f'ranks take {slices}{f" and {others} more" if others > 0 else ""} of '
            f'{report.samples} samples after {report.resamples} resample(s); '
            f'{report.surplus} valid sample(s) are left for the next pool.'
        )

    def _log(self, text: str, level: int = logging.INFO) -> None:
        """Log a line on the first rank: each warning, and the course of every tenth pool."""
        if self._rank == 0 and (level > logging.INFO or self._pools % LOG_INTERVAL == 0):
            log(f'Sampling, pool {self._pools + 1}: {text}', level)

    # resuming -----------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """What the next pool begins with on this rank; to be taken between two pools.

        Returns:
            dict: ``pools``, how many there were, and ``surplus``, a tensor of bytes.
        """
        describe_samples(self._held)  # refuses what cannot be read again
        return dict(pools=self._pools, surplus=dumps(self._held))

    def load_state_dict(self, *states: SavedState) -> None:
        """Continue from :meth:`state_dict`; all ranks must do so.

        Args:
            *states (dict): That of this rank; none or several where there were less or more ranks.
        """
        self._pools = max([0, *(state['pools'] for state in states)])
        self._held = [group for state in states for group in loads(state['surplus'])]
        self._tally = None

"""Exchange counts between ranks once in a round, and end together."""

from typing import Any, Dict, List, Optional

from torch import distributed as torch_dist

from mmdevplug.config.dynamic_sampling import DynamicSamplingOptions
from mmdevplug.distributed.byte_exchange import global_rank
from mmdevplug.distributed.json_messages import gather_json
from mmdevplug.distributed.waiting import wait_for_everyone
from mmdevplug.errors import RankFailedError, SampleError, first_line
from mmdevplug.fault_tolerance.failure import enter_phase

from .decisions import DESCRIBED, Tally, round_name
from .draw_round import Drawn

#: What must be the same on all ranks, or they decide differently.
_COMMON = ('target', 'per_group', 'max_resamples', 'on_short')


class Rounds:
    """Exchange the counts of a process group's ranks; ``group=None`` for all ranks."""

    def __init__(self, options: DynamicSamplingOptions, group: Any) -> None:
        self._options, self._group = options, group
        self.world_size, self.rank = 1, 0
        if torch_dist.is_available() and torch_dist.is_initialized():
            self.rank = torch_dist.get_rank(group)
            if self.rank < 0:
                raise SampleError(
                    f'DynamicSampler: rank {torch_dist.get_rank()} is not in the process group '
                    f'that it was given. Make the sampler on the ranks of the group alone.'
                )
            self.world_size = torch_dist.get_world_size(group)
        options.check_ranks(self.world_size)

    def exchange(self, number: int, held: List[int], drawn: Drawn, tally: Tally) -> Tally:
        """Exchange counts and return the new tally; raise if any rank has an error.

        Args:
            number (int): The round, from 0.
            held (List[int]): Groups of this rank that are left over, and drawn for this pool.
            drawn (Drawn): The groups drawn in this round.
            tally (Tally): The tally of the round before.
        """
        name = round_name(number)
        mine = dict(
            settings=[getattr(self._options, name) for name in _COMMON],
            held=held,
            generated=drawn.generated,
            ended=drawn.ended,
            error=_describe(drawn, name),
        )
        everyone = self._gather(mine, name) if self.world_size > 1 else [mine]
        if drawn.error is not None:
            raise drawn.error
        self._raise_for_others([each['error'] for each in everyone])
        self._refuse_other_settings([each['settings'] for each in everyone])
        return Tally(
            old=[each['held'][0] for each in everyone],
            new=[each['held'][1] for each in everyone],
            ended=[each['ended'] for each in everyone],
            rounds=tally.rounds + 1,
            generated=tally.generated + sum(each['generated'] for each in everyone),
        )

    def _gather(self, mine: Dict, name: str) -> List[Dict]:
        if self._group is None or self._group is torch_dist.group.WORLD:
            enter_phase(f'sampling, {name}: waiting for the others')
            wait_for_everyone(f'sampling, {name}', self._options.sampler.timeout)
        enter_phase(f'sampling, {name}: exchanging counts')
        return gather_json(mine, self._group)

    def _raise_for_others(self, errors: List[Optional[str]]) -> None:
        failed = [
            f'{self._name(rank)} failed in {text}'
            for rank, text in enumerate(errors)
            if text is not None
        ]
        if failed:
            more = f'; and {len(failed) - DESCRIBED} more' if len(failed) > DESCRIBED else ''
            raise RankFailedError(
                f'{self._name(self.rank)} stops because {"; ".join(failed[:DESCRIBED])}{more}'
            )

    def _refuse_other_settings(self, settings: List[List[Any]]) -> None:
        for rank, theirs in enumerate(settings):
            for name, value, first in zip(_COMMON, theirs, settings[0]):
                if value != first:
                    raise SampleError(
                        f'DynamicSampler: {name}={value!r} on {self._name(rank)}, but {first!r} '
                        f'on {self._name(0)}; expected the same on all ranks.'
                    )

    def _name(self, rank: int) -> str:
        if self.world_size == 1 or self._group is None:
            return f'rank {rank} of {self.world_size}'
        return f'rank {global_rank(self._group, rank)} of {torch_dist.get_world_size()}'


def _describe(drawn: Drawn, name: str) -> Optional[str]:
    error = drawn.error
    if error is None:
        return None
    text = f'{type(error).__name__}: {first_line(error)}'[:1000]
    return f'{drawn.where}, {name}: {text}'

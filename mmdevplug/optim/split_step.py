"""Train on the samples of an iteration in several steps, and update parameters once."""

from typing import Any, Callable, Dict, List, NamedTuple, Sequence

import torch

from mmdevplug.errors import ModelError
from mmdevplug.utils.annotations import AnyOptimWrapper
from mmdevplug.utils.model import list_optim_wrappers


class SplitCollate:
    """Collate the samples of an iteration in several parts.

    Part ``i`` has every n-th sample from the i-th on: with a sampler that deals samples out to the
    ranks in turn, parts are the batches of a job with n times as many ranks.
    """

    def __init__(self, collate: Callable[[List], Any], parts: int) -> None:
        self.collate, self.parts = collate, parts

    def __call__(self, samples: Sequence[Any]) -> List[Any]:
        # An incomplete batch repeats samples, as samplers do at the end of an epoch.
        chosen = [
            samples[i :: self.parts] or [samples[i % len(samples)]] for i in range(self.parts)
        ]
        return [self.collate(list(each)) for each in chosen]


class SplitStep:
    """A ``train_step`` for batches of :class:`SplitCollate`: one update after all parts."""

    def __init__(self, train_step: Callable[..., Dict[str, Any]], parts: int) -> None:
        self.train_step, self.parts = train_step, parts

    def __call__(self, data: Sequence[Any], optim_wrapper: AnyOptimWrapper) -> Dict[str, Any]:
        wrappers = list_optim_wrappers(optim_wrapper)
        before = [_Counts.of(wrapper).multiplied(wrapper, self.parts) for wrapper in wrappers]
        found = [self.train_step(part, optim_wrapper=optim_wrapper) for part in data]
        for wrapper, counts in zip(wrappers, before):
            counts.put_back(wrapper, self.parts)
        return {
            name: _mean([each[name] for each in found if name in each])
            for name in {name: None for each in found for name in each}
        }


class _Counts(NamedTuple):
    """How an optimizer wrapper counts backward passes, of which one is now several."""

    inner: int
    every: int
    most: int
    remainder: int

    @classmethod
    def of(cls, wrapper: AnyOptimWrapper) -> '_Counts':
        return cls(
            wrapper._inner_count,
            wrapper._accumulative_counts,
            wrapper._max_counts,
            wrapper._remainder_counts,
        )

    def write(self, wrapper: AnyOptimWrapper) -> None:
        wrapper._inner_count, wrapper._accumulative_counts = self.inner, self.every
        wrapper._max_counts, wrapper._remainder_counts = self.most, self.remainder

    def multiplied(self, wrapper: AnyOptimWrapper, parts: int) -> '_Counts':
        # -1 stands for a number that is not known.
        _Counts(*(value * parts if value > 0 else value for value in self)).write(wrapper)
        return self

    def put_back(self, wrapper: AnyOptimWrapper, parts: int) -> None:
        passes = wrapper._inner_count - self.inner * parts
        if passes % parts:
            raise ModelError(
                f'train_step of the model calls update_params() {passes} times for '
                f'{parts} batches: expected the same number for each, to accumulate their '
                f"gradients. Use accelerator.global_batch_rule='scale'."
            )
        self._replace(inner=self.inner + passes // parts).write(wrapper)


def _mean(values: List[Any]) -> Any:
    if all(isinstance(value, (int, float, torch.Tensor)) for value in values):
        return sum(values) / len(values)
    return values[-1]

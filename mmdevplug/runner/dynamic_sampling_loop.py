"""Train on batches of samples that all ranks draw until enough are valid."""

import logging
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch
from mmengine.logging import print_log
from mmengine.registry import LOOPS
from mmengine.runner import IterBasedTrainLoop
from torch.utils.data import DataLoader

from mmdevplug.config.dynamic_sampling import DynamicSamplingOptions
from mmdevplug.dynamic_sampling import DynamicSampler
from mmdevplug.errors import ModelError, SampleError
from mmdevplug.utils.mmengine_compat import batches_dropped
from mmdevplug.utils.model import unwrap_model


@LOOPS.register_module()
class DynamicSamplingTrainLoop(IterBasedTrainLoop):
    """Each iteration draws as many batches of data as it takes to fill a pool, and trains on it.

    For each batch of data the model is put into eval mode and makes samples of it, without
    gradients: ``generate(data_preprocessor(batch))``. When all ranks together have ``target``
    valid samples, see :class:`mmdevplug.dynamic_sampling.DynamicSampler`, this rank's slice of
    them, stacked, is what ``train_step`` gets, in train mode.

    Args:
        runner (Runner): A reference of the runner.
        dataloader (DataLoader or dict): The data to make samples of.
        max_iters (int): Training iterations; each may draw several batches of data.
        val_begin (int): See :class:`mmengine.runner.IterBasedTrainLoop`. Defaults to 1.
        val_interval (int): See there. Defaults to 1000.
        dynamic_intervals (List[Tuple[int, int]], optional): See there. Defaults to None.
        **options: Fields of :class:`mmdevplug.config.dynamic_sampling.DynamicSamplingOptions`:
            ``target``, ``per_group=1``, ``max_resamples=10``, ``on_short='error'``,
            ``generate='generate_samples'``, ``is_valid='is_valid_group'`` and ``sampler={}``.

    Raises:
        ModelError: If the model has no such methods.
        SampleError: If an option is unknown or missing, or has an impossible value.

    Examples:
        >>> train_cfg = dict(
        ...     type='DynamicSamplingTrainLoop', max_iters=1000, target=64, per_group=8)
    """

    def __init__(
        self,
        runner: Any,
        dataloader: Union[DataLoader, Dict],
        max_iters: int,
        val_begin: int = 1,
        val_interval: int = 1000,
        dynamic_intervals: Optional[List[Tuple[int, int]]] = None,
        **options: Any,
    ) -> None:
        super().__init__(runner, dataloader, max_iters, val_begin, val_interval, dynamic_intervals)
        found = DynamicSamplingOptions.from_dict(options)
        self._model = unwrap_model(runner.model)
        self._generate = self._method('generate', found.generate)
        self.sampler = DynamicSampler(
            self._draw,
            self._method('is_valid', found.is_valid),
            found.target,
            found.max_resamples,
            found.per_group,
            found.on_short,
            **vars(found.sampler),
        )
        self._data = self.dataloader_iterator
        #: Batches of data that this rank has drawn since the beginning of training.
        self.batches_drawn = 0
        # What MMEngine's loop asks for its next batch.
        self.dataloader_iterator = _Pools(self)

    def _method(self, argument: str, name: str) -> Callable:
        found = getattr(self._model, name, None)
        if not callable(found):
            raise ModelError(
                f'train_cfg.{argument}={name!r}: {type(self._model).__name__} has no such method. '
                f'Give it one, or name the one that it has.'
            )
        return found

    def _draw(self) -> List[Any]:
        batch = next(self._data)
        self.batches_drawn += 1
        with torch.no_grad():
            return self._generate(self._model.data_preprocessor(batch, False))

    def next_pool(self) -> Any:
        """Draw until the pool is full.

        Returns:
            Any: This rank's slice of it.

        Raises:
            SampleError: If not one group for each rank is valid.
        """
        self.runner.model.eval()
        batch = next(self.sampler, None)
        self.runner.model.train()
        if batch is None:
            raise SampleError(
                f"train_cfg.on_short='fewer': for iteration {self.iter + 1} not even one valid "
                f'group for each rank was found, so there is nothing to train on. Raise '
                f'train_cfg.max_resamples, or check what is valid.'
            )
        return batch

    # resuming -----------------------------------------------------------------------------------

    @property
    def epoch_of_data(self) -> int:
        """The pass over the data that is going on."""
        return self._data._epoch

    def go_on(
        self, data: Any, batches_drawn: int, states: Sequence[Dict], begin: Callable[[], None]
    ) -> None:
        """Continue where an interrupted run has been; to be called before training.

        Args:
            data (iterator): Over the data, from the next batch on.
            batches_drawn (int): Those before it.
            states (Sequence[dict]): Of the sampler, from the ranks whose surplus this one takes.
            begin (callable): To be called when the first pool is about to be drawn.
        """
        self._data, self.batches_drawn = data, batches_drawn
        self.sampler.load_state_dict(*states)
        self.dataloader_iterator.before_first = begin


class _Pools:
    """Stands where MMEngine's loop has its iterator over the data, and yields pools.

    Args:
        loop (DynamicSamplingTrainLoop): The loop.
    """

    def __init__(self, loop: DynamicSamplingTrainLoop) -> None:
        self._loop = loop
        self._to_skip: Optional[int] = None
        self.before_first: Optional[Callable[[], None]] = None

    @property
    def _epoch(self) -> int:
        return self._loop.epoch_of_data

    def __iter__(self) -> '_Pools':
        return self

    def __next__(self) -> Any:
        if self._to_skip is None:
            self._to_skip = batches_dropped(self._loop)
            if self._loop.iter and self.before_first is None:
                _warn_of_lost_place(self._loop.iter)
        if self._to_skip > 0:
            # A loop that resumes drops what was trained on: these pools are not drawn again.
            self._to_skip -= 1
            return None
        if self.before_first is not None:
            self.before_first()
            self.before_first = None
        return self._loop.next_pool()


def _warn_of_lost_place(iteration: int) -> None:
    print_log(
        f'Resuming at iteration {iteration}, but not exactly: the checkpoint does not say how '
        f'many batches of data were drawn, nor which samples were left over, so the data begin '
        f'anew. SafeCheckpointHook (accelerator.safe_checkpoints) saves both.',
        'current',
        logging.WARNING,
    )

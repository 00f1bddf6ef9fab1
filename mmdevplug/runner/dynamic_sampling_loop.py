"""Train on batches of samples that all ranks draw until enough are valid."""

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch
from mmengine.registry import LOOPS
from mmengine.runner import IterBasedTrainLoop
from torch.utils.data import DataLoader

from mmdevplug.config.dynamic_sampling import DynamicSamplingOptions
from mmdevplug.dynamic_sampling import DynamicSampler
from mmdevplug.errors import ModelError, SampleError
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.mmengine_compat import batches_dropped
from mmdevplug.utils.model import unwrap_model


@LOOPS.register_module()
class DynamicSamplingTrainLoop(IterBasedTrainLoop):
    """Draw batches of data in each iteration until a pool of samples is full, and train on it.

    The model makes samples of each batch in eval mode, without gradients:
    ``generate(data_preprocessor(batch))``. When all ranks together have ``target`` valid samples
    (see :class:`mmdevplug.dynamic_sampling.DynamicSampler`), ``train_step`` gets this rank's
    slice of them, stacked, in train mode.

    Arguments without a description are those of :class:`mmengine.runner.IterBasedTrainLoop`.

    Args:
        dataloader (DataLoader or dict): The data to make samples of.
        max_iters (int): Training iterations; each may draw several batches of data.
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
        runner: AnyRunner,
        dataloader: Union[DataLoader, Dict],
        max_iters: int,
        *,
        val_begin: int = 1,
        val_interval: int = 1000,
        dynamic_intervals: Optional[List[Tuple[int, int]]] = None,
        **options: object,
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
        # MMEngine's loop takes its next batch from here.
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
        """Draw until the pool is full, and return this rank's slice of it."""
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

    def go_on(
        self, data: Any, batches_drawn: int, states: Sequence[Dict], begin: Callable[[], None]
    ) -> None:
        """Continue an interrupted run; called before training.

        ``data`` starts at the next batch, ``states`` are the sampler's of the ranks whose surplus
        this rank takes, and ``begin`` is called just before the first pool is drawn.
        """
        self._data, self.batches_drawn = data, batches_drawn
        self.sampler.load_state_dict(*states)
        self.dataloader_iterator.before_first = begin


class _Pools:
    """The loop's iterator: yields pools in place of batches of data."""

    def __init__(self, loop: DynamicSamplingTrainLoop) -> None:
        self._loop = loop
        self._to_skip: Optional[int] = None
        self.before_first: Optional[Callable[[], None]] = None

    @property
    def _epoch(self) -> int:
        return self._loop._data._epoch

    def __iter__(self) -> '_Pools':
        return self

    def skip_iter(self, num_iters: int) -> None:
        """Do nothing when OneDL's MMEngine resumes: see :meth:`DynamicSamplingTrainLoop.go_on`."""

    def __next__(self) -> Any:
        if self._to_skip is None:
            self._to_skip = batches_dropped(self._loop)
            if self._loop.iter and self.before_first is None:
                log_warning(
                    f'Resuming at iteration {self._loop.iter}, but not exactly: the checkpoint '
                    f'does not say how many batches of data were drawn, nor which samples were '
                    f'left over, so the data begin anew. SafeCheckpointHook '
                    f'(accelerator.safe_checkpoints) saves both.'
                )
        if self._to_skip > 0:
            # A resuming loop drops the batches it was trained on; their pools are not drawn.
            self._to_skip -= 1
            return None
        if self.before_first is not None:
            self.before_first()
            self.before_first = None
        return self._loop.next_pool()

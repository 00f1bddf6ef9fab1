"""Warn if a lazy device keeps compiling graphs, and name the shapes that cause it."""

import logging
from typing import Any, Dict, List, Optional, Set, Union

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.accelerators import Accelerator
from mmdevplug.accelerators.compilation_cache import describe_kept
from mmdevplug.config.hook_options import CompilationOptions
from mmdevplug.config.pad_to import Size, suggest_buckets
from mmdevplug.data.batch_shapes import (
    COMPUTED,
    SENT,
    ShapeRecorder,
    Shapes,
    batch_size,
    changed_names,
    describe_changes,
    image_size,
)
from mmdevplug.distributed.process_group import rank_device
from mmdevplug.utils.model import unwrap_model

#: A warning is followed by the next one when there were so many times more compilations.
RARELY = 10

_NO_NEW_SHAPE = (
    'No tensor of these batches had a new shape. What else changes a graph: Python numbers that '
    'are computed with (counters, sizes in metainfo; keep them in tensors), control flow and '
    'indexing that depend on values (`if loss > 1`, masks as indices, nonzero), and layers that '
    'are left out at random.'
)


@HOOKS.register_module()
class CompilationHook(Hook):
    """Count the graphs that a lazy device compiles, and warn if that does not end.

    The log has ``device/compiles``, the number of graphs that this process has compiled so far.
    When iterations after the warm-up go on compiling, a warning names the tensors of the batch
    whose shapes changed, and how to go on. Shapes are known on the host, so none of this runs
    anything on the device. On other devices the hook does nothing.

    Where the vendor tells no number of compilations (T20), batches of new shapes are counted
    instead: each is one graph at least.

    Args:
        **options: Fields of :class:`mmdevplug.config.hook_options.CompilationOptions`:
            ``warmup=20`` and ``patience=3``, which is for iterations such as the last, smaller
            batch of an epoch.

    Examples:
        >>> cfg.accelerator = dict(type='xla', compilations=dict(warmup=50))
    """

    # After DeviceHook, which runs what the iteration has recorded.
    priority = 'VERY_HIGH'

    def __init__(self, **options: Any) -> None:
        found = CompilationOptions(**options)
        self.warmup = found.warmup
        self.patience = found.patience
        self._accelerator: Optional[Accelerator] = None
        self._recorder: Optional[ShapeRecorder] = None

    # what was compiled --------------------------------------------------------------------------

    def before_train(self, runner: Any) -> None:
        """Begin to watch, if the device is lazy."""
        accelerator = rank_device()[0]
        self._accelerator = accelerator if accelerator.lazy else None
        if self._accelerator is None:
            return
        model = unwrap_model(runner.model)
        self._recorder = ShapeRecorder(model)
        self._counted = accelerator.compilations()
        self._seen: Set[int] = set()
        self._sizes: Set[Size] = set()
        self._last: Dict[str, Shapes] = {}
        self._done = 0
        self._late = self._late_with_new_shapes = 0
        self._change = ''
        self._advice: List[str] = []
        self._next_warning = self.patience

    def after_train(self, runner: Any) -> None:
        """Stop watching."""
        if self._recorder is not None:
            self._recorder.detach()
            self._recorder = None

    def after_run(self, runner: Any) -> None:
        """Say what became of graphs where compiled ones are kept."""
        kept = rank_device()[0].kept_compilations()
        if kept is not None:
            level = logging.WARNING if kept.unreadable else logging.INFO
            runner.logger.log(level, describe_kept(kept))

    def before_val(self, runner: Any) -> None:
        """Note what was compiled, since validation compiles graphs of its own."""
        self._before_val = self._count()

    def after_val(self, runner: Any) -> None:
        """Leave out what validation compiled."""
        if self._recorder is not None and self._before_val is not None:
            self._counted = (self._counted or 0) + (self._count() or 0) - self._before_val

    def _count(self) -> Optional[int]:
        return None if self._accelerator is None else self._accelerator.compilations()

    def before_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        """Begin to note shapes."""
        if self._recorder is not None:
            self._recorder.start()

    def after_train_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: Optional[Union[dict, tuple, list]] = None,
        outputs: Optional[dict] = None,
    ) -> None:
        """Count, log and warn; see :meth:`mmengine.hooks.Hook.after_train_iter`."""
        if self._recorder is None:
            return
        self._done += 1
        shapes = self._recorder.stop(data_batch)
        key = hash(str(shapes))
        is_new = key not in self._seen
        self._seen.add(key)
        size = image_size(shapes[COMPUTED])
        if size is not None:
            self._sizes.add(size)
        count = self._count()
        compiled = int(is_new) if count is None else count - (self._counted or 0)
        self._counted = count
        if count is not None:
            runner.message_hub.update_scalars({'train/device/compiles': count}, resumed=False)
        if compiled > 0 and self._done > self.warmup:
            self._note_late(runner, shapes if is_new else None)
        self._last = shapes

    def _note_late(self, runner: Any, shapes: Optional[Dict[str, Shapes]]) -> None:
        self._late += 1
        if shapes is not None:
            self._late_with_new_shapes += 1
            self._explain(shapes, runner.iter + 1)
        if self._late >= self._next_warning:
            self._next_warning = self._late * RARELY
            runner.logger.warning(self._describe())

    # what to say --------------------------------------------------------------------------------

    def _explain(self, shapes: Dict[str, Shapes], iteration: int) -> None:
        # What the model computes on is what a user knows; images before they are stacked and
        # padded are named where only these have changed.
        computed = changed_names(self._last.get(COMPUTED, {}), shapes[COMPUTED])
        kind, told = (COMPUTED, '') if computed else (SENT, ', before they are stacked')
        before, after = self._last.get(kind, {}), shapes[kind]
        self._change = (
            f'In iteration {iteration} these changed{told}: {describe_changes(before, after)}.'
        )
        names = changed_names(before, after)
        self._advice = []
        if self._sizes and (image_size(before) != image_size(after) or kind == SENT):
            self._advice.append('images')
        if batch_size(before) != batch_size(after):
            self._advice.append('batch')
        elif any(not name.startswith('inputs') for name in names) and not self._advice:
            self._advice.append('others')

    def _describe(self) -> str:
        if self._accelerator is not None and self._accelerator.compilations() is None:
            start = (
                f'Batches have new shapes after {self.warmup} iterations of warm-up, too: '
                f'{len(self._seen)} different ones in {self._done} iterations, each of which is '
                f'at least one graph to compile (this device tells no number of compilations).'
            )
        else:
            start = (
                f'Graphs are compiled after {self.warmup} iterations of warm-up, too: in '
                f'{self._late} of {self._done - self.warmup} iterations, {self._counted} graphs '
                f'so far. Compiling takes far longer than computing.'
            )
        if not self._late_with_new_shapes:
            return f'{start} {_NO_NEW_SHAPE}'
        parts = [start, self._change, *(self._say(topic) for topic in self._advice)]
        without = self._late - self._late_with_new_shapes
        if without:
            parts.append(f'In {without} iterations no shape was new: see docs/en/shapes.md.')
        return ' '.join(parts)

    def _say(self, topic: str) -> str:
        if topic == 'batch':
            return (
                'Batches have different numbers of samples: for the last one of an epoch set '
                'train_dataloader.drop_last=True, or let it be one graph more.'
            )
        if topic == 'others':
            return (
                'These lengths come with the samples (boxes of an image, words of a text); pad '
                'them in the pipeline or in the model. pad_to changes images and maps alone.'
            )
        buckets = suggest_buckets(list(self._sizes))
        if self._recorder is not None and self._recorder.pads_to is not None:
            advice = f'Write pad_to={buckets} in place of the present one'
        else:
            advice = f'Pad images to few sizes: accelerator=dict(pad_to={buckets}, ...)'
        return f'{advice}, which holds all of the {len(self._sizes)} sizes seen so far.'

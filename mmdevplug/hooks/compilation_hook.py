"""Warn if a lazy device keeps compiling graphs, and name the shapes that cause it."""

import logging
from typing import Dict, List, Optional, Set

from mmengine.hooks import Hook, LoggerHook
from mmengine.registry import HOOKS

from mmdevplug.accelerators import enter_rank_device
from mmdevplug.accelerators.compilation_cache import describe_kept
from mmdevplug.config.hook_options import CompilationOptions
from mmdevplug.config.pad_to import Size, round_up, suggest_buckets
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
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.model import unwrap_model
from mmdevplug.utils.progress import SilenceWatch

#: The next warning comes after this many times as many iterations that compiled.
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
    When iterations after the warm-up still compile, a warning names the tensors of the batch
    whose shapes changed, and the next step. Shapes are known on the host, so none of this runs
    anything on the device. On other devices the hook does nothing.

    A line every 30 s says what goes on until the first line of the log, and whenever an iteration
    takes longer than that.

    If the device reports no number of compilations, batches of new shapes are counted
    instead: each is at least one graph.

    Args:
        **options: Fields of :class:`mmdevplug.config.hook_options.CompilationOptions`:
            ``warmup=20`` and ``patience=3``, which is for iterations such as the last, smaller
            batch of an epoch.

    Examples:
        >>> cfg.accelerator = dict(type='xla', compilations=dict(warmup=50))
    """

    # After DeviceHook, which runs what the iteration has recorded.
    priority = 'VERY_HIGH'

    def __init__(self, **options: object) -> None:
        self.options = CompilationOptions(**options)
        self._recorder: Optional[ShapeRecorder] = None  # None on devices that are not lazy
        self._silence: Optional[SilenceWatch] = None

    def before_train(self, runner: AnyRunner) -> None:
        """Begin to record shapes, if the device is lazy."""
        self._accelerator = enter_rank_device()[0]
        if not self._accelerator.compilation.lazy:
            return
        self._recorder = ShapeRecorder(unwrap_model(runner.model))
        self._counted = self._accelerator.compilation.count()
        self._seen: Set[int] = set()
        self._sizes: Set[Size] = set()
        self._last: Dict[str, Shapes] = {}
        self._done = self._late = self._late_with_new_shapes = 0
        self._next_warning = self.options.patience
        #: Iterations until the first line of the log: each may be quick, and all together long.
        self._first_line = min(
            [hook.interval for hook in runner.hooks if isinstance(hook, LoggerHook)], default=1
        )
        self._silence = SilenceWatch(lambda seconds: self._describe_silence(runner, seconds))

    def after_train(self, runner: AnyRunner) -> None:
        """Stop recording shapes."""
        self._end_silence()
        if self._recorder is not None:
            self._recorder.detach()
            self._recorder = None

    def after_run(self, runner: AnyRunner) -> None:
        """Log the use of compiled graphs that are kept on disk."""
        self._end_silence()
        kept = enter_rank_device()[0].compilation.kept_graphs()
        if kept is not None:
            level = logging.WARNING if kept.unreadable else logging.INFO
            runner.logger.log(level, describe_kept(kept))

    def before_val(self, runner: AnyRunner) -> None:
        """Note the number of compilations, because validation has other graphs."""
        if self._recorder is not None:
            self._before_val = self._accelerator.compilation.count()

    def after_val(self, runner: AnyRunner) -> None:
        """Leave out what validation compiled."""
        if self._recorder is not None and self._before_val is not None:
            count = self._accelerator.compilation.count() or 0
            self._counted = (self._counted or 0) + count - self._before_val

    def before_train_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Begin to record the shapes of an iteration."""
        if self._recorder is not None:
            self._recorder.start()

    def after_train_iter(
        self,
        runner: AnyRunner,
        batch_idx: int,
        data_batch: object = None,
        *args: object,
        **kwargs: object,
    ) -> None:
        """Count and log compilations, and warn of those after the warm-up."""
        if self._recorder is None:
            return
        self._done += 1
        if self._silence is not None and self._done >= self._first_line:
            self._silence.restart()
        shapes = self._recorder.stop(data_batch)
        key = hash(str(shapes))
        is_new = key not in self._seen
        self._seen.add(key)
        size = image_size(shapes[COMPUTED])
        if size is not None:
            self._sizes.add(size)
        count = self._accelerator.compilation.count()
        compiled = int(is_new) if count is None else count - (self._counted or 0)
        self._counted = count
        if count is not None:
            runner.message_hub.update_scalars({'train/device/compiles': count}, resumed=False)
        if compiled > 0 and self._done > self.options.warmup:
            self._late += 1
            if is_new:
                self._late_with_new_shapes += 1
                self._changed = (runner.iter + 1, self._last, shapes)
            if self._late >= self._next_warning:
                self._next_warning = self._late * RARELY
                runner.logger.warning(self._describe())
        self._last = shapes

    def _end_silence(self) -> None:
        if self._silence is not None:
            self._silence.close()
            self._silence = None

    def _describe_silence(self, runner: AnyRunner, seconds: float) -> str:
        count = self._accelerator.compilation.count()
        graphs = '' if count is None else f'; {count} graphs have been compiled so far'
        return (
            f'Iteration {runner.iter + 1} is running, {self._done} are done, and this is the '
            f'first line for {seconds:.0f} s{graphs}. A lazy device compiles a graph when it is '
            f'first needed, which takes far longer than running it.'
        )

    def _describe(self) -> str:
        warmup = self.options.warmup
        if self._counted is None:
            start = (
                f'Batches have new shapes after {warmup} iterations of warm-up, too: '
                f'{len(self._seen)} different ones in {self._done} iterations, each of which is '
                f'at least one graph to compile (this device reports no number of compilations).'
            )
        else:
            start = (
                f'Graphs are compiled after {warmup} iterations of warm-up, too: in '
                f'{self._late} of {self._done - warmup} iterations, {self._counted} graphs '
                f'so far. Compiling takes far longer than computing.'
            )
        if not self._late_with_new_shapes:
            return f'{start} {_NO_NEW_SHAPE}'
        parts = [start, *self._explain(*self._changed)]
        without = self._late - self._late_with_new_shapes
        if without:
            parts.append(f'In {without} iterations no shape was new: see docs/en/shapes.md.')
        return ' '.join(parts)

    def _explain(
        self, iteration: int, last: Dict[str, Shapes], shapes: Dict[str, Shapes]
    ) -> List[str]:
        # Users know the tensors that the model computes on; images before they are stacked and
        # padded are named only if nothing else changed.
        computed = changed_names(last.get(COMPUTED, {}), shapes[COMPUTED])
        kind, when = (COMPUTED, '') if computed else (SENT, ', before they are stacked')
        before, after = last.get(kind, {}), shapes[kind]
        parts = [
            f'In iteration {iteration} these changed{when}: {describe_changes(before, after)}.'
        ]
        resized = image_size(before) != image_size(after)
        sent = image_size(shapes[SENT])
        if resized and kind == COMPUTED and sent and sent == image_size(last.get(SENT, {})):
            sides = [side for size in self._sizes for side in size]
            parts.append(
                f'The images were all of {sent}: batch_augments of the data preprocessor resize '
                f'batches, to {len(self._sizes)} sizes so far. Let them choose from few: '
                f"mmdet's BatchSyncRandomResize with "
                f'size_divisor={round_up(max((max(sides) - min(sides)) // 2, 1), 32)}.'
            )
        elif self._sizes and (resized or kind == SENT):
            buckets = suggest_buckets(list(self._sizes))
            advice = f'Pad images to few sizes: accelerator=dict(pad_to={buckets}, ...)'
            if self._recorder is not None and self._recorder.pads_to is not None:
                advice = f'Write pad_to={buckets} in place of the present one'
            parts.append(f'{advice}, which holds all of the {len(self._sizes)} sizes seen so far.')
        if batch_size(before) != batch_size(after):
            parts.append(
                'Batches have different numbers of samples: for the last one of an epoch set '
                'train_dataloader.drop_last=True, or let it be one graph more.'
            )
        elif len(parts) == 1 and any(
            not name.startswith('inputs') for name in changed_names(before, after)
        ):
            parts.append(
                'These lengths come with the samples (boxes of an image, words of a text); pad '
                'them in the pipeline or in the model. pad_to changes images and maps alone.'
            )
        return parts

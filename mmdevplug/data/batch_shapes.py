"""Find the shapes that a training iteration computes on, for which graphs are compiled."""

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from mmengine.model import BaseDataPreprocessor
from mmengine.structures import BaseDataElement
from torch import Tensor, nn

from mmdevplug.config.pad_to import Size
from mmdevplug.utils.pytree import LEAVES, container_of

from .padding import padded_forward

Shape = Tuple[int, ...]
#: For each name the shapes of its tensors; ``[*]`` stands for the items of a list.
Shapes = Dict[str, Tuple[Shape, ...]]

SENT, COMPUTED = 'sent', 'computed'


def shapes_of(nested: Any) -> Shapes:
    """The shapes of all tensors in a batch.

    Args:
        nested: Containers of tensors, and anything else.

    Examples:
        >>> shapes_of(dict(inputs=[torch.ones(3, 4), torch.ones(3, 5)]))
        {'inputs[*]': ((3, 4), (3, 5))}
    """
    found: Dict[str, List[Shape]] = {}
    _collect(nested, '', found)
    return {name: tuple(shapes) for name, shapes in found.items()}


def _collect(value: Any, name: str, found: Dict[str, List[Shape]]) -> None:
    if isinstance(value, Tensor):
        found.setdefault(name, []).append(tuple(value.shape))
    elif type(value) in LEAVES:
        return
    elif isinstance(value, (Mapping, BaseDataElement)):
        for key, part in value.items():
            _collect(part, f'{name}.{key}' if name else str(key), found)
    elif isinstance(value, (list, tuple)) and not hasattr(value, '_fields'):
        for part in value:
            _collect(part, f'{name}[*]', found)
    else:
        container = container_of(type(value))
        if container is not None:
            for key, part in zip(container.names(value), container.parts(value)):
                _collect(part, name + container.step(key), found)
        elif isinstance(getattr(value, 'tensor', None), Tensor):  # boxes of mmdet and mmrotate
            _collect(value.tensor, name, found)


class ShapeRecorder:
    """Notes what data preprocessors are given and what they make of it, on the host alone.

    Both count: a lazy device stacks and pads images in the same graph that the model computes in.

    Args:
        model (nn.Module): The bare model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.pads_to: Any = None
        self._recording = False
        self._noted: Dict[str, Dict[str, List[Shape]]] = {}
        self._handles: List[Any] = []
        self._watched: List[Any] = []
        for part in model.modules():
            if isinstance(part, BaseDataPreprocessor):
                self._attach(part)

    def _attach(self, part: BaseDataPreprocessor) -> None:
        forward = padded_forward(part)
        if forward is not None:
            forward.watcher = self._note_sent
            self._watched.append(forward)
            self.pads_to = forward.pad_to
        elif not any(padded_forward(inner) for inner in part.modules()):
            self._handles.append(
                part.register_forward_pre_hook(lambda _, given: self._note_sent(given[:1]))
            )
        self._handles.append(
            part.register_forward_hook(lambda _, __, made: self._note(COMPUTED, made))
        )

    def detach(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        for forward in self._watched:
            forward.watcher = None

    def start(self) -> None:
        """Begin with an iteration."""
        self._noted = {SENT: {}, COMPUTED: {}}
        self._recording = True

    def stop(self, data_batch: Any) -> Dict[str, Shapes]:
        """End with an iteration.

        Args:
            data_batch: What the data loader gave, for models that have no preprocessor.

        Returns:
            dict: The shapes of what was sent to the device, and of what was made of it.
        """
        self._recording = False
        if not self._noted[COMPUTED]:
            self._merge(COMPUTED, shapes_of(data_batch))
        return {
            kind: {name: tuple(shapes) for name, shapes in noted.items()}
            for kind, noted in self._noted.items()
        }

    def _note_sent(self, batch: Any) -> None:
        self._note(SENT, batch[0] if isinstance(batch, tuple) and len(batch) == 1 else batch)

    def _note(self, kind: str, batch: Any) -> None:
        if self._recording:
            self._merge(kind, shapes_of(batch))

    def _merge(self, kind: str, shapes: Shapes) -> None:
        for name, found in shapes.items():
            self._noted[kind].setdefault(name, []).extend(found)


def changed_names(before: Shapes, after: Shapes) -> List[str]:
    """The names whose shapes differ."""
    return [
        name for name in dict.fromkeys([*after, *before]) if before.get(name) != after.get(name)
    ]


def describe_changes(before: Shapes, after: Shapes, limit: int = 6) -> str:
    """Which shapes changed, and how, in one line.

    Args:
        before (dict): See :func:`shapes_of`.
        after (dict): The same, of another batch.
        limit (int): How many names at most. Defaults to 6.
    """
    names = changed_names(before, after)
    told = [
        f'{name}: {_describe(before.get(name))} → {_describe(after.get(name))}'
        for name in names[:limit]
    ]
    more = len(names) - limit
    return '; '.join(told) + (f'; and {more} more' if more > 0 else '')


def _describe(shapes: Optional[Sequence[Shape]], limit: int = 4) -> str:
    if not shapes:
        return 'none'
    if len(set(shapes)) == 1:
        return str(shapes[0]) + (f' × {len(shapes)}' if len(shapes) > 1 else '')
    more = len(shapes) - limit
    return ', '.join(map(str, shapes[:limit])) + (f' and {more} more' if more > 0 else '')


def image_size(shapes: Shapes) -> Optional[Size]:
    """Height and width that hold the images of a batch; None if there are none."""
    images = [
        shape
        for name, found in shapes.items()
        if name.split('[')[0].split('.')[0] == 'inputs'
        for shape in found
        if len(shape) >= 3
    ]
    if not images:
        return None
    return max(shape[-2] for shape in images), max(shape[-1] for shape in images)


def batch_size(shapes: Shapes) -> Optional[int]:
    """The number of samples of a batch; None if it cannot be told."""
    if 'inputs' in shapes and shapes['inputs'][0]:
        return shapes['inputs'][0][0]
    return len(shapes['inputs[*]']) if 'inputs[*]' in shapes else None

"""Record the shapes of tensors in each training iteration: new shapes compile new graphs."""

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
#: At most this number of names, and of shapes for each, is listed in a message.
MAX_NAMES, MAX_SHAPES = 6, 4


def _collect(value: Any, name: str, found: Dict[str, List[Shape]]) -> None:
    """Append the shapes of all tensors in nested containers, by name.

    E.g. ``dict(inputs=[torch.ones(3, 4), torch.ones(3, 5)])`` gives
    ``{'inputs[*]': [(3, 4), (3, 5)]}``.
    """
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
    """Record the shapes of the inputs and outputs of a model's data preprocessors, on the host.

    Both matter: a lazy device stacks and pads images in the graph in which the model computes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.pads_to: Any = None
        self._recording = False
        self._found: Dict[str, Dict[str, List[Shape]]] = {}
        self._handles: List[Any] = []
        self._watched: List[Any] = []
        for part in model.modules():
            if isinstance(part, BaseDataPreprocessor):
                self._attach(part)

    def _attach(self, part: BaseDataPreprocessor) -> None:
        forward = padded_forward(part)
        if forward is not None:
            forward.watcher = lambda batch: self._record(SENT, batch)
            self._watched.append(forward)
            self.pads_to = forward.pad_to
        elif not any(padded_forward(inner) for inner in part.modules()):
            self._handles.append(
                part.register_forward_pre_hook(lambda _, inputs: self._record(SENT, *inputs[:1]))
            )
        self._handles.append(
            part.register_forward_hook(lambda _, __, output: self._record(COMPUTED, output))
        )

    def detach(self) -> None:
        """Remove all hooks from the model."""
        for handle in self._handles:
            handle.remove()
        for forward in self._watched:
            forward.watcher = None

    def start(self) -> None:
        """Start recording an iteration."""
        self._found = {SENT: {}, COMPUTED: {}}
        self._recording = True

    def stop(self, data_batch: object) -> Dict[str, Shapes]:
        """Stop; return the shapes of preprocessors' inputs and outputs, or else the batch's."""
        if not self._found[COMPUTED]:
            self._record(COMPUTED, data_batch)
        self._recording = False
        return {
            kind: {name: tuple(shapes) for name, shapes in found.items()}
            for kind, found in self._found.items()
        }

    def _record(self, kind: str, batch: object = None) -> None:
        if self._recording:
            _collect(batch, '', self._found[kind])


def changed_names(before: Shapes, after: Shapes) -> List[str]:
    """Return the names whose shapes differ."""
    return [
        name for name in dict.fromkeys([*after, *before]) if before.get(name) != after.get(name)
    ]


def describe_changes(before: Shapes, after: Shapes) -> str:
    """Describe in one line which shapes changed, and how."""
    names = changed_names(before, after)
    changes = [
        f'{name}: {_describe(before.get(name))} → {_describe(after.get(name))}'
        for name in names[:MAX_NAMES]
    ]
    more = len(names) - MAX_NAMES
    return '; '.join(changes) + (f'; and {more} more' if more > 0 else '')


def _describe(shapes: Optional[Sequence[Shape]]) -> str:
    if not shapes:
        return 'none'
    if len(set(shapes)) == 1:
        return str(shapes[0]) + (f' × {len(shapes)}' if len(shapes) > 1 else '')
    more = len(shapes) - MAX_SHAPES
    return ', '.join(map(str, shapes[:MAX_SHAPES])) + (f' and {more} more' if more > 0 else '')


def image_size(shapes: Shapes) -> Optional[Size]:
    """Return height and width that hold the images of a batch; None if there are none."""
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
    """Return the number of samples of a batch; None if unknown."""
    if 'inputs' in shapes and shapes['inputs'][0]:
        return shapes['inputs'][0][0]
    return len(shapes['inputs[*]']) if 'inputs[*]' in shapes else None

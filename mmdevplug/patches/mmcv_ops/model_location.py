"""Find where a model uses an operator."""

from types import FrameType

from mmdevplug.device_guard.stack_location import (
    LIBRARIES,
    module_and_backward,
    source_of,
    user_frame,
)

#: The line in mmcv says no more than the name of the operator.
_PASSED_OVER = LIBRARIES | {'mmcv'}


def where() -> str:
    """The current module or backward, and the line, as far as they are known."""
    module, backward = module_and_backward(None)
    frame = innermost = user_frame()
    while frame is not None and not backward and _package(frame) in _PASSED_OVER:
        frame = frame.f_back
    source = source_of(frame or innermost)
    line = '' if source is None else f'{source.file}:{source.line}'
    return ', '.join(part for part in (module, backward, line) if part)


def _package(frame: FrameType) -> str:
    return (frame.f_globals.get('__name__') or '').partition('.')[0]

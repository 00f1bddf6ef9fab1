"""Explain code that asks for CUDA where a run computes elsewhere: which line, what to write."""

import re
from contextlib import contextmanager
from typing import Any, Iterator, Optional

from mmdevplug.distributed.process_group import device_context, rank_device
from mmdevplug.errors import DevPlugError, ModelError, first_line

from .cuda_settings import describe_serious
from .user_code import Place, chain, user_place

#: What PyTorch says where it was built without CUDA, and where it finds no card or no driver.
_CUDA = re.compile(
    r'not compiled with CUDA|re-initialize CUDA|without ATen_cuda|requires CUDA support'
    r'|NVIDIA driver|CUDA driver|No CUDA GPUs|no CUDA-capable'
    r"|torch\.cuda\.\w+ not available|attribute '_cuda_\w+|on a CUDA device but"
    r'|dummy base class (CUDA|Stream|Event)'
)
#: What mmcv says where an operator has no kernel for a device.
_NO_KERNEL = re.compile(r'(\w+?)(?:_impl)?: implementation for device (\S+) not found')

_MOVE = (
    'Write `x.to(other.device)`, where `other` is an input or a parameter of the module; a tensor '
    'that the module owns belongs in register_buffer() and moves with it'
)
_MAKE = 'Write `other.new_zeros(...)`, or `device=other.device`, where `other` is an input'
_BUILD = (
    'Leave it on the host and without a device: the runner moves the model when it is built, and '
    'what register_buffer() holds with it'
)
_ASK = (
    'Write `accelerator, device = mmdevplug.rank_device()` and then, for example, '
    '`accelerator.synchronize(device)`, or leave it out: the runner has chosen the device'
)
#: What to write in the place of a line that matches, the first that does.
_ADVICE = (
    (r'load\w*\(', "Write `map_location='cpu'`: what is loaded is copied to the device later"),
    (r'\bcuda\.\w*Tensor\b', f'{_MAKE}; `x.type()` of a CUDA type is `x.to(other)`'),
    (r'\.cuda\(|\.to\(', _MOVE),
    (r'device\s*=', _MAKE),
    (r'\bcuda\.', _ASK),
)


@contextmanager
def explain_cuda(stage: str, cfg: Any = None) -> Iterator[None]:
    """Turn an error of code that asks for CUDA into one that names the line and what to write.

    It does nothing where the run computes on CUDA.

    Args:
        stage (str): What is being done; ``'building the model'`` has advice of its own.
        cfg (Config, optional): Its settings for CUDA are named, too. Defaults to None.

    Raises:
        ModelError: In place of PyTorch's or mmcv's error.
    """
    try:
        yield
    except DevPlugError:
        raise
    except Exception as error:
        message = _explain(error, stage, cfg)
        if message is None:
            raise
        raise ModelError(message) from error


def _explain(error: Exception, stage: str, cfg: Any) -> Optional[str]:
    context = device_context()
    if context is None or context.device.type == 'cuda':
        return None
    for each in reversed(chain(error)):
        told = str(each)
        missing = _NO_KERNEL.search(told)
        if missing or _CUDA.search(told):
            break
    else:
        return None
    place = user_place(error)
    settings = describe_serious(cfg or {}, context.device.type)
    if place is None and not settings:
        return None
    said = first_line(each) if missing else _line_about_cuda(told)
    parts = [f'rank {context.env.rank}, {stage}: {type(each).__name__}: {said}']
    if place is not None:
        parts.append(_no_kernel(place, *missing.groups()) if missing else _asks(place, stage))
    parts += [f'In the config: {setting}.' for setting in settings]
    return '\n'.join(parts)


def _asks(place: Place, stage: str) -> str:
    device = rank_device()[1]
    return (
        f'{place.describe()}: this line asks for CUDA, but this run computes on {device}. '
        f'{_advice(place, stage)}.{_whose(place)}'
    )


def _advice(place: Place, stage: str) -> str:
    building = 'building' in stage or place.function.endswith('__init__')
    for pattern, advice in _ADVICE:
        if re.search(pattern, place.code):
            return _BUILD if building and advice in (_MOVE, _MAKE) else advice
    return _BUILD if building else _MOVE


def _whose(place: Place) -> str:
    if place.package is None:
        return ''
    return (
        f' The line belongs to the package {place.package!r}: override that method in a class of '
        f'your own and name it in the config.'
    )


def _no_kernel(place: Place, operator: str, device: str) -> str:
    return (
        f"{place.describe()}: mmcv's operator {operator!r} has no kernel for {device}. Choose a "
        f'part of the model that does without it; `mmdevplug doctor --config CONFIG` names the '
        f'key where the config asks for it.'
    )


def _line_about_cuda(text: str) -> str:
    """The line that is about CUDA: the last, where a worker process has sent its traceback."""
    return [line for line in text.splitlines() if _CUDA.search(line)][-1].strip()[:300]

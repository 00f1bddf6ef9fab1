"""Explain code that asks for CUDA while a run computes elsewhere: which line, what to write."""

import re
from contextlib import contextmanager
from typing import Any, Iterator, Optional

from mmdevplug.accelerators import device_context
from mmdevplug.errors import DevPlugError, ModelError, first_line

from .cuda_settings import describe_serious
from .user_code import Place, chain, user_place

#: Errors of PyTorch that was built without CUDA, or finds no card or no driver.
_CUDA = re.compile(
    r'not compiled with CUDA|re-initialize CUDA|without ATen_cuda|requires CUDA support'
    r'|NVIDIA driver|CUDA driver|No CUDA GPUs|no CUDA-capable'
    r"|torch\.cuda\.\w+ not available|attribute '_cuda_\w+|on a CUDA device but"
    r'|dummy base class (CUDA|Stream|Event)'
)
#: Errors of mmcv whose operator has no kernel for a device.
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
#: Pattern of a line, and what to write instead; the first that matches counts.
_ADVICE = (
    (r'load\w*\(', "Write `map_location='cpu'`: what is loaded is copied to the device later"),
    (r'\bcuda\.\w*Tensor\b', f'{_MAKE}; `x.type()` of a CUDA type is `x.to(other)`'),
    (r'\.cuda\(|\.to\(', _MOVE),
    (r'device\s*=', _MAKE),
    (r'\bcuda\.', _ASK),
)


@contextmanager
def explain_cuda(stage: str, cfg: Any = None) -> Iterator[None]:
    """Replace an error of code that asks for CUDA by a ``ModelError``: where, and what to write.

    It does nothing if the run computes on CUDA. Settings of ``cfg`` for CUDA are named, too.
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
        lines = str(each).splitlines()
        missing = _NO_KERNEL.search(str(each))
        about_cuda = [line.strip() for line in lines if _CUDA.search(line)]
        if missing or about_cuda:
            break
    else:
        return None
    place = user_place(error)
    settings = describe_serious(cfg or {}, context.device.type)
    if place is None and not settings:
        return None
    # The last line: a worker process of a data loader sends its whole traceback.
    text = first_line(each) if missing else about_cuda[-1][:300]
    parts = [f'rank {context.env.rank}, {stage}: {type(each).__name__}: {text}']
    if place is not None and missing:
        parts.append(
            f"{place.describe()}: mmcv's operator {missing.group(1)!r} has no kernel for "
            f'{missing.group(2)}. Choose a part of the model that does without it; `mmdevplug '
            f'doctor --config CONFIG` names the key where the config asks for it.'
        )
    elif place is not None:
        parts.append(
            f'{place.describe()}: this line asks for CUDA, but this run computes on '
            f'{context.device}. {_advice(place, stage)}.'
        )
        if place.package is not None:
            parts[-1] += (
                f' The line belongs to the package {place.package!r}: override that method in a '
                f'class of your own and name it in the config.'
            )
    return '\n'.join(parts + [f'In the config: {setting}.' for setting in settings])


def _advice(place: Place, stage: str) -> str:
    building = 'building' in stage or place.function.endswith('__init__')
    for pattern, advice in _ADVICE:
        if re.search(pattern, place.code):
            return _BUILD if building and advice in (_MOVE, _MAKE) else advice
    return _BUILD if building else _MOVE

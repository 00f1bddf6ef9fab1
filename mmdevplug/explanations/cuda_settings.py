"""Find settings of a config that are for CUDA, where a run computes elsewhere."""

import re
from typing import Any, Iterator, NamedTuple, Tuple

import torch

#: Parts of models that mmcv has kernels for on CUDA alone, and what may do in their place.
_ONLY_CUDA = {
    'BorderAlign': '',
    'CARAFE': "'bilinear'",
    'CARAFEPack': "'bilinear'",
    'Correlation': '',
    'DeformRoIPool': "'RoIAlign'",
    'DeformRoIPoolPack': "'RoIAlign'",
    'ModulatedDeformRoIPoolPack': "'RoIAlign'",
    'PrRoIPool': "'RoIAlign'",
    'RiRoIAlignRotated': "'RoIAlignRotated'",
    'RoIPool': "'RoIAlign'",
    'SigmoidFocalLoss': "'mmdet.FocalLoss'",
    'SoftmaxFocalLoss': "'mmdet.FocalLoss'",
    'carafe': "'bilinear'",
}
#: Keys that choose this package's own devices, where 'cuda' means what it says.
_OWN = ('accelerator', 'model_parallel', 'strategy')
_CUDA = re.compile(r'cuda(:\d+)?$')


class CudaSetting(NamedTuple):
    """A setting that is for CUDA.

    Attributes:
        path (str): Its key, e.g. ``'model.head.device'``.
        value (Any): What the config has.
        level (str): ``'error'``: training fails where it is used; ``'warning'``: it may;
            ``'note'``: it is without effect.
        why (str): What follows.
        write (str): What to write.
    """

    path: str
    value: Any
    level: str
    why: str
    write: str

    def describe(self) -> str:
        """One line for the log."""
        return f'{self.path}={self.value!r}: {self.why}. Write {self.write}'


def cuda_settings(cfg: Any, device_type: str) -> Iterator[CudaSetting]:
    """Look for settings that are for CUDA.

    Args:
        cfg (Config): The config.
        device_type (str): What the run computes on, e.g. ``'cpu'``; on ``'cuda'`` there is
            nothing to say.
    """
    if device_type == 'cuda':
        return
    for key in cfg:
        if key == 'fp16' and cfg[key] is not None:
            yield CudaSetting(
                key,
                cfg[key],
                'warning',
                'MMEngine reads no such key, which is of MMCV 1: training is in full precision',
                "optim_wrapper = dict(type='AmpOptimWrapper') or start with --amp",
            )
        elif key not in _OWN:
            yield from _walk(cfg[key], key, device_type)


def _walk(value: Any, path: str, device_type: str) -> Iterator[CudaSetting]:
    if isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _walk(item, f'{path}[{number}]', device_type)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, f'{path}.{key}', device_type)
    else:
        key = path.rsplit('.', 1)[-1]
        found = _judge(key, path, value, device_type)
        if found is not None:
            level, why, write = found
            yield CudaSetting(path, value, level, why, write)


def _judge(key: str, path: str, value: Any, device_type: str) -> Any:
    """Level, reason and what to write for a setting; None if it is not for CUDA."""
    name = value if isinstance(value, str) else getattr(value, '__name__', '')
    if key == 'type':
        return _judge_type(name.rsplit('.', 1)[-1], path, device_type)
    if key == 'cudnn_benchmark' and value:
        return 'note', f'it is for CUDA and without effect on {device_type}', f'{path} = False'
    if key == 'pin_memory' and value and device_type == 'cpu':
        return 'note', 'there is no device to copy to, so PyTorch leaves it out', f'{path} = False'
    if isinstance(value, torch.device):
        name = str(value)
    if not (name and _CUDA.match(name)):
        return None
    if key == 'map_location':
        why = f'a checkpoint cannot be read onto CUDA by a run on {device_type}'
        return 'error', why, f"{path} = 'cpu': weights are copied to the device later"
    if path == 'device':
        return 'note', 'MMEngine reads no such key', "accelerator = dict(type='auto')"
    why = f'whatever is built with it asks for CUDA, and this run computes on {device_type}'
    return 'warning', why, f'nothing there, or {path} = {device_type!r}'


def _judge_type(name: str, path: str, device_type: str) -> Any:
    if name == 'ApexOptimWrapper':
        why = f'apex works on CUDA alone, and this run computes on {device_type}'
        return 'error', why, f"{path} = 'AmpOptimWrapper'"
    if name not in _ONLY_CUDA:
        return None
    level = 'error' if device_type == 'cpu' else 'warning'
    instead = _ONLY_CUDA[name]
    write = f'{path} = {instead}, as far as the model allows' if instead else 'another model'
    return level, f'mmcv has a kernel for CUDA, and none for the CPU or {device_type}', write


def describe_serious(cfg: Any, device_type: str) -> Tuple[str, ...]:
    """What may stop a run, a line for each."""
    found = cuda_settings(cfg, device_type)
    return tuple(setting.describe() for setting in found if setting.level != 'note')

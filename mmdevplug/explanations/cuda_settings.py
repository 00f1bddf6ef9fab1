"""Find settings of a config that are for CUDA while a run computes elsewhere."""

import re
from typing import Any, Iterator, List, NamedTuple, Optional, Tuple

import torch

#: Parts of models for which mmcv has kernels on CUDA alone, and what may replace them.
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
#: Keys of this package that choose devices: 'cuda' is meant there.
_OWN = ('accelerator', 'model_parallel', 'strategy')
_CUDA = re.compile(r'cuda(:\d+)?$')


class CudaSetting(NamedTuple):
    """A setting that is for CUDA, what follows, and what to write."""

    path: str  # e.g. 'model.head.device'
    value: Any
    level: str  # 'error': training fails there; 'warning': it may; 'note': it has no effect
    why: str
    write: str

    def describe(self) -> str:
        """One line for the log."""
        return f'{self.path}={self.value!r}: {self.why}. Write {self.write}'


def cuda_settings(cfg: Any, device_type: str) -> Iterator[CudaSetting]:
    """Yield the settings of a config that are for CUDA, none if the run computes on ``'cuda'``."""
    if device_type == 'cuda':
        return
    for key in cfg:
        if key == 'fp16' and cfg[key] is not None:
            why = 'MMEngine reads no such key, which is of MMCV 1: training is in full precision'
            write = "optim_wrapper = dict(type='AmpOptimWrapper') or start with --amp"
            yield CudaSetting(key, cfg[key], 'warning', why, write)
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
        found = _judge(path.rsplit('.', 1)[-1], path, value, device_type)
        if found is not None:
            yield CudaSetting(path, value, *found)


def _judge(key: str, path: str, value: Any, device_type: str) -> Optional[Tuple[str, str, str]]:
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


def _judge_type(name: str, path: str, device_type: str) -> Optional[Tuple[str, str, str]]:
    if name == 'ApexOptimWrapper':
        why = f'apex works on CUDA alone, and this run computes on {device_type}'
        return 'error', why, f"{path} = 'AmpOptimWrapper'"
    if name not in _ONLY_CUDA:
        return None
    level = 'error' if device_type == 'cpu' else 'warning'
    instead = _ONLY_CUDA[name]
    write = f'{path} = {instead}, as far as the model allows' if instead else 'another model'
    return level, f'mmcv has a kernel for CUDA, and none for the CPU or {device_type}', write


def describe_serious(cfg: Any, device_type: str) -> List[str]:
    """Describe what may stop a run, a line for each setting."""
    found = cuda_settings(cfg, device_type)
    return [setting.describe() for setting in found if setting.level != 'note']

"""Keep the ground truth of a batch on the host, for losses that are computed there."""

from typing import Any, Dict, List, Optional, Tuple

import torch
from mmengine.model import BaseDataPreprocessor
from mmengine.structures import BaseDataElement
from torch import nn

from mmdevplug.accelerators.move_nested import to_device
from mmdevplug.utils.pytree import tensors_in


class HostTruth:
    """Keep samples on the host while the data preprocessor augments them, and then send copies.

    Heads find the originals of what the model passes on. Scaled on the device, the boxes of a
    batch would be a graph for each number of them. A preprocessor that makes truth from images,
    e.g. masks from colors, runs on the host from the second batch on.

    Args:
        model (nn.Module): A model, whose ``data_preprocessor`` is changed in place.
        casts (bool): Whether the preprocessor sends its inputs to the device; else they, too, stay
            on the host.
    """

    def __init__(self, model: nn.Module, casts: bool) -> None:
        self._sent: Dict[int, Tuple[Any, Any, List[Tuple[int, int]]]] = {}
        #: The device of the model, while the preprocessor is on the host.
        self._device: Optional[torch.device] = None
        preprocessor = getattr(model, 'data_preprocessor', None)
        if not isinstance(preprocessor, BaseDataPreprocessor):
            return
        if not casts:
            preprocessor.cast_data = lambda data: to_device(data, 'cpu')
        else:
            self._cast = preprocessor.cast_data
            preprocessor.cast_data = self._cast_inputs
            preprocessor.register_forward_hook(self._send)

    def _cast_inputs(self, data: object) -> object:
        return data.to('cpu') if isinstance(data, BaseDataElement) else self._cast(data)

    def _send(self, preprocessor: BaseDataPreprocessor, _: object, output: object) -> object:
        sent = to_device(output, self._device or preprocessor.device)
        samples: List[Any] = [
            part.get('data_samples') if isinstance(part, dict) else None for part in (output, sent)
        ]
        here, there = samples
        if self._device is None and any(t.device.type != 'cpu' for t in tensors_in(here)):
            self._device = preprocessor.device
            preprocessor.to('cpu')
        pairs = zip(there, here) if _are_samples(here) else ()
        self._sent = {id(copy): (copy, original, _versions(copy)) for copy, original in pairs}
        return sent

    def of(self, samples: Any) -> Any:
        """The originals of samples; other samples, and those changed since, are fetched."""
        if not _are_samples(samples):
            return samples
        originals = []
        for sample in samples:
            copy, original, versions = self._sent.get(id(sample), (None, None, []))
            if copy is not sample or versions != _versions(sample):
                return to_device(samples, 'cpu')
            original.set_metainfo(sample.metainfo)
            originals.append(original)
        return originals


def _versions(sample: BaseDataElement) -> List[Tuple[int, int]]:
    return [(id(tensor), tensor._version) for tensor in tensors_in(sample)]


class WithHostTruth:
    """Replace ``loss`` of a head: it gets the samples of the host."""

    def __init__(self, head: Any, truth: HostTruth) -> None:
        self.head, self.truth = head, truth

    def __call__(self, *args: object, **kwargs: object) -> object:
        args = tuple(map(self.truth.of, args))
        kwargs = {name: self.truth.of(arg) for name, arg in kwargs.items()}
        return type(self.head).loss(self.head, *args, **kwargs)


def _are_samples(value: Any) -> bool:
    known = isinstance(value, (list, tuple)) and len(value) > 0
    return known and all(isinstance(each, BaseDataElement) for each in value)

"""Pad batches to few sizes, in front of and behind any data preprocessor of OpenMMLab.

On a lazy device every new shape is a new graph to compile. So images are made larger on the host,
before the preprocessor sends them; there they are of raw bytes, which have no value that becomes
the preprocessor's own pad value. That value is put in on the device, from masks whose shapes do
not change either. Losses and predictions are those of a batch that had a larger image in it.
"""

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from mmengine.model import BaseDataPreprocessor
from mmengine.structures import BaseDataElement, PixelData
from torch import Tensor, nn
from torch.nn.functional import pad

from mmdevplug.config.pad_to import PadTo, Size, round_up
from mmdevplug.errors import DevPlugError

#: What preprocessors of different libraries call the same thing.
PAD_VALUE = ('pad_value', 'pad_val')
LABEL_PAD_VALUE = ('seg_pad_value', 'seg_pad_val')
#: Labels of pixels, which preprocessors pad with the value that losses ignore.
LABELS = ('gt_sem_seg', 'gt_edge_map', 'gt_depth_map')
IGNORED_LABEL = 255

Inputs = Union[Tensor, List[Tensor]]


class PaddedForward:
    """What a data preprocessor's ``forward`` becomes.

    Args:
        preprocessor (BaseDataPreprocessor): Any; its ``forward`` is called in between.
        pad_to (PadTo): To which size.

    Attributes:
        watcher (callable, optional): Told each batch as the preprocessor gets it.
    """

    def __init__(self, preprocessor: BaseDataPreprocessor, pad_to: PadTo) -> None:
        self.pad_to = pad_to
        self.preprocessor = preprocessor
        self.watcher: Optional[Callable[[Any], None]] = None
        self._forward = preprocessor.forward
        self._sizes: List[Size] = []
        self._filled = False
        augments = getattr(preprocessor, 'batch_augments', None)
        if isinstance(augments, nn.ModuleList):
            augments.insert(0, _Fill(self))
        elif augments is not None:
            preprocessor.batch_augments = _Fill(self, augments)

    def __call__(self, data: Any, training: bool = False) -> Any:
        """Preprocess a batch; see :meth:`mmengine.model.BaseDataPreprocessor.forward`.

        Raises:
            DevPlugError: If the batch has no images to pad, or they are too large.
        """
        images = _images(data)
        self._sizes = [(int(x.shape[-2]), int(x.shape[-1])) for x in images]
        size = self.pad_to.size_for(self._sizes)
        data = dict(data, inputs=_larger(data['inputs'], size))
        if training and _are_samples(data.get('data_samples')):
            data['data_samples'] = [
                self._with_larger_labels(sample, own, size)
                for sample, own in zip(data['data_samples'], self._sizes)
            ]
        if self.watcher is not None:
            self.watcher(data)
        self._filled = False
        result = self._forward(data, training)
        if not self._filled and isinstance(result, Mapping):
            result['inputs'] = self.fill(result['inputs'], result.get('data_samples'))
        return result

    def fill(self, inputs: Inputs, data_samples: Any) -> Inputs:
        """Put the pad value where the images of this batch were made larger.

        Args:
            inputs (Tensor or List[Tensor]): As the preprocessor made them.
            data_samples: Their metainfo is corrected in place.
        """
        self._filled = True
        if not isinstance(inputs, Tensor):
            return inputs  # of a preprocessor that does nothing but move what it gets
        height, width = int(inputs.shape[-2]), int(inputs.shape[-1])
        if _are_samples(data_samples):
            for sample, own in zip(data_samples, self._sizes):
                self._correct(sample, own, (height, width))
        middle = [1] * (inputs.dim() - 3)
        own = torch.tensor(self._sizes)
        below = torch.arange(height) >= own[:, :1]
        beside = torch.arange(width) >= own[:, 1:]
        below = below.view(-1, *middle, height, 1).to(inputs.device)
        beside = beside.view(-1, *middle, 1, width).to(inputs.device)
        return inputs.masked_fill(below | beside, _first(self.preprocessor, PAD_VALUE, 0))

    def _with_larger_labels(
        self, sample: BaseDataElement, own: Size, size: Size
    ) -> BaseDataElement:
        larger = {}
        for name, field in sample.items():
            if not isinstance(field, PixelData) or field.shape is None:
                continue
            if tuple(field.shape) != own:
                raise DevPlugError(
                    f'pad_to cannot pad {name} of {type(sample).__name__}: it is of (height, '
                    f'width) {tuple(field.shape)}, expected {own}, the size of the image. '
                    f'Set pad_to=None for this model.'
                )
            ignored = _first(self.preprocessor, LABEL_PAD_VALUE, IGNORED_LABEL)
            larger[name] = _larger_pixels(field, size, ignored if name in LABELS else 0)
        if not larger:
            return sample
        sample = sample.new()  # a data set may give the same one again
        sample.set_data(larger)
        return sample

    def _correct(self, sample: BaseDataElement, own: Size, size: Size) -> None:
        if 'batch_input_shape' in sample.metainfo:
            # mmdet: the size up to which the image itself is padded. Anchors beyond it are not
            # trained, so the loss is what it was.
            step = max(1, getattr(self.preprocessor, 'pad_size_divisor', 1))
            sample.set_metainfo(dict(pad_shape=(round_up(own[0], step), round_up(own[1], step))))
            return
        # mmseg: what it cuts off from predictions.
        padding = (0, size[1] - own[1], 0, size[0] - own[0])
        corrected: Dict[str, Any] = dict(pad_shape=size, padding_size=padding)
        if 'img_padding_size' in sample.metainfo:
            corrected['img_padding_size'] = padding
        shape = sample.metainfo.get('img_shape')
        if isinstance(shape, torch.Size):  # that of the input, which was padded already
            corrected['img_shape'] = torch.Size(own)
        sample.set_metainfo(corrected)


class _Fill(nn.Module):
    """Stands before the augmentations of a batch, which mix and resize images.

    Args:
        padded (PaddedForward): Knows how large the images are.
        augments (callable, optional): What to call next. Defaults to None: nothing.
    """

    def __init__(self, padded: PaddedForward, augments: Optional[Callable] = None) -> None:
        super().__init__()
        self._padded = padded
        self.augments = augments

    def forward(self, inputs: Inputs, others: Any) -> Tuple[Inputs, Any]:
        inputs = self._padded.fill(inputs, others)
        return (inputs, others) if self.augments is None else self.augments(inputs, others)


def padded_forward(preprocessor: nn.Module) -> Optional[PaddedForward]:
    """What pads for a data preprocessor, None if nothing does."""
    forward = vars(preprocessor).get('forward')
    return forward if isinstance(forward, PaddedForward) else None


def _images(data: Any) -> Sequence[Tensor]:
    images = data.get('inputs') if isinstance(data, Mapping) else None
    several = isinstance(images, (list, tuple)) and len(images) > 0
    if several and all(isinstance(image, Tensor) and image.dim() >= 2 for image in images):
        return images
    if isinstance(images, Tensor) and images.dim() >= 3 and len(images) > 0:
        return images
    kind = type(data).__name__ if not isinstance(data, Mapping) else type(images).__name__
    raise DevPlugError(
        f"pad_to needs batches with images in 'inputs' (a tensor, or a list of tensors, whose "
        f'last two dimensions are height and width), and got {kind}. Set pad_to=None for this '
        f'model.'
    )


def _are_samples(samples: Any) -> bool:
    return isinstance(samples, (list, tuple)) and all(
        isinstance(sample, BaseDataElement) for sample in samples
    )


def _larger(images: Inputs, size: Size) -> Inputs:
    if isinstance(images, Tensor):
        return _larger_tensor(images, size, 0)
    return [_larger_tensor(image, size, 0) for image in images]


def _larger_tensor(tensor: Tensor, size: Size, value: float) -> Tensor:
    height, width = tensor.shape[-2:]
    return pad(tensor, (0, size[1] - width, 0, size[0] - height), value=value)


def _larger_pixels(field: PixelData, size: Size, value: float) -> PixelData:
    # Not one field after the other: they must have the same size at all times.
    made = type(field)(metainfo=field.metainfo)
    for name, pixels in field.items():
        larger = _larger_tensor(torch.as_tensor(pixels), size, value)
        made.set_data({name: larger if isinstance(pixels, Tensor) else larger.numpy()})
    return made


def _first(owner: Any, names: Sequence[str], default: float) -> float:
    return next((getattr(owner, name) for name in names if hasattr(owner, name)), default)

"""Pad batches to few sizes, before and after any data preprocessor of OpenMMLab.

On a lazy device every new shape is a new graph to compile. So images are padded on the host,
before the preprocessor sends them. There they are raw bytes, none of which becomes the
preprocessor's pad value after normalization. That value is filled in on the device, with masks of
constant shapes. Losses and predictions are those of a batch that contains a larger image.
"""

from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    List,
    Mapping,
    MutableMapping,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import torch
from mmengine.logging import print_log
from mmengine.model import BaseDataPreprocessor
from mmengine.structures import BaseDataElement, PixelData
from torch import Tensor, nn
from torch.nn.functional import pad

from mmdevplug.config.pad_to import PadTo, Size, round_up
from mmdevplug.errors import DevPlugError, ModelError

if TYPE_CHECKING:
    from typing_extensions import TypeGuard


#: Names of the same attribute in different libraries.
PAD_VALUE = ('pad_value', 'pad_val')
LABEL_PAD_VALUE = ('seg_pad_value', 'seg_pad_val')
#: Labels of pixels, which preprocessors pad with the value that losses ignore.
LABELS = ('gt_sem_seg', 'gt_edge_map', 'gt_depth_map')
IGNORED_LABEL = 255

Inputs = Union[Tensor, List[Tensor]]


class PaddedForward:
    """Replace a data preprocessor's ``forward``: pad, call it, and fill in the pad value."""

    def __init__(self, preprocessor: BaseDataPreprocessor, pad_to: PadTo) -> None:
        self.pad_to = pad_to
        self.preprocessor = preprocessor
        self._forward = preprocessor.forward
        self._sizes: List[Size] = []
        self._filled = False
        augments = getattr(preprocessor, 'batch_augments', None)
        if isinstance(augments, nn.ModuleList):
            augments.insert(0, _Fill(self))
        elif augments is not None:
            preprocessor.batch_augments = _Fill(self, augments)

    def __call__(self, data: Mapping[str, Any], training: bool = False) -> object:
        """Preprocess a batch; see :meth:`mmengine.model.BaseDataPreprocessor.forward`."""
        images = _images(data)
        self._sizes = [(int(x.shape[-2]), int(x.shape[-1])) for x in images]
        size = self.pad_to.size_for(self._sizes)
        data = dict(data, inputs=_pad_images(data['inputs'], size))
        if training and _are_samples(data.get('data_samples')):
            data['data_samples'] = [
                self._pad_labels(sample, own, size)
                for sample, own in zip(data['data_samples'], self._sizes)
            ]
        self._filled = False
        result: object = self._forward(data, training)
        if not self._filled and isinstance(result, MutableMapping):
            result['inputs'] = self.fill(result['inputs'], result.get('data_samples'))
        return result

    def fill(self, inputs: Inputs, data_samples: object) -> Inputs:
        """Fill the padded area of images with the pad value, and correct the samples' metainfo."""
        self._filled = True
        if not isinstance(inputs, Tensor):
            return inputs  # The preprocessor only moves images.
        height, width = int(inputs.shape[-2]), int(inputs.shape[-1])
        if _are_samples(data_samples):
            for sample, own in zip(data_samples, self._sizes):
                self._correct(sample, own, (height, width))
        middle = [1] * (inputs.dim() - 3)
        sizes = torch.tensor(self._sizes)
        below = torch.arange(height) >= sizes[:, :1]
        beside = torch.arange(width) >= sizes[:, 1:]
        below = below.view(-1, *middle, height, 1).to(inputs.device)
        beside = beside.view(-1, *middle, 1, width).to(inputs.device)
        return inputs.masked_fill(below | beside, _first(self.preprocessor, PAD_VALUE, 0))

    def _pad_labels(self, sample: BaseDataElement, own: Size, size: Size) -> BaseDataElement:
        padded = {}
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
            padded[name] = _pad_pixels(field, size, ignored if name in LABELS else 0)
        if not padded:
            return sample
        sample = sample.new()  # The data set may return the same object again.
        sample.set_data(padded)
        return sample

    def _correct(self, sample: BaseDataElement, own: Size, size: Size) -> None:
        if 'batch_input_shape' in sample.metainfo:
            # mmdet: anchors outside this size are not trained, so the loss does not change.
            step = max(1, getattr(self.preprocessor, 'pad_size_divisor', 1))
            sample.set_metainfo(dict(pad_shape=(round_up(own[0], step), round_up(own[1], step))))
            return
        # mmseg removes this padding from predictions.
        padding = (0, size[1] - own[1], 0, size[0] - own[0])
        corrected: Dict[str, object] = dict(pad_shape=size, padding_size=padding)
        if 'img_padding_size' in sample.metainfo:
            corrected['img_padding_size'] = padding
        shape = sample.metainfo.get('img_shape')
        if isinstance(shape, torch.Size):  # the shape of the padded input
            corrected['img_shape'] = torch.Size(own)
        sample.set_metainfo(corrected)


class _Fill(nn.Module):
    """Fill in the pad value before the augmentations of a batch, which mix and resize images."""

    def __init__(self, padded: PaddedForward, augments: Optional[Callable] = None) -> None:
        super().__init__()
        self._padded = padded
        self.augments = augments

    def forward(self, inputs: Inputs, others: object) -> Tuple[Inputs, object]:
        inputs = self._padded.fill(inputs, others)
        return (inputs, others) if self.augments is None else self.augments(inputs, others)


def padded_forward(preprocessor: nn.Module) -> Optional[PaddedForward]:
    """Return the :class:`PaddedForward` of a data preprocessor, None if it does not pad."""
    forward = vars(preprocessor).get('forward')
    return forward if isinstance(forward, PaddedForward) else None


def install_padding(model: nn.Module, pad_to: PadTo) -> None:
    """Let the data preprocessors in a model pad; a model without any is refused."""
    preprocessors = [part for part in model.modules() if isinstance(part, BaseDataPreprocessor)]
    if not preprocessors:
        raise ModelError(
            f'pad_to is given, but {type(model).__name__} has no data preprocessor that could '
            f"pad. Give it one: data_preprocessor=dict(type='ImgDataPreprocessor')."
        )
    for part in preprocessors:
        if any(other in preprocessors for other in part.modules() if other is not part):
            continue  # It passes its batches on to the inner ones.
        forward = padded_forward(part)
        if forward is not None:
            forward.pad_to = pad_to
        else:
            part.forward = PaddedForward(part, pad_to)
    sizes = (
        f'the next multiple of {pad_to.multiple}'
        if pad_to.multiple is not None
        else 'the smallest that holds them of ' + ', '.join(map(str, pad_to.buckets))
    )
    print_log(f'pad_to: batches of images are padded to {sizes}.', 'current')


def _images(data: object) -> Union[Tensor, Sequence[Tensor]]:
    images: Any = data.get('inputs') if isinstance(data, Mapping) else None
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


def _are_samples(samples: object) -> 'TypeGuard[Sequence[BaseDataElement]]':
    return isinstance(samples, (list, tuple)) and all(
        isinstance(sample, BaseDataElement) for sample in samples
    )


def _pad_images(images: Inputs, size: Size) -> Inputs:
    if isinstance(images, Tensor):
        return _pad_tensor(images, size, 0)
    return [_pad_tensor(image, size, 0) for image in images]


def _pad_tensor(tensor: Tensor, size: Size, value: float) -> Tensor:
    height, width = tensor.shape[-2:]
    return pad(tensor, (0, size[1] - width, 0, size[0] - height), value=value)


def _pad_pixels(field: PixelData, size: Size, value: float) -> PixelData:
    # A new object: all fields of one must have the same size at all times.
    result = type(field)(metainfo=field.metainfo)
    for name, pixels in field.items():
        padded = _pad_tensor(torch.as_tensor(pixels), size, value)
        result.set_data({name: padded if isinstance(pixels, Tensor) else padded.numpy()})
    return result


def _first(owner: object, names: Sequence[str], default: float) -> float:
    return next((getattr(owner, name) for name in names if hasattr(owner, name)), default)

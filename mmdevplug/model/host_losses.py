"""Compute the losses of detectors on the host, behind the network of a lazy device.

What assigns boxes to predictions chooses with masks, so nearly every batch of boxes has shapes of
its own, each of which is one more graph on a lazy device, with the gradients of the whole network
in it. Here the network alone stays on the device: one execution computes the outputs of the head
and one call fetches them. The loss is computed from copies, and the gradients of all outputs go
back in one call.
"""

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

import torch
from mmengine.model import BaseDataPreprocessor
from mmengine.structures import BaseDataElement
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from mmdevplug.accelerators import Accelerator, devices_of
from mmdevplug.accelerators.context import current_accelerator
from mmdevplug.accelerators.move_nested import to_device
from mmdevplug.errors import DevPlugError, ModelError, first_line
from mmdevplug.utils.patching import replace_attribute
from mmdevplug.utils.pytree import replace_parts, tensors_in

from .host_queries import make_queries_on_host

#: A parameter, a buffer or another tensor of a module: the module, the dict in it, the name there.
_Slot = Tuple[nn.Module, str, str]


def compute_losses_on_host(model: nn.Module, wanted: Union[bool, str] = 'auto') -> List[nn.Module]:
    """Let the heads of a model on a lazy device compute their losses on the host.

    A head is a module with the method ``loss_by_feat``, which gets the outputs of the network and
    the ground truth: those of mmdet, mmdet3d and mmseg.

    Args:
        model (nn.Module): A bare model, changed in place.
        wanted (bool or str): True for all heads, False for none. Defaults to ``'auto'``: where
            shapes in the loss depend on values. These are all heads, except of models with a
            ``mask_head`` outside of a RoI head, which computes on the device with what the first
            head has chosen, and except of segmentors (heads with ``loss_decode``) of which no
            head samples pixels (``sampler``, as OHEM does) or counts those that are not ignored
            (``avg_non_ignore``).

    Returns:
        List[nn.Module]: The heads.
    """
    heads = [part for part in model.modules() if callable(getattr(part, 'loss_by_feat', None))]
    if not heads or wanted is False or (wanted == 'auto' and not _shapes_vary(model, heads)):
        return []
    truth = HostTruth(model)
    make_queries_on_host(model, truth)
    for head in heads:
        replace_attribute(head, 'loss_by_feat', HostLosses(head))
        if callable(getattr(head, 'loss', None)):
            replace_attribute(head, 'loss', _WithHostTruth(head, truth))
    if hasattr(model, 'parse_losses'):
        replace_attribute(model, 'parse_losses', _on_one_device(model.parse_losses))
    return heads


def _shapes_vary(model: nn.Module, heads: List[nn.Module]) -> bool:
    rois = {id(part.roi_head) for part in two_stage_detectors(model)}
    for part in model.modules():
        roi_head, mask_head = (getattr(part, name, None) for name in ('roi_head', 'mask_head'))
        if roi_head is not None and id(roi_head) not in rois:
            return False
        if mask_head is not None and id(part) not in rois:
            return False
    return any(_chooses(head) for head in heads)


def two_stage_detectors(model: nn.Module) -> List[Any]:
    """The parts of a model that are detectors with a RoI head as mmdet has them."""
    return [
        part
        for part in model.modules()
        if hasattr(part, 'extract_feat') and hasattr(getattr(part, 'roi_head', None), 'predict')
    ]


def point_encoders(model: nn.Module) -> Optional[Tuple[nn.Module, nn.Module]]:
    """What makes images of points in a model of mmdet3d: an encoder of voxels, and a scatter.

    None for other models, for those whose second encoder has parameters, and for an encoder whose
    batch normalization is synchronized.
    """
    encoder, scatter = (getattr(model, f'{name}_encoder', None) for name in ('voxel', 'middle'))
    if encoder is None or scatter is None or next(scatter.parameters(), None) is not None:
        return None
    if any(isinstance(part, nn.SyncBatchNorm) for part in encoder.modules()):
        return None
    return encoder, scatter


def _chooses(head: nn.Module) -> bool:
    decode = getattr(head, 'loss_decode', None)
    if decode is None:
        return True
    losses = decode if isinstance(decode, nn.ModuleList) else [decode]
    return getattr(head, 'sampler', None) is not None or any(
        getattr(loss, 'avg_non_ignore', False) for loss in losses
    )


def _on_one_device(parse: Callable) -> Callable:
    """Bring losses that other parts of the model computed on the device to those on the host."""

    def parse_losses(losses: Any) -> Any:
        there = [t for t in tensors_in(losses) if t.device.type != 'cpu']
        if there and len(there) < len(tensors_in(losses)):
            copies = HostCopies(current_accelerator(), there)
            losses = replace_parts(losses, copies.of)
        return parse(losses)

    return parse_losses


class _ToHost(torch.autograd.Function):
    """Copy tensors to the host in one call, and their gradients to the device in another.

    Behind the tensors are anchors, see :class:`HostCopies`, that wait for these gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, accelerator: Accelerator, count: int, *tensors: Tensor
    ) -> Tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.accelerator, ctx.anchors, tensors = accelerator, len(tensors) - count, tensors[:count]
        ctx.kinds = [(tensor.device, tensor.dtype) for tensor in tensors]
        # Everything that is recorded, for backward would compute what is left once more.
        accelerator.compilation.materialize_all(devices_of(tensors), tensors)
        half = (torch.float16, torch.bfloat16)
        copies = [t.float() if t.dtype in half else t for t in accelerator.copies.to_host(tensors)]
        ctx.mark_non_differentiable(
            *[copy for copy, needed in zip(copies, ctx.needs_input_grad[2:]) if not needed]
        )
        return tuple(copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Tuple[Any, ...]:
        result = list(gradients)
        for device in dict.fromkeys(device for device, _ in ctx.kinds):
            here = [
                i for i, g in enumerate(gradients) if g is not None and ctx.kinds[i][0] == device
            ]
            sent = [gradients[i].to(ctx.kinds[i][1]) for i in here]
            for i, gradient in zip(here, ctx.accelerator.copies.to_device(sent, device)):
                result[i] = gradient
        return (None, None, *result, *[torch.zeros(())] * ctx.anchors)


class _Together(torch.autograd.Function):
    """Let the gradients of tensors of a device begin together, in the thread of the device.

    They come from the thread of the host one by one. If the first began before the last is there,
    chance would order the sums of gradients, and another order is another graph. They wait for
    what is computed from the last output, a number on the host, too.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return (*[tensor.view_as(tensor) for tensor in tensors], torch.zeros(()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Tuple[Any, ...]:
        return gradients[:-1]


class HostCopies:
    """Copies of tensors of a lazy device, through which gradients reach the originals.

    Args:
        accelerator (Accelerator): That of the tensors.
        tensors (List[Tensor]): Those to be fetched together.

    Attributes:
        anchors (List[Tensor]): Numbers on the host. The originals get no gradients before what is
            computed from these.
    """

    def __init__(self, accelerator: Accelerator, tensors: List[Tensor]) -> None:
        self._accelerator, self.device = accelerator, accelerator.current_device()
        self._copies: Dict[int, Tuple[Tensor, Tensor, int]] = {}
        self._originals: Dict[int, Tensor] = {}
        self.anchors: List[Tensor] = []
        self.fetch(tensors)

    def fetch(self, tensors: List[Tensor]) -> None:
        """Fetch tensors of the device that are not there yet, in one call."""
        missing = {id(t): t for t in tensors if self.is_there(t) and id(t) not in self._copies}
        tensors = list(missing.values())
        if not tensors:
            return
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        earlier = self.anchors[::-1] if wanted else []  # else chance would order gradients
        together = dict(zip(map(id, wanted), self._together(wanted)))
        sources = [together.get(id(tensor), tensor) for tensor in tensors]
        copies = _ToHost.apply(self._accelerator, len(sources), *sources, *earlier)
        for original, copy in zip(tensors, copies):
            self._copies[id(original)] = (original, copy, copy._version)
            self._originals[id(copy)] = original

    def _together(self, tensors: List[Tensor]) -> List[Tensor]:
        if tensors:
            *tensors, anchor = _Together.apply(*tensors)
            self.anchors.append(anchor)
        return tensors

    def is_there(self, value: Any) -> bool:
        """Whether this is a tensor on the device."""
        return isinstance(value, Tensor) and value.device.type == self._accelerator.device_type

    def of(self, tensor: Any) -> Any:
        """The copy of a tensor, fetched now if it is not there yet; others are returned as is."""
        if not self.is_there(tensor):
            return tensor
        self.fetch([tensor])
        return self._copies[id(tensor)][1]

    def original(self, copy: Tensor) -> Optional[Tensor]:
        """The tensor on the device that this is the copy of; None for any other."""
        return self._originals.get(id(copy))

    def learned(self) -> List[Tensor]:
        """The copies through which gradients reach the originals."""
        return [copy for _, copy, _ in self._copies.values() if copy.requires_grad]

    def send_written(self) -> None:
        """Copy to the device what was written in place, e.g. counters in buffers."""
        written = [
            (original, copy)
            for original, copy, version in self._copies.values()
            if copy._version != version and not copy.requires_grad
        ]
        if written:
            originals, copies = zip(*written)
            with torch.no_grad():
                self._accelerator.copies.into_device(copies, originals)


class _HostView(dict):
    """The parameters, the buffers or the attributes of a module; reading one gives its copy."""

    def __init__(self, tensors: dict, read: Callable[[str, Any], Any]) -> None:
        super().__init__(tensors)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        return self._read(name, super().__getitem__(name))


class HostLosses:
    """Replace ``loss_by_feat`` of a head, or another method: compute it on the host, from copies.

    Parameters and buffers of the head that the loss reads are copied, too: with the outputs from
    the second time on, when it is known which these are. Buffers that the loss writes are
    written on the device.

    Raises:
        ModelError: If the loss calls a module outside of the head, or mixes devices.
    """

    def __init__(self, head: nn.Module, method: str = 'loss_by_feat') -> None:
        self.head, self.method = head, method
        self._slots: Dict[_Slot, None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compute = getattr(type(self.head), self.method)
        accelerator = current_accelerator()
        kind = accelerator.device_type
        if not accelerator.compilation.lazy:
            return compute(self.head, *args, **kwargs)
        there = tensors_in((args, kwargs))
        there += [vars(module)[place][name] for module, place, name in self._slots]
        for part in self.head.modules():
            there += [t for t in vars(part).values() if isinstance(t, Tensor)]
        copies = HostCopies(accelerator, there)
        args, kwargs = replace_parts((args, kwargs), copies.of)
        try:
            with self._reading(copies), self._refusing_others(copies):
                return compute(self.head, *args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, DevPlugError) or kind not in str(error).lower():
                raise
            raise self._refusal(f'{first_line(error)}') from error

    @contextmanager
    def _reading(self, copies: HostCopies) -> Iterator[None]:
        """Let modules of the head read parameters, buffers and plain tensors from the host."""
        views, plain = [], []
        for part in self.head.modules():
            for place in ('_parameters', '_buffers'):
                tensors = vars(part)[place]
                if tensors:
                    views.append((part, place, tensors))
                    vars(part)[place] = _HostView(tensors, self._reader(part, place, copies))
            for name, value in list(vars(part).items()):
                if copies.is_there(value):
                    plain.append((part, name, value))
                    vars(part)[name] = copies.of(value)
        try:
            yield
            copies.send_written()
        finally:
            for part, place, tensors in views:
                view, vars(part)[place] = vars(part)[place], tensors
                for name, value in dict.items(view):
                    if value is not tensors.get(name):  # assigned by the loss
                        tensors[name] = to_device(value, copies.device)
            for part, name, value in plain:
                if vars(part).get(name) is copies.of(value):
                    vars(part)[name] = value

    def _reader(self, part: nn.Module, place: str, copies: HostCopies) -> Callable:
        def read(name: str, tensor: Any) -> Any:
            if copies.is_there(tensor):
                self._slots[part, place, name] = None
            return copies.of(tensor)

        return read

    @contextmanager
    def _refusing_others(self, copies: HostCopies) -> Iterator[None]:
        def check(module: nn.Module, _: Any) -> None:
            held = vars(module)['_parameters']
            if not isinstance(held, _HostView) and any(map(copies.is_there, held.values())):
                raise self._refusal(f'it calls {type(module).__name__}, which is on the device')
            if not isinstance(module, _BatchNorm) or not isinstance(module._buffers, _HostView):
                return
            if module.training and module.track_running_stats:
                for name in module._buffers:  # PyTorch does not count that it writes these
                    getattr(module, name).add_(0)

        handle = register_module_forward_pre_hook(check)
        try:
            yield
        finally:
            handle.remove()

    def _refusal(self, problem: str) -> ModelError:
        return ModelError(
            f'{type(self.head).__name__}.{self.method} cannot be computed on the host: {problem}. '
            f'Expected a loss of the outputs of the head alone. Set '
            f'accelerator.host_losses=False, to compute all losses on the device.'
        )


class HostTruth:
    """Keep samples on the host while the data preprocessor augments them, and then send copies.

    Heads find the originals of what the model passes on. Scaled on the device, the boxes of a
    batch would be a graph for each number of them.

    Args:
        model (nn.Module): A model, whose ``data_preprocessor`` is changed in place.
    """

    def __init__(self, model: nn.Module) -> None:
        self._sent: Dict[int, Tuple[BaseDataElement, BaseDataElement, List[Tuple[int, int]]]] = {}
        preprocessor = getattr(model, 'data_preprocessor', None)
        if not isinstance(preprocessor, BaseDataPreprocessor):
            return
        if point_encoders(model):
            replace_attribute(preprocessor, 'cast_data', lambda data: to_device(data, 'cpu'))
        else:
            self._cast = preprocessor.cast_data
            replace_attribute(preprocessor, 'cast_data', self._cast_inputs)
            preprocessor.register_forward_hook(self._send)

    def _cast_inputs(self, data: Any) -> Any:
        return data.to('cpu') if isinstance(data, BaseDataElement) else self._cast(data)

    def _send(self, preprocessor: BaseDataPreprocessor, _: Any, output: Any) -> Any:
        sent = to_device(output, preprocessor.device)
        here, there = (
            part.get('data_samples') if isinstance(part, dict) else None for part in (output, sent)
        )
        pairs = zip(there, here) if _are_samples(here) else ()
        self._sent = {id(copy): (copy, original, _versions(copy)) for copy, original in pairs}
        return sent

    def of(self, samples: Any) -> Any:
        """The originals of samples; other samples, and those changed since, are fetched."""
        if not _are_samples(samples):
            return samples
        originals = []
        for sample in samples:
            copy, original, versions = self._sent.get(id(sample), (None, None, None))
            if copy is not sample or versions != _versions(sample):
                return to_device(samples, 'cpu')
            original.set_metainfo(sample.metainfo)
            originals.append(original)
        return originals


def _versions(sample: BaseDataElement) -> List[Tuple[int, int]]:
    return [(id(tensor), tensor._version) for tensor in tensors_in(sample)]


class _WithHostTruth:
    """Replace ``loss`` of a head: it gets the samples of the host."""

    def __init__(self, head: nn.Module, truth: HostTruth) -> None:
        self.head, self.truth = head, truth

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(self.truth.of, args))
        kwargs = {name: self.truth.of(arg) for name, arg in kwargs.items()}
        return type(self.head).loss(self.head, *args, **kwargs)


def _are_samples(value: Any) -> bool:
    elements = isinstance(value, (list, tuple)) and [isinstance(x, BaseDataElement) for x in value]
    return bool(elements) and all(elements)

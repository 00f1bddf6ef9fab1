"""Compute the losses of detectors on the host, behind the network of a lazy device.

What assigns boxes to predictions chooses with masks, so nearly every batch of boxes has shapes of
its own, each of which is one more graph on a lazy device, with the gradients of the whole network
in it. Here the network alone stays on the device: one execution computes the outputs of the head
and one call fetches them. The loss is computed from copies, and the gradients of all outputs go
back in one call.
"""

from contextlib import contextmanager
from inspect import signature
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from mmdevplug.accelerators import rank_context
from mmdevplug.accelerators.move_nested import to_device
from mmdevplug.errors import DevPlugError, ModelError, first_line
from mmdevplug.utils.pytree import replace_parts, tensors_in

from .copies import HostCopies
from .queries import make_queries_on_host
from .truth import HostTruth, WithHostTruth

#: A parameter, a buffer or another tensor of a module: the module, the dict in it, the name there.
_Slot = Tuple[nn.Module, str, str]
#: Where modules have parameters and buffers.
_PLACES = ('_parameters', '_buffers')


def compute_losses_on_host(model: nn.Module, wanted: Union[bool, str] = 'auto') -> List[nn.Module]:
    """Let the heads of a model on a lazy device compute their losses on the host.

    A head is a module with the method ``loss_by_feat``, which gets the outputs of the network and
    the ground truth: those of mmdet, mmdet3d and mmseg.

    Args:
        model (nn.Module): A bare model, changed in place.
        wanted (bool or str): True for all heads, False for none. Defaults to ``'auto'``: where
            shapes in the loss depend on values. These are all heads, except of segmentors (heads
            with ``loss_decode``) of which no head samples pixels (``sampler``, as OHEM does) or
            counts those that are not ignored (``avg_non_ignore``).

    Returns:
        List[nn.Module]: The heads.
    """
    heads: List[Any] = [
        part for part in model.modules() if callable(getattr(part, 'loss_by_feat', None))
    ]
    if not heads or wanted is False or (wanted == 'auto' and not _shapes_vary(model, heads)):
        return []
    truth = HostTruth(model, casts=point_encoders(model) is None)
    make_queries_on_host(model, truth)
    for head in heads:
        head.loss_by_feat = HostLosses(head)
        if callable(getattr(head, 'loss', None)):
            head.loss = WithHostTruth(head, truth)
        for part in _further_losses(head):
            vars(part)['loss'] = HostLosses(part, 'loss')
    for teacher in _teachers(model):
        vars(teacher)['get_label_assignment'] = HostLosses(teacher, 'get_label_assignment')
    if hasattr(model, 'parse_losses'):
        parse: Any = model.parse_losses
        vars(model)['parse_losses'] = _on_one_device(parse)
    return heads


def _teachers(model: nn.Module) -> List[Any]:
    """Heads that assign boxes for another head, of models that are held, but no parts."""
    held = [value for part in model.modules() for value in vars(part).values()]
    teachers = [each for each in held if isinstance(each, nn.Module)]
    parts = [part for teacher in teachers for part in teacher.modules()]
    return [part for part in parts if hasattr(part, 'get_label_assignment')]


def _further_losses(head: nn.Module) -> List[nn.Module]:
    """Parts of a head with a loss of their own and no parameters, which it calls from ``loss``."""
    return [
        part
        for part in head.modules()
        if callable(getattr(part, 'loss', None))
        and not hasattr(part, 'loss_by_feat')
        and next(part.parameters(), None) is None
    ]


def _shapes_vary(model: nn.Module, heads: List[nn.Module]) -> bool:
    rois = {id(part.roi_head) for part in two_stage_detectors(model)}
    for part in model.modules():
        roi_head = getattr(part, 'roi_head', None)
        if roi_head is not None and id(roi_head) not in rois:
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
    """Find the voxel encoder and the scatter with which a model of mmdet3d makes images of points.

    Both take the coordinates of voxels, ``coors``, and a scatter takes ``batch_size``, too. None
    for other models, for those whose scatter has parameters or whose encoder sees images, and for
    an encoder whose batch normalization is synchronized.
    """
    forwards = [(part, getattr(type(part), 'forward', None)) for part in model.modules()]
    takes = [(part, signature(run).parameters) for part, run in forwards if callable(run)]
    by_place = [(part, 'batch_size' in names) for part, names in takes if 'coors' in names]
    encoder = next((part for part, scatters in by_place if not scatters), None)
    scatter = next((part for part, scatters in by_place if scatters), None)
    if encoder is None or scatter is None or next(scatter.parameters(), None) is not None:
        return None
    if any(isinstance(part, nn.SyncBatchNorm) for part in encoder.modules()):
        return None
    images = getattr(encoder, 'fusion_layer', None) or getattr(model, 'img_backbone', None)
    return None if images else (encoder, scatter)


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

    def parse_losses(losses: object) -> object:
        there = [t for t in tensors_in(losses) if t.device.type != 'cpu']
        if there and len(there) < len(tensors_in(losses)):
            copies = HostCopies(rank_context().accelerator, there)
            losses = replace_parts(losses, copies.of)
        return parse(losses)

    return parse_losses


@contextmanager
def refusing_mixed_devices(module: nn.Module, method: str) -> Iterator[None]:
    """Say what to set if tensors of the host and of the device meet in a method."""
    try:
        yield
    except RuntimeError as error:
        kind, text = rank_context().accelerator.device_type, str(error).lower()
        if isinstance(error, DevPlugError) or kind not in text or 'tensor' not in text:
            raise
        raise refusal(module, method, first_line(error)) from error


def refusal(module: nn.Module, method: str, problem: str) -> ModelError:
    """The error of a method that cannot be computed on the host."""
    return ModelError(
        f'{type(module).__name__}.{method} cannot be computed on the host: {problem}. Expected a '
        f'loss of the outputs of the head alone, and networks that are called as modules. Set '
        f'accelerator.host_losses=False, to compute all losses on the device.'
    )


class _HostView(dict):
    """The parameters, the buffers or the attributes of a module; reading one gives its copy."""

    def __init__(self, tensors: dict, read: Callable[[str, object], object]) -> None:
        super().__init__(tensors)
        self._read = read

    def __getitem__(self, name: str) -> object:
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
        #: Those of the latest copies, where a head that goes on with the loss takes them.
        self.anchors: Optional[List[Tensor]] = None

    def __call__(self, *args: object, **kwargs: object) -> object:
        compute = getattr(type(self.head), self.method)
        accelerator = rank_context().accelerator
        if not accelerator.compilation.lazy:
            return compute(self.head, *args, **kwargs)
        there = tensors_in((args, kwargs))
        there += [vars(module)[place][name] for module, place, name in self._slots]
        there += tensors_in([value for _, _, value in self._plain()])
        copies = HostCopies(accelerator, there)
        if self.anchors is not None:
            self.anchors = copies.anchors
        args, kwargs = replace_parts((args, kwargs), copies.of)
        refusing = refusing_mixed_devices(self.head, self.method)
        with refusing, self._reading(copies), self._refusing_others(copies):
            return compute(self.head, *args, **kwargs)

    @contextmanager
    def _reading(self, copies: HostCopies) -> Iterator[None]:
        """Let modules of the head read parameters, buffers and plain tensors from the host."""
        views, plain = [], list(self._plain())
        for part in self.head.modules():
            for place in _PLACES:
                tensors = vars(part)[place]
                if tensors:
                    views.append((part, place, tensors))
                    vars(part)[place] = _HostView(tensors, self._reader(part, place, copies))
        copied = [replace_parts(value, copies.of) for _, _, value in plain]
        for (holder, name, _), copy in zip(plain, copied):
            holder[name] = copy
        try:
            yield
            copies.send_written()
        finally:
            for part, place, tensors in views:
                view, vars(part)[place] = vars(part)[place], tensors
                for name, value in dict.items(view):
                    if value is not tensors.get(name):  # assigned by the loss
                        tensors[name] = to_device(value, copies.device)
            for (holder, name, value), copy in zip(plain, copied):
                if holder.get(name) is copy:
                    holder[name] = value

    def _plain(self) -> Iterator[Tuple[dict, str, object]]:
        """Tensors, and lists of them, in attributes of the head and in dicts there."""
        for part in self.head.modules():
            attributes = {n: v for n, v in vars(part).items() if n not in _PLACES}
            for holder in (vars(part), *attributes.values()):
                for name, value in holder.items() if isinstance(holder, dict) else ():
                    if isinstance(value, (Tensor, list, tuple)) and tensors_in(value):
                        yield holder, name, value

    def _reader(self, part: nn.Module, place: str, copies: HostCopies) -> Callable:
        def read(name: str, tensor: object) -> object:
            if copies.is_there(tensor):
                self._slots[part, place, name] = None
            return copies.of(tensor)

        return read

    @contextmanager
    def _refusing_others(self, copies: HostCopies) -> Iterator[None]:
        def check(module: nn.Module, _: object) -> None:
            held = vars(module)['_parameters']
            if not isinstance(held, _HostView) and any(map(copies.is_there, held.values())):
                problem = f'it calls {type(module).__name__}, which is on the device'
                raise refusal(self.head, self.method, problem)
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

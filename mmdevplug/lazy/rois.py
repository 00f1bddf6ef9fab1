"""Run the networks of two-stage detectors on a lazy device, and all between them on the host.

How many proposals there are, and which are sampled, depends on values, so nearly every batch has
shapes of its own. Here one call fetches the outputs of the RPN together with the features.
Proposals, samples, RoI features, targets and losses are computed on the host. The networks of the
RoI head get as many RoIs as the sampler takes, filled up with zeros that are cut off again, so
that each network is one graph.
"""

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from mmdevplug.accelerators import devices_of, rank_context
from mmdevplug.accelerators.move_nested import to_device
from mmdevplug.utils.pytree import replace_parts, tensors_in

from .copies import HostCopies
from .losses import HostLosses, refusal, refusing_mixed_devices, two_stage_detectors
from .predictions import is_prediction


def split_stages(model: nn.Module, losses: bool) -> None:
    """Let the detectors of two stages in a model keep what is between their networks on the host.

    Args:
        model (nn.Module): A bare model for a lazy device, changed in place.
        losses (bool): Whether training does, too. Predictions do always.
    """
    for part in two_stage_detectors(model):
        steps = Steps(part)
        for method in ('loss', 'predict') if losses else ('predict',):
            setattr(part, method, _Step(steps, method))
            setattr(part.roi_head, method, _SecondStage(steps, method))
        for head in part.children():
            if head is part.roi_head or not {'predict', 'predict_by_feat'} & set(dir(head)):
                continue
            head.forward = _FirstStage(steps, head)
            for stage in head.modules():
                for method in ('loss_by_feat', 'predict_by_feat'):
                    if stage is not head and callable(getattr(stage, method, None)):
                        setattr(stage, method, _OfStage(steps, getattr(stage, method)))
        for child in part.roi_head.children():
            for network in child if isinstance(child, nn.ModuleList) else [child]:
                if next(network.parameters(), None) is None:
                    network.register_forward_hook(steps.note_extracted)
                    continue
                network.forward = _Network(steps, network)
                if losses and hasattr(network, 'loss_and_target'):
                    network.loss_and_target = _Losses(steps, network)


class Steps:
    """State that the two stages of a detector share in a forward pass.

    Attributes:
        copies (HostCopies, optional): The features on the host; None outside of a step.
        limits (Tuple[int, ...]): How many RoIs the RoI head has chosen at most.
    """

    def __init__(self, detector: Any) -> None:
        self.detector = detector
        self._finish()

    def _finish(self) -> None:
        self.active = False
        self.copies: Optional[HostCopies] = None
        self.limits: Tuple[int, ...] = ()
        self._gate: Optional[_Gate] = None
        self._extracted: Dict[int, Tuple[Tensor, Any, Tensor]] = {}
        self._anchors: List[Tensor] = []

    @contextmanager
    def step(self, method: str) -> Iterator[None]:
        """Run a method of the detector with all between its networks on the host."""
        self.active = rank_context().accelerator.compilation.lazy and (
            method == 'loss' or is_prediction()
        )
        try:
            yield
        finally:
            self._finish()

    def fetch(self, nested: object) -> Any:
        """Replace tensors on the device, all fetched in one call."""
        if self.copies is None:
            self.copies = HostCopies(rank_context().accelerator, tensors_in(nested))
        self.copies.fetch(tensors_in(nested))
        return replace_parts(nested, self.copies.of)

    def choose_limits(self, images: int, training: bool) -> None:
        """Note how many RoIs networks get at most: positive ones, and all."""
        chosen: List[int] = []
        if training:
            samplers = getattr(self.detector.roi_head, 'bbox_sampler', None)
            for sampler in samplers if isinstance(samplers, list) else [samplers]:
                count = getattr(sampler, 'num', 0)
                chosen += [int(count * getattr(sampler, 'pos_fraction', 1)), count]
        else:
            test = getattr(self.detector, 'test_cfg', None) or {}
            chosen = [(test.get(name) or {}).get('max_per_img', 0) for name in ('rcnn', 'rpn')]
        self.limits = tuple(sorted({images * count for count in chosen if count > 0}))

    def note_extracted(self, _: nn.Module, inputs: object, output: object) -> Any:
        """Let the gradients of RoI features wait for those of other networks.

        Features of a network of the RoI head, as HTC's semantic ones, get theirs at once.
        """
        if self.copies is None or not isinstance(output, Tensor) or not output.requires_grad:
            return output
        learned = [each for each in tensors_in(inputs) if each.requires_grad]
        if not learned or any(self.copies.original(each) is None for each in learned):
            return output
        if self._gate is None:
            self._gate = _Gate(self.copies.learned())
        held = _Held.apply(self._gate, [output], self._gate.anchor)
        self._extracted[id(held)] = (held, held.grad_fn, output)
        return held

    def send(self, tensors: List[Tensor], rows: int) -> List[Tensor]:
        """Copy tensors to the device, filled up to a number of rows.

        Gradients of RoI features are fetched in one call for all networks.
        """
        gate: Any = None
        sources = tensors
        anchors, self._anchors = self._anchors, []
        learned = [tensor for tensor in tensors if tensor.requires_grad]
        # A tensor that was written in place has another `grad_fn`.
        known = [self._extracted.get(id(t), (None, None))[1] is t.grad_fn for t in learned]
        if learned and all(known):
            gate = self._gate
            anchors.append(gate.anchor)
            sources = [tensor.detach() for tensor in tensors]
            tensors = [self._extracted[id(t)][2] if t.requires_grad else t for t in tensors]
        copies: Any = self.copies
        device = copies.device
        return list(ToDevice.apply(gate, tensors, rows, device, len(anchors), *anchors, *sources))

    def fetch_outputs(self, outputs: object) -> HostCopies:
        """Fetch the outputs of a network, whose gradients wait for those of later networks.

        Otherwise the order of networks in backward would vary between steps, and each order would
        be a new graph to compile.
        """
        copies = HostCopies(rank_context().accelerator, tensors_in(outputs))
        self._anchors += copies.anchors
        return copies


class _Gate:
    """Gradients of RoI features, fetched together and led to the features of the images."""

    def __init__(self, features: List[Tensor]) -> None:
        self.waiting: Dict[int, Tuple[List[Tensor], List[Tensor]]] = {}
        self.count = 0
        self.anchor = _Opened.apply(self.waiting, *features)

    def number(self) -> int:
        """The place of a consumer of RoI features, in the order of the forward pass."""
        self.count += 1
        return self.count


class _Opened(torch.autograd.Function):
    """Run the backward of all RoI extractors after those of all networks of the RoI head."""

    @staticmethod
    def forward(ctx: Any, waiting: dict, *features: Tensor) -> Tensor:
        ctx.waiting = waiting
        ctx.save_for_backward(*features)
        return features[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any) -> Tuple[Any, ...]:
        outputs, gradients = [], []
        for number in sorted(ctx.waiting):  # any other order is another graph to compile
            for output, gradient in zip(*ctx.waiting.pop(number)):
                outputs.append(output)
                gradients.append(gradient)
        there = [gradient for gradient in gradients if gradient.device.type != 'cpu']
        copies = dict(zip(map(id, there), _fetched(there)))
        here = [
            copies.get(id(gradient), gradient)[: len(output)].type_as(output)
            for output, gradient in zip(outputs, gradients)
        ]
        return (None, *torch.autograd.grad(outputs, ctx.saved_tensors, here, allow_unused=True))


class _Held(torch.autograd.Function):
    """Let gradients of RoI features that come from the host wait, too."""

    @staticmethod
    def forward(ctx: Any, gate: _Gate, outputs: List[Tensor], anchor: Tensor) -> Tensor:
        ctx.gate, ctx.outputs, ctx.number = gate, outputs, gate.number()
        return outputs[0].data  # no view, so it may be written in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Any, ...]:
        ctx.gate.waiting[ctx.number] = (ctx.outputs, [gradient])
        return None, None, torch.zeros(())


class ToDevice(torch.autograd.Function):
    """Copy tensors to a device in one call, and their gradients to the host in another."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Optional[_Gate],
        tensors: Sequence[Tensor],
        rows: int,
        device: torch.device,
        anchors: int,
        *sources: Tensor,
    ) -> Tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.anchors, sources = anchors, sources[anchors:]
        ctx.counts = [tensor.shape[:1] for tensor in tensors]
        ctx.gate, ctx.outputs = gate, tensors if gate is not None else ()
        if gate is not None:
            ctx.number = gate.number()
        filled = [_filled(source, rows) for source in sources]
        sent = rank_context().accelerator.copies.to_device(filled, device)
        ctx.mark_non_differentiable(
            *[copy for copy, tensor in zip(sent, tensors) if not tensor.requires_grad]
        )
        return tuple(sent)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Tuple[Any, ...]:
        result: List[object] = [None] * len(gradients)
        anchors = [torch.zeros(())] * ctx.anchors
        here = [i for i, gradient in enumerate(gradients) if gradient is not None]
        given = [gradients[i] for i in here]
        if ctx.gate is not None:
            ctx.gate.waiting[ctx.number] = ([ctx.outputs[i] for i in here], given)
            return (None, None, None, None, None, *anchors, *result)
        for i, gradient in zip(here, _fetched(given)):
            result[i] = gradient[: ctx.counts[i][0]] if ctx.counts[i] else gradient
        return (None, None, None, None, None, *anchors, *result)


def _fetched(tensors: List[Tensor]) -> List[Tensor]:
    if not tensors:
        return []
    accelerator = rank_context().accelerator
    accelerator.compilation.materialize_all(devices_of(tensors), tensors)
    return accelerator.copies.to_host(tensors)


def _filled(tensor: Tensor, rows: int) -> Tensor:
    if not tensor.dim() or len(tensor) >= rows:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


class _Step:
    """Replace ``loss`` or ``predict`` of a detector; samples come to the host."""

    def __init__(self, steps: Steps, method: str) -> None:
        self.steps, self.method = steps, method

    def __call__(self, inputs: object, samples: object, *args: object, **kwargs: object) -> object:
        detector = self.steps.detector
        with self.steps.step(self.method), refusing_mixed_devices(detector, self.method):
            if self.steps.active:
                samples = to_device(samples, 'cpu')
            return getattr(type(detector), self.method)(detector, inputs, samples, *args, **kwargs)


class _FirstStage:
    """Replace ``forward`` of a head beside the RoI head: outputs and features are fetched."""

    def __init__(self, steps: Steps, head: nn.Module) -> None:
        self.steps, self.head = steps, head

    def __call__(self, x: object, *args: object, **kwargs: object) -> object:
        outputs = type(self.head).forward(self.head, x, *args, **kwargs)
        return self.steps.fetch((outputs, x))[0] if self.steps.active else outputs


class _OfStage:
    """Replace a method of a stage of an RPN: the outputs that it gets are fetched."""

    def __init__(self, steps: Steps, method: Callable) -> None:
        self.steps, self.method = steps, method

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self.steps.active:
            args, kwargs = self.steps.fetch((args, kwargs))
        return self.method(*args, **kwargs)


class _SecondStage:
    """Replace ``loss`` or ``predict`` of a RoI head: all that it gets is on the host."""

    def __init__(self, steps: Steps, method: str) -> None:
        self.steps, self.method = steps, method

    def __call__(self, x: Any, proposals: Any, samples: Any, *args: Any, **kwargs: Any) -> Any:
        steps, head = self.steps, self.steps.detector.roi_head
        run = getattr(type(head), self.method)
        if not steps.active:
            return run(head, x, proposals, samples, *args, **kwargs)
        x, proposals = steps.fetch((x, proposals))
        steps.choose_limits(len(samples), self.method == 'loss')
        with refusing_mixed_devices(head, self.method):
            return run(head, x, proposals, samples, *args, **kwargs)


class _Network:
    """Replace ``forward`` of a network of a RoI head: it runs on the device, from the host."""

    def __init__(self, steps: Steps, network: nn.Module) -> None:
        self.steps, self.network = steps, network
        #: By the limits of a step: rows that were needed so far.
        self._rows: Dict[Tuple[int, ...], int] = {}

    def __call__(self, *args: object, **kwargs: object) -> object:
        steps, forward = self.steps, type(self.network).forward
        if steps.copies is None:
            return forward(self.network, *args, **kwargs)
        given = tensors_in((args, kwargs))
        known: Dict[int, Any] = {id(each): steps.copies.original(each) for each in given}
        sent = [each for each in given if known[id(each)] is None]
        counts = {len(each) if each.dim() else -1 for each in sent}
        fill = len(counts) == 1 and self._fills()
        rows = self._choose_rows(*counts) if fill else 0
        known.update(zip(map(id, sent), steps.send(sent, rows) if sent else []))
        args, kwargs = replace_parts((args, kwargs), lambda each: known[id(each)])
        outputs = forward(self.network, *args, **kwargs)
        copies = steps.fetch_outputs(outputs)
        if not fill:
            return replace_parts(outputs, copies.of)
        (count,) = counts
        return replace_parts(outputs, lambda each: self._cut(copies.of(each), rows, count))

    def _fills(self) -> bool:
        """Whether rows of zeros leave the other rows as they are."""
        return bool(self.steps.limits) and not any(
            isinstance(part, _BatchNorm) and part.training for part in self.network.modules()
        )

    def _choose_rows(self, count: int) -> int:
        limits = self.steps.limits
        fitting = [limit for limit in limits if limit >= count]
        needed = fitting[0] if fitting else -(-count // limits[-1]) * limits[-1]
        self._rows[limits] = max(needed, self._rows.get(limits, 0))
        return self._rows[limits]

    def _cut(self, output: Tensor, rows: int, count: int) -> Tensor:
        if output.dim() and len(output) == rows:
            return output[:count]
        raise refusal(
            self.network,
            'forward',
            f'an output for {rows} RoIs has shape {tuple(output.shape)}, without a row for each',
        )


class _Losses(HostLosses):
    """Replace ``loss_and_target`` of a head: it reads parameters and buffers from the host."""

    head: Any

    def __init__(self, steps: Steps, head: nn.Module) -> None:
        super().__init__(head, 'loss_and_target')
        self.steps = steps

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self.steps.copies is None:
            return type(self.head).loss_and_target(self.head, *args, **kwargs)
        return super().__call__(*args, **kwargs)

"""Copy tensors of a lazy device to the host within a forward pass, all in one call.

Gradients go back in one call, too, and in the same order in every step: each other order of
additions would be a new graph to compile.
"""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmdevplug.accelerators import Accelerator, devices_of


class _ToHost(torch.autograd.Function):
    """Copy tensors to the host in one call, and their gradients to the device in another.

    The last inputs are anchors of earlier copies, see :class:`HostCopies`: they get a gradient
    from this backward, so autograd runs that of the earlier copies after it.
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
    """Pass the gradients of several device tensors on at the same time.

    Autograd's thread of the host delivers these gradients one by one, and the thread of the device
    would add each to others as soon as it arrives. Then the order of the additions varies from
    step to step, and a lazy device compiles a new graph for each order. Autograd calls this
    backward when all gradients are there, that of the last output (the anchor, a number on the
    host) included.
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
        earlier (List[Tensor]): Anchors of earlier copies, whose originals get no gradients before
            those of these.

    Attributes:
        anchors (List[Tensor]): Numbers on the host. The originals get no gradients before what is
            computed from these.
    """

    def __init__(
        self, accelerator: Accelerator, tensors: List[Tensor], earlier: Sequence[Tensor] = ()
    ) -> None:
        self._earlier = earlier
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
        # Gradients of earlier copies wait for these, or the order of additions would vary between
        # steps, and the device would compile a graph for each order.
        earlier = [*self.anchors[::-1], *self._earlier] if wanted else []
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

    def is_there(self, value: object) -> bool:
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

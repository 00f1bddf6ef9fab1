"""Nets whose layers of synchronized batch normalization do not all depend on each other."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.jobs import checkpoint


class Two(nn.Module):
    """Two layers of one input, with different weights."""

    affine = True

    def __init__(self, **options):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4, **options))
        self.second = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4, **options))
        for layer in (self.first[1], self.second[1]):
            if layer.affine:
                nn.init.uniform_(layer.weight, 0.5, 1.5)
                nn.init.uniform_(layer.bias, -0.5, 0.5)

    def forward(self, inputs):
        return self.join(self.first(inputs), self.second(inputs))

    def join(self, first, second):
        return first * second


class NotAffine(Two):
    def __init__(self):
        super().__init__(affine=False)


class NotTracked(Two):
    def __init__(self):
        super().__init__(track_running_stats=False)


class Cumulative(Two):
    def __init__(self):
        super().__init__(momentum=None)


class Residual(Two):
    def join(self, first, second):
        first += second
        return F.relu(first, inplace=True)


class UsedTwice(Two):
    def join(self, first, second):
        return torch.cat([first + F.relu(first), second * first, second.sigmoid()])


class ChangedInPlace(Two):
    def join(self, first, second):
        kept = F.relu_(first)
        assert kept is first
        F.leaky_relu(second, 0.1, inplace=True)
        return torch.cat([first, second]).add_(1)


class InPlaceAfterAnother(Two):
    """An activation of a tensor, which then is changed in place."""

    def join(self, first, second):
        before = torch.sigmoid(first)
        F.leaky_relu(first, 0.1, inplace=True)
        return before + first * second


class Resized(Two):
    def join(self, first, second):
        first = F.interpolate(F.relu(first), size=(7, 5), mode='bilinear', align_corners=False)
        return torch.cat([first, F.interpolate(second, size=(7, 5))], dim=1)


class Unused(Two):
    def join(self, first, second):
        return first


class Detached(Two):
    def join(self, first, second):
        with torch.no_grad():
            scale = first.mean()
        return second.detach() * first + scale


class DetachedAlone(Two):
    def join(self, first, second):
        return first.data + second


class SameLayer(Two):
    def forward(self, inputs):
        return self.join(self.first(inputs), self.first(inputs * 2))


class InARow(Two):
    def forward(self, inputs):
        return self.second(self.first(inputs)[:, :3])


class FrozenInput(Two):
    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)
        self.first[1].bias.requires_grad_(True)


class FrozenLayer(Two):
    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)


class OneInEval(Two):
    def train(self, mode=True):
        super().train(mode)
        self.first[1].eval()
        return self


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(inputs)
        return inputs * inputs

    @staticmethod
    def backward(ctx, grad_outputs):
        (inputs,) = ctx.saved_tensors
        return 2 * grad_outputs * inputs


class CustomFunction(Two):
    def join(self, first, second):
        return Square.apply(first) + second


class KeywordModule(Two):
    class Inner(nn.Module):
        def forward(self, *, values):
            return Square.apply(values['x'][0])

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def join(self, first, second):
        return self.inner(values=dict(x=[first])) + second


class Checkpointed(Two):
    reentrant = False

    def forward(self, inputs):
        outputs = checkpoint(super().forward, inputs, use_reentrant=self.reentrant)
        return outputs + checkpoint(self.first, inputs, use_reentrant=self.reentrant)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedArgument(Two):
    """Outputs that are not computed when a checkpointed segment begins."""

    reentrant = False

    def join(self, first, second):
        def segment(values, others):
            return F.relu(values) * others.sigmoid()

        return checkpoint(segment, first, second, use_reentrant=self.reentrant)


class CheckpointedArgumentReentrant(CheckpointedArgument):
    reentrant = True


class SavedOnHost(Two):
    def forward(self, inputs):
        first = self.first(inputs)
        with torch.autograd.graph.save_on_cpu():
            return self.join(first, self.second(inputs))


class Hooked(Two):
    """Hooks of layers and of outputs."""

    def __init__(self):
        super().__init__()
        self.first[1].register_forward_hook(lambda part, args, output: output * 2)
        self.second.register_forward_hook(lambda part, args, output: output.mean() + output)
        self.second[1].register_full_backward_hook(lambda part, grads, outs: (grads[0] * 3,))

    def join(self, first, second):
        first.register_hook(lambda grad: grad * 2)
        return first * second


class HookedOnOneRank(Two):
    """One rank needs the first output before the others do."""

    def forward(self, inputs):
        first = self.first(inputs)
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            assert first.shape[1] == 4
        return self.join(first, self.second(inputs))


class MixedDtypes(Two):
    def __init__(self):
        super().__init__()
        self.second.double()

    def forward(self, inputs):
        return self.join(self.first(inputs), self.second(inputs.double()))


class Half(Two):
    def forward(self, inputs):
        self.to(torch.bfloat16)
        first, second = self.first(inputs.bfloat16()), self.second(inputs.bfloat16())
        return F.interpolate(first, scale_factor=2) * F.interpolate(F.silu(second), scale_factor=2)


class Autocast(Two):
    """Resizes in autocast whose results are needed where it is off."""

    def forward(self, inputs):
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
            first, second = self.first(inputs), self.second(inputs)
            second = F.relu(F.interpolate(second, scale_factor=2, mode='bilinear'))
            first = F.interpolate(F.gelu(first), scale_factor=2)
        return torch.cat([first.float(), second.float()])


class NoGrad(Two):
    def forward(self, inputs):
        with torch.no_grad():
            statistics = super().forward(inputs)
        return super().forward(inputs) + statistics


class InferenceMode(Two):
    """Inference that needs an output of training."""

    def join(self, first, second):
        with torch.inference_mode():
            scale = first.mean().clone()
        return first * second + float(scale > 0)


class Container(Two):
    def forward(self, inputs):
        return dict(a=[self.first(inputs)], b=(self.second(inputs),))


def build(kind):
    torch.manual_seed(0)
    return kind().train()


#: Those that one process on the CPU computes the same with ordinary layers.
EXACT = (
    *(Two, NotAffine, NotTracked, Cumulative, Residual, UsedTwice, ChangedInPlace),
    *(InPlaceAfterAnother, Resized, Unused, DetachedAlone, InARow, FrozenInput),
    *(FrozenLayer, OneInEval, CustomFunction, KeywordModule, Checkpointed),
    *(CheckpointedReentrant, CheckpointedArgument, CheckpointedArgumentReentrant),
    *(HookedOnOneRank, MixedDtypes, NoGrad, Container),
)
#: Those that are only compared with layers one by one.
OTHERS = (Detached, SameLayer, SavedOnHost, Hooked, Half, Autocast, InferenceMode)
NETS = {kind.__name__: kind for kind in (*EXACT, *OTHERS)}


def tensors_of(outputs):
    if isinstance(outputs, Tensor):
        return [outputs]
    values = outputs.values() if isinstance(outputs, dict) else outputs
    return [tensor for value in values for tensor in tensors_of(value)]


def run(model, batches, device, steps=2):
    """Run a net forth and back, and return arrays: outputs, gradients (summed up) and buffers."""
    for step in range(steps):
        inputs = batches(step).to(device).requires_grad_()
        outputs = tensors_of(model(inputs))
        assert all(type(tensor) is Tensor for tensor in outputs)
        weights = torch.arange(1.0, 1.0 + len(outputs))
        loss = sum((tensor.float() ** 2).sum() * w for tensor, w in zip(outputs, weights.tolist()))
        loss.backward()
    found = {f'output {i}': tensor for i, tensor in enumerate(outputs)}
    found.update(model.state_dict(), inputs=inputs.grad)
    found.update({f'{name}.grad': p.grad for name, p in model.named_parameters()})
    return {
        name: None if value is None else value.detach().cpu().double().numpy()
        for name, value in found.items()
    }


def batch(step, sizes, rank=None):
    """The batch of a step: of a rank, or of all."""
    generator = torch.Generator().manual_seed(step)
    whole = torch.randn(sum(sizes), 3, 4, 4, generator=generator) + 0.5
    return whole if rank is None else whole.split(sizes)[rank]

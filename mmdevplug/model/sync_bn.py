"""Synchronize batch normalization over ranks on any device.

PyTorch's own works on a few types of devices. This one computes with ordinary operations, and its
statistics travel through the host where the backend does not take the device's tensors.
"""

import time
from contextlib import contextmanager
from typing import Any, Iterator, Optional, Tuple

import torch
from torch import Tensor, distributed as torch_dist
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from mmdevplug.accelerators import Accelerator, device_context
from mmdevplug.accelerators.backend import backend_of, takes_host_tensors
from mmdevplug.distributed.rank_device import rank_device
from mmdevplug.distributed.traffic import TRAFFIC, Cost, all_reduce_bytes
from mmdevplug.errors import ModelError

#: Statistics of these are computed in float32.
HALF = (torch.float16, torch.bfloat16)

#: What the exchanges that ran a lazy device's graph have cost this process so far.
LAZY_EXCHANGES = Cost()
#: The iteration that is measured: graphs are compiled in the first ones.
MEASURED_ITERATION = 5


class DeviceSyncBatchNorm(_BatchNorm):
    """Batch normalization over the batches of all ranks, on any device.

    Batches may differ in size and may be empty on some ranks. In eval mode, and with one rank,
    this is ordinary batch normalization. Statistics are float32 where the input has half
    precision; the output has the input's dtype. Gradients of weight and bias are those of this
    rank's batch, as in PyTorch: the model wrapper averages them.

    On a lazy device each forward pass in training mode costs one graph execution, and so does
    each backward pass that reaches the input.

    It is no subclass of :class:`torch.nn.SyncBatchNorm`, because PyTorch's DDP refuses models on
    the CPU that have one.

    Args:
        *args: Of ordinary batch normalization: ``num_features``, ``eps``, ``momentum``,
            ``affine``, ``track_running_stats``.
        process_group (ProcessGroup, optional): The ranks whose batches count. Defaults to None:
            all.
        **kwargs: As ``args``.

    Shape:
        - Input: (N, C), (N, C, L), (N, C, H, W) or (N, C, D, H, W)
        - Output: the same

    Raises:
        ModelError: In training mode, on every rank, if the batches of all ranks together hold one
            value per channel; on this rank, if the input has other channels.
    """

    #: Copies between device and host; None for that of this process.
    accelerator: Optional[Accelerator] = None
    #: The name in the model, for messages.
    layer_name: str = ''

    def __init__(self, *args: Any, process_group: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a batch."""
        group = _group_of(self.process_group) if self.training else None
        if group is None:
            return self._normalize_alone(input)
        self._check_input_dim(input)
        exchange = StatisticsExchange(self._accelerator(), group, input.device)
        with torch.no_grad():
            local, count = local_statistics(input)
            combined, total = exchange.combine(local, count, self.eps)
            self._check_total(total)
            mean, invstd, unbiased = combined.unbind()
            if self.track_running_stats:
                self._update_running(mean, unbiased, total)
        return _Normalize.apply(
            input, self.weight, self.bias, mean, invstd, max(total, 1), exchange
        )

    def _normalize_alone(self, input: Tensor) -> Tensor:
        frozen = not self.training and self.running_mean is not None
        if not (frozen and torch.is_grad_enabled() and self._accelerator().lazy):
            return _BatchNorm.forward(self, input)
        # torch_xla has no gradient of PyTorch's own.
        return normalize_frozen(self, input)

    def _accelerator(self) -> Accelerator:
        return rank_device()[0] if self.accelerator is None else self.accelerator

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ModelError(
                f'{type(self).__name__} {self.layer_name!r} got an input of shape '
                f'{tuple(input.shape)}; expected (N, {self.num_features}, ...). Look at the layer '
                f'before it.'
            )

    def _check_total(self, total: int) -> None:
        # An empty batch is allowed, as in ordinary batch normalization.
        if total == 1:
            raise ModelError(
                f'{type(self).__name__} {self.layer_name!r}: the batches of all ranks together '
                f'hold 1 value per channel; expected at least 2 to compute a variance from. '
                f'Increase the batch size, set drop_last=True in the sampler or data loader, or '
                f'keep this layer in eval mode.'
            )

    def _update_running(self, mean: Tensor, unbiased: Tensor, total: int) -> None:
        self.num_batches_tracked.add_(1)
        if total == 0:
            return
        # The count is a tensor: reading it would run a lazy device's graph, and as a number that
        # is another one each time it would have the graph compiled anew.
        momentum = (
            self.num_batches_tracked.to(mean.dtype).reciprocal()
            if self.momentum is None
            else self.momentum
        )
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.add_(((new - running.to(new.dtype)) * momentum).to(running.dtype))


class StatisticsExchange:
    """Combines the statistics of one layer, which are on a device, over the ranks of a group."""

    def __init__(self, accelerator: Accelerator, group: Any, device: torch.device) -> None:
        self.accelerator = accelerator
        self.group = group
        self.device = device
        self.world_size = torch_dist.get_world_size(group)
        taken = device.type == 'cpu' or accelerator.takes_tensors(backend_of(group))
        self.through_host = not taken

    def combine(self, local: Tensor, count: int, eps: float) -> Tuple[Tensor, int]:
        """Gather and combine the statistics of all ranks.

        ``local`` has mean and sum of squared deviations, of shape (2, C), of ``count`` values per
        channel. The result has mean, 1 / sqrt(variance + eps) and unbiased variance, of shape
        (3, C), and the number of values per channel on all ranks.
        """
        size = (local.numel() + 1) * local.element_size()
        with self._recorded(size * (self.world_size - 1)):
            fetched = self._fetch(local)
            message = torch.cat([fetched.new_full((1,), count), fetched.reshape(-1)])
            rows = message.new_empty(self.world_size, message.numel())
            torch_dist.all_gather(list(rows.unbind()), message, group=self.group)
            statistics = rows[:, 1:].view(self.world_size, 2, -1)
            mean, squares = combine_statistics(rows[:, :1], statistics[:, 0], statistics[:, 1])
            total = int(rows[:, 0].sum().item())
            invstd = (squares / max(total, 1) + eps).rsqrt()
            combined = torch.stack([mean, invstd, squares / max(total - 1, 1)])
            return self._send(combined), total

    def average(self, local: Tensor, total: int) -> Tensor:
        """Add up over all ranks and divide by ``total``."""
        size = local.numel() * local.element_size()
        with self._recorded(all_reduce_bytes(size, self.world_size)):
            sums = self._fetch(local) / total
            torch_dist.all_reduce(sums, group=self.group)
            return self._send(sums)

    def _fetch(self, tensor: Tensor) -> Tensor:
        if not self.through_host:
            return tensor
        self.accelerator.materialize(self.device, [tensor])
        return self.accelerator.to_host([tensor])[0]

    def _send(self, tensor: Tensor) -> Tensor:
        if not self.through_host:
            return tensor
        sent = torch.empty_like(tensor, device=self.device)
        self.accelerator.copy_to_device([tensor], [sent])
        return sent

    @contextmanager
    def _recorded(self, sent: float) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        TRAFFIC.record('sync_bn', sent=sent, seconds=seconds, waited=seconds)
        if self.through_host and self.accelerator.lazy:
            LAZY_EXCHANGES.messages += 1
            LAZY_EXCHANGES.seconds += seconds


class SyncBNCost:
    """Measures what synchronization costs one iteration on a lazy device, and warns on rank 0."""

    def __init__(self) -> None:
        self._iterations = 0
        self._before: Optional[Tuple[float, int, float]] = None

    def after_iteration(self, runner: Any) -> None:
        """Count an iteration; warn after the one that is measured."""
        self._iterations += 1
        now = time.perf_counter(), LAZY_EXCHANGES.messages, LAZY_EXCHANGES.seconds
        if self._iterations == MEASURED_ITERATION - 1:
            self._before = now
        elif self._iterations == MEASURED_ITERATION and runner.rank == 0:
            self._warn(runner, *(after - before for after, before in zip(now, self._before)))

    def _warn(self, runner: Any, elapsed: float, executions: int, seconds: float) -> None:
        if not executions:
            return
        layers = sum(isinstance(part, DeviceSyncBatchNorm) for part in runner.model.modules())
        runner.logger.warning(
            f'{layers} synchronized batch normalization layer(s) add {executions} graph '
            f'executions to an iteration: iteration {MEASURED_ITERATION} spent '
            f'{1e3 * seconds:.1f} of {1e3 * elapsed:.1f} ms in them, computing included. Set '
            f"sync_bn='per_rank' to do without them; each rank then normalizes with the "
            f'statistics of its own batch.'
        )


class _Normalize(torch.autograd.Function):
    """Normalize with statistics that depend on the inputs of all ranks.

    The gradient is that of Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network
    Training by Reducing Internal Covariate Shift", 2015, section 3, with the sums taken over all
    ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Optional[Tensor],
        bias: Optional[Tensor],
        mean: Tensor,
        invstd: Tensor,
        total: int,
        exchange: StatisticsExchange,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight, mean, invstd)
        ctx.total, ctx.exchange = total, exchange
        return _normalize(inputs, weight, bias, mean, invstd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_outputs: Tensor) -> Tuple[Optional[Tensor], ...]:
        inputs, weight, mean, invstd = ctx.saved_tensors
        wants_inputs, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_outputs = grad_outputs.to(mean.dtype)
        sums = _sum_products(grad_outputs, inputs, mean)
        grad_weight = (sums[1] * invstd).to(weight.dtype) if wants_weight else None
        grad_bias = sums[0] if wants_bias else None
        if not wants_inputs:
            return None, grad_weight, grad_bias, None, None, None, None
        averages = ctx.exchange.average(sums, ctx.total)
        slope = _per_channel(averages[1] * invstd * invstd, inputs)
        grad_inputs = (inputs.to(mean.dtype) - _per_channel(mean, inputs)).mul_(slope)
        grad_inputs = (grad_outputs - grad_inputs).sub_(_per_channel(averages[0], inputs))
        grad_inputs.mul_(_per_channel(_scale(invstd, weight), inputs))
        return grad_inputs.to(inputs.dtype), grad_weight, grad_bias, None, None, None, None


def local_statistics(inputs: Tensor) -> Tuple[Tensor, int]:
    """Mean and squared deviations, of shape (2, C), and number of values of each channel.

    The statistics of an empty batch are zeros.
    """
    dtype = torch.float32 if inputs.dtype in HALF else inputs.dtype
    channels = inputs.shape[1]
    count = inputs.numel() // max(channels, 1)
    if count == 0:
        return torch.zeros(2, channels, dtype=dtype, device=inputs.device), 0
    values = inputs.detach().to(dtype)
    mean = values.mean(_all_but_channels(inputs))
    deviations = values - _per_channel(mean, inputs)
    return torch.stack([mean, (deviations * deviations).sum(_all_but_channels(inputs))]), count


def combine_statistics(counts: Tensor, means: Tensor, squares: Tensor) -> Tuple[Tensor, Tensor]:
    """Combine means and sums of squared deviations of several samples.

    Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", Stanford STAN-CS-79-773, 1979, for many samples at once. A difference of large
    sums, in which float32 loses the variance, does not occur in it. ``counts`` has the shape
    (R, 1), the others (R, C), the results (C,).
    """
    shares = counts / counts.sum().clamp(min=1)
    mean = (shares * means).sum(0)
    return mean, (squares + counts * (means - mean) ** 2).sum(0)


def prepare_statistics_group() -> None:
    """Make a process group only for statistics, unless one exists; called by all ranks.

    In the group of the gradients, ranks whose graphs differ (unused parameters) may issue
    statistics and gradients in another order, and statistics wait for large messages.
    """
    world, context = torch_dist.group.WORLD, device_context()
    if context is None or world in context.side_groups or not takes_host_tensors():
        return
    # A lost rank shows here at once, and in the making of a group only after the timeout.
    torch_dist.all_reduce(torch.zeros(1))
    context.side_groups[world] = torch_dist.new_group(timeout=context.timeout)


def normalize_frozen(layer: _BatchNorm, inputs: Tensor) -> Tensor:
    """Normalize with the running statistics of a layer, in operations that any device has."""
    invstd = (layer.running_var + layer.eps).rsqrt()
    return _normalize(inputs, layer.weight, layer.bias, layer.running_mean, invstd)


def _group_of(process_group: Any) -> Any:
    """The group that averages a layer's statistics; None if it has one rank."""
    if not (torch_dist.is_available() and torch_dist.is_initialized()):
        return None
    if process_group is None:
        process_group, context = torch_dist.group.WORLD, device_context()
        if context is not None:
            process_group = context.side_groups.get(process_group, process_group)
    return process_group if torch_dist.get_world_size(process_group) > 1 else None


def _all_but_channels(inputs: Tensor) -> Tuple[int, ...]:
    return (0, *range(2, inputs.dim()))


def _per_channel(values: Tensor, inputs: Tensor) -> Tensor:
    """Give one value per channel a shape that broadcasts against the inputs'."""
    return values.view(1, -1, *[1] * (inputs.dim() - 2))


def _scale(invstd: Tensor, weight: Optional[Tensor]) -> Tensor:
    return invstd if weight is None else invstd * weight.to(invstd.dtype)


def _normalize(
    inputs: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], mean: Tensor, invstd: Tensor
) -> Tensor:
    # Centred first: with a large mean, scaled inputs and shift would cancel out.
    outputs = inputs.to(mean.dtype) - _per_channel(mean, inputs)
    outputs.mul_(_per_channel(_scale(invstd, weight), inputs))
    if bias is not None:
        outputs.add_(_per_channel(bias.to(mean.dtype), inputs))
    return outputs.to(inputs.dtype)


def _sum_products(grad_outputs: Tensor, inputs: Tensor, mean: Tensor) -> Tensor:
    """Sums of the gradient and of its products with the centred inputs, of shape (2, C)."""
    centred = inputs.to(mean.dtype) - _per_channel(mean, inputs)
    dims = _all_but_channels(inputs)
    return torch.stack([grad_outputs.sum(dims), (grad_outputs * centred).sum(dims)])

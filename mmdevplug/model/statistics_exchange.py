"""Compute the statistics of batch normalization, and combine those of all ranks."""

from typing import NamedTuple, Tuple

import torch
from torch import Tensor, distributed as torch_dist

from mmdevplug.accelerators import Accelerator, group_timeout
from mmdevplug.accelerators.backend import backend_of, takes_host_tensors, waits_for_backward
from mmdevplug.distributed.group_values import values_of_group
from mmdevplug.utils.annotations import AnyGroup

#: Statistics of these are computed in float32.
HALF = (torch.float16, torch.bfloat16)


class CombinedStatistics(NamedTuple):
    """Statistics of one layer's inputs on all ranks."""

    mean: Tensor
    invstd: Tensor  # 1 / sqrt(variance + eps)
    unbiased: Tensor  # variance
    total: int  # values per channel


class StatisticsExchange:
    """Combines the statistics of one layer, which are on a device, over the ranks of a group."""

    #: The name of the layer that needs it, for messages of other ranks that wait.
    layer_name = ''

    def __init__(self, accelerator: Accelerator, group: AnyGroup, device: torch.device) -> None:
        self.accelerator = accelerator
        self.group = group
        self.device = device
        self.world_size = torch_dist.get_world_size(group)
        #: Whether each exchange runs a graph, which statistics then leave for the host.
        self.runs_graph = device.type != 'cpu' and waits_for_backward(
            accelerator, backend_of(group)
        )

    def combine(self, values: Tensor, count: int, eps: float) -> CombinedStatistics:
        """Gather and combine the statistics of all ranks, see :func:`local_statistics`."""
        fetched = self._fetch(values)
        message = torch.cat([fetched.new_full((1,), count), fetched.reshape(-1)])
        rows = message.new_empty(self.world_size, message.numel())
        torch_dist.all_gather(list(rows.unbind()), message, group=self.group)
        statistics = rows[:, 1:].reshape(self.world_size, 2, -1)
        mean, squares = combine_statistics(rows[:, :1], statistics[:, 0], statistics[:, 1])
        total = int(rows[:, 0].sum().item())
        invstd = (squares / max(total, 1) + eps).rsqrt()
        sent = self._send(torch.stack([mean, invstd, squares / max(total - 1, 1)]))
        # PyTorch's lazy device returns tensors of the CPU from unbind() and split().
        return CombinedStatistics(sent[0], sent[1], sent[2], total)

    def average(self, sums: Tensor, total: int) -> Tensor:
        """Add up over all ranks, and divide by the number of values."""
        averages = self._fetch(sums) / total
        torch_dist.all_reduce(averages, group=self.group)
        return self._send(averages)

    def _fetch(self, tensor: Tensor) -> Tensor:
        if not self.runs_graph:
            return tensor
        self.accelerator.compilation.materialize(self.device, [tensor])
        return self.accelerator.copies.to_host([tensor])[0]

    def _send(self, tensor: Tensor) -> Tensor:
        if not self.runs_graph:
            return tensor
        sent = torch.empty_like(tensor, device=self.device)
        self.accelerator.copies.into_device([tensor], [sent])
        return sent


def local_statistics(inputs: Tensor) -> Tuple[Tensor, int]:
    """Compute the statistics of a batch on this rank; those of an empty one are zeros.

    These are the mean and the sum of squared deviations, of shape (2, C), and the number of values
    per channel.
    """
    dtype = torch.float32 if inputs.dtype in HALF else inputs.dtype
    channels = inputs.shape[1]
    count = inputs.numel() // max(channels, 1)
    if count == 0:
        return torch.zeros(2, channels, dtype=dtype, device=inputs.device), 0
    values = inputs.detach().to(dtype)
    dims = all_but_channels(inputs)
    mean = values.mean(dims)
    deviations = values - per_channel(mean, inputs)
    squares = (deviations * deviations).sum(dims)
    return torch.stack([mean, squares]), count


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
    made = values_of_group(None)
    if 'statistics' in made or not takes_host_tensors():
        return
    # A lost rank shows here at once, and in the making of a group only after the timeout.
    torch_dist.all_reduce(torch.zeros(1))
    made['statistics'] = torch_dist.new_group(timeout=group_timeout())


def statistics_group(process_group: AnyGroup) -> AnyGroup:
    """The group that averages a layer's statistics; None if it has one rank."""
    if not (torch_dist.is_available() and torch_dist.is_initialized()):
        return None
    if process_group is None:
        process_group = values_of_group(None).get('statistics', torch_dist.group.WORLD)
    return process_group if torch_dist.get_world_size(process_group) > 1 else None


def all_but_channels(inputs: Tensor) -> Tuple[int, ...]:
    """The dimensions that statistics are computed over."""
    return (0, *range(2, inputs.dim()))


def per_channel(values: Tensor, inputs: Tensor) -> Tensor:
    """Give one value per channel a shape that broadcasts against the inputs'."""
    return values.view(1, -1, *[1] * (inputs.dim() - 2))

"""Compute the statistics of batch normalization, and combine those of all ranks."""

import time
from contextlib import contextmanager
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, distributed as torch_dist

from mmdevplug.accelerators import Accelerator, device_context
from mmdevplug.accelerators.backend import backend_of, takes_host_tensors, waits_for_backward
from mmdevplug.distributed.traffic import TRAFFIC, Cost, all_reduce_bytes

#: Statistics of these are computed in float32.
HALF = (torch.float16, torch.bfloat16)

#: What the exchanges that ran a lazy device's graph have cost this process so far; each counts as
#: one message.
LAZY_EXCHANGES = Cost()


class LocalStatistics(NamedTuple):
    """Statistics of one layer's input on this rank."""

    values: Tensor  # mean and sum of squared deviations, of shape (2, C)
    count: int  # values per channel
    eps: float  # of the layer


class CombinedStatistics(NamedTuple):
    """Statistics of one layer's inputs on all ranks."""

    mean: Tensor
    invstd: Tensor  # 1 / sqrt(variance + eps)
    unbiased: Tensor  # variance
    total: int  # values per channel


class StatisticsExchange:
    """Combines the statistics of layers, which are on a device, over the ranks of a group."""

    #: The name of the layer that needs it, for messages of other ranks that wait.
    layer_name = ''

    def __init__(self, accelerator: Accelerator, group: Any, device: torch.device) -> None:
        self.accelerator = accelerator
        self.group = group
        self.device = device
        self.world_size = torch_dist.get_world_size(group)
        #: Whether each exchange runs a graph, so that layers had better share one. Then all that
        #: it needs is fetched and sent at once.
        self.runs_graph = device.type != 'cpu' and waits_for_backward(
            accelerator, backend_of(group)
        )

    def combine(self, layers: Sequence[LocalStatistics]) -> List[List[CombinedStatistics]]:
        """Gather and combine the statistics of all ranks, in one execution of a lazy device.

        All ranks pass the same layers in the same order, but one of them may have needed the
        first ones earlier than the others: it sends those alone, and the others wait for the rest.

        Returns:
            list: The layers in groups that are the same on all ranks.
        """
        with self._recorded() as sent:
            fetched = self._fetch([layer.values for layer in layers])
            messages = [
                torch.cat([values.new_full((1,), layer.count), values.reshape(-1)])
                for layer, values in zip(layers, fetched)
            ]
            combined: List[List[CombinedStatistics]] = []
            done = 0
            while done < len(layers):
                rows = self._gather_agreed(messages[done:], sent)
                following = layers[done : done + len(rows)]
                combined.append([self._combine(*pair) for pair in zip(rows, following)])
                done += len(rows)
            return combined

    def _gather_agreed(self, messages: List[Tensor], sent: List[float]) -> List[Tensor]:
        """Gather the messages of as many layers as every rank has, one row for each rank."""
        if not self.runs_graph:
            return [self._gather(messages[0], sent)]
        first = torch.cat([messages[0].new_full((1,), len(messages)), messages[0]])
        rows = self._gather(first, sent)
        gathered, agreed = [rows[:, 1:]], int(rows[:, 0].min().item())
        if agreed > 1:
            rest = messages[1:agreed]
            rows = self._gather(torch.cat(rest), sent)
            gathered += rows.split([message.numel() for message in rest], dim=1)
        return gathered

    def _gather(self, message: Tensor, sent: List[float]) -> Tensor:
        rows = message.new_empty(self.world_size, message.numel())
        torch_dist.all_gather(list(rows.unbind()), message, group=self.group)
        sent.append(message.numel() * message.element_size() * (self.world_size - 1))
        return rows

    def _combine(self, rows: Tensor, layer: LocalStatistics) -> CombinedStatistics:
        statistics = rows[:, 1:].reshape(self.world_size, 2, -1)
        mean, squares = combine_statistics(rows[:, :1], statistics[:, 0], statistics[:, 1])
        total = int(rows[:, 0].sum().item())
        invstd = (squares / max(total, 1) + layer.eps).rsqrt()
        combined = torch.stack([mean, invstd, squares / max(total - 1, 1)])
        (sent,) = self._send([combined])
        # PyTorch's lazy device returns tensors of the CPU from unbind() and split().
        return CombinedStatistics(sent[0], sent[1], sent[2], total)

    def average(
        self, layers: Sequence[Optional[Tensor]], means: Sequence[Tensor], totals: Sequence[int]
    ) -> List[Optional[Tensor]]:
        """Add up sums of layers over all ranks, and divide each by the layer's total.

        The sums have shape (2, C), and ``means`` shape (C,). ``layers`` has None for a layer that
        has no sums on this rank, the result for one that has none on any rank.
        """
        sums = [
            mean.new_zeros(2, mean.numel()) if local is None else local
            for local, mean in zip(layers, means)
        ]
        with self._recorded() as sent:
            averages = [part / total for part, total in zip(self._fetch(sums), totals)]
            message, together = averages[0], len(layers) > 1
            if together:
                found = [float(local is not None) for local in layers]
                parts = [part.reshape(-1) for part in averages]
                message = torch.cat([message.new_tensor(found), *parts])
            torch_dist.all_reduce(message, group=self.group)
            size = message.numel() * message.element_size()
            sent.append(all_reduce_bytes(size, self.world_size))
            if not together:
                return [*self._send([message])]
            counts, *parts = message.split([len(layers), *(part.numel() for part in averages)])
            wanted = [i for i, count in enumerate(counts.tolist()) if count > 0]
            sent_back = self._send([parts[i].view_as(averages[i]) for i in wanted])
            by_layer = dict(zip(wanted, sent_back))
            return [by_layer.get(i) for i in range(len(layers))]

    def _fetch(self, tensors: List[Tensor]) -> List[Tensor]:
        if not self.runs_graph:
            return tensors
        self.accelerator.materialize(self.device, tensors)
        return self.accelerator.to_host(tensors)

    def _send(self, tensors: List[Tensor]) -> List[Tensor]:
        if not self.runs_graph:
            return tensors
        sent = [torch.empty_like(tensor, device=self.device) for tensor in tensors]
        self.accelerator.copy_to_device(tensors, sent)
        return sent

    @contextmanager
    def _recorded(self) -> Iterator[List[float]]:
        """Yield a list for the bytes of each message, and record what they cost."""
        start, sent = time.perf_counter(), []  # type: Tuple[float, List[float]]
        yield sent
        seconds = time.perf_counter() - start
        costs = dict(sent=sum(sent), seconds=seconds, waited=seconds)
        TRAFFIC.record('sync_bn', messages=len(sent), **costs)
        if self.runs_graph:
            LAZY_EXCHANGES.messages += 1
            LAZY_EXCHANGES.seconds += seconds


def local_statistics(inputs: Tensor, eps: float) -> LocalStatistics:
    """Compute the statistics of a batch; those of an empty one are zeros."""
    dtype = torch.float32 if inputs.dtype in HALF else inputs.dtype
    channels = inputs.shape[1]
    count = inputs.numel() // max(channels, 1)
    if count == 0:
        zeros = torch.zeros(2, channels, dtype=dtype, device=inputs.device)
        return LocalStatistics(zeros, 0, eps)
    values = inputs.detach().to(dtype)
    dims = all_but_channels(inputs)
    mean = values.mean(dims)
    deviations = values - per_channel(mean, inputs)
    squares = (deviations * deviations).sum(dims)
    return LocalStatistics(torch.stack([mean, squares]), count, eps)


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


def statistics_group(process_group: Any) -> Any:
    """The group that averages a layer's statistics; None if it has one rank."""
    if not (torch_dist.is_available() and torch_dist.is_initialized()):
        return None
    if process_group is None:
        process_group, context = torch_dist.group.WORLD, device_context()
        if context is not None:
            process_group = context.side_groups.get(process_group, process_group)
    return process_group if torch_dist.get_world_size(process_group) > 1 else None


def all_but_channels(inputs: Tensor) -> Tuple[int, ...]:
    """The dimensions that statistics are computed over."""
    return (0, *range(2, inputs.dim()))


def per_channel(values: Tensor, inputs: Tensor) -> Tensor:
    """Give one value per channel a shape that broadcasts against the inputs'."""
    return values.view(1, -1, *[1] * (inputs.dim() - 2))

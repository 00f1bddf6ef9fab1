"""Synchronize batch normalization over ranks on any device.

PyTorch's own works on a few types of devices. This one computes with ordinary operations, and its
statistics travel through the host where the backend does not take the device's tensors.
"""

from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from mmdevplug.accelerators import Accelerator, rank_context
from mmdevplug.errors import ModelError
from mmdevplug.utils.annotations import AnyGroup

from .normalize import SynchronizedNormalize
from .statistics_exchange import StatisticsExchange, local_statistics, statistics_group


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

    #: Set by PyTorch, for a layer that normalizes by statistics of its own.
    running_mean: Any
    running_var: Any
    num_batches_tracked: Any

    def __init__(self, *args: Any, process_group: AnyGroup = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a batch."""
        group = statistics_group(self.process_group) if self.training else None
        if group is None:
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)
        accelerator = self.accelerator or rank_context().accelerator
        exchange = StatisticsExchange(accelerator, group, input.device)
        exchange.layer_name = self.layer_name
        with torch.no_grad():
            statistics = exchange.combine(*local_statistics(input), self.eps)
            self._check_total(statistics.total)
            if self.track_running_stats:
                self._update_running(statistics.mean, statistics.unbiased, statistics.total)
        return SynchronizedNormalize.apply(input, self.weight, self.bias, statistics, exchange)

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
                f'Increase train_dataloader.batch_size, set train_dataloader.drop_last=True, or '
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

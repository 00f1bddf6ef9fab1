"""PyTorch's distributed sampler over the vendor's process group."""

import torch.utils.data

import torch_gcu.distributed as dist


class DistributedSampler(torch.utils.data.DistributedSampler):
    """Draws a rank's samples. Without ``num_replicas`` and ``rank`` it needs a group of eccl."""

    def __init__(
        self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)

    def set_epoch(self, epoch):
        super().set_epoch(epoch)

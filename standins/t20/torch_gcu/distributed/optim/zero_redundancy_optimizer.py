"""An optimizer that shards its state over a group of eccl, which cannot be had."""

from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from ..distributed_c10d import _get_default_group


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Takes the vendor's arguments; then there is no group."""

    def __init__(
        self,
        params,
        optimizer_class,
        process_group=None,
        parameters_as_bucket_view=False,
        overlap_with_ddp=False,
        **defaults,
    ):
        self.process_group = process_group or _get_default_group()
        raise NotImplementedError('the stand-in has no ProcessGroupECCL')

    def add_param_group(self, param_group):
        raise NotImplementedError

    def consolidate_state_dict(self, to=0):
        raise NotImplementedError

    def partition_parameters(self):
        raise NotImplementedError

    def step(self, closure=None, **kwargs):
        raise NotImplementedError

    def join_hook(self, **kwargs):
        raise NotImplementedError

    @property
    def join_device(self):
        raise NotImplementedError

    @property
    def join_process_group(self):
        raise NotImplementedError

    def load_state_dict(self, state_dict):
        raise NotImplementedError

    def state_dict(self):
        raise NotImplementedError

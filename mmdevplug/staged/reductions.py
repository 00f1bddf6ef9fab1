"""The collectives of a staged group that compute: sums, averages, minima."""

from typing import Any, Callable, List, Optional, Sequence, Union

import torch
from torch import Tensor, distributed as torch_dist
from torch.distributed import ReduceOp, distributed_c10d as c10d

from .group_base import GroupBase, Parts, tensors_in
from .host_buffers import (
    HALVES,
    HostBuffers,
    averaged,
    combine,
    copy_from_device,
    is_average,
    scale,
    summand,
)
from .shared_sum import SharedSum
from .work import StagedWork


class HostSum:
    """A sum or average in memory of the caller on the host, as a :class:`.shared_sum.SharedSum`.

    Attributes:
        own (Tensor): The values, flat.
        finite (bool): Whether an average has no NaN and no infinity, the same on all ranks.
    """

    def __init__(self, own: Tensor, gloo: 'torch_dist.ProcessGroupGloo', size: int) -> None:
        self.own, self.finite = own, True
        self._gloo: Any = gloo
        self._size = size
        self._average = False

    def start(self, average: bool) -> None:
        """Begin to add up what the ranks have written."""
        self._average = average
        self._summed = summand(self.own)
        self._work = self._gloo.allreduce([self._summed], torch_dist.AllreduceOptions())
        self._gloo = None  # the program may keep this sum longer than the group

    def wait(self, timeout: object = None) -> bool:
        """Wait until the sum may be read."""
        self._work.wait()
        if self._average:
            self._average, self.finite = False, scale(self._summed, 1 / self._size)
        if self._summed is not self.own:
            self.own.copy_(self._summed)
        return True

    def read(self, start: int, stop: int) -> Tensor:
        """The sum from one element to another."""
        return self.own[start:stop]

    def close(self) -> None:
        """The memory is the caller's."""


class Reductions(GroupBase):
    """Sums of 1 MB and more are added up in memory that the ranks of a host share."""

    def allreduce(
        self, tensors: List[Tensor], opts: Optional['c10d.AllreduceOptions'] = None
    ) -> StagedWork:
        """See :func:`torch.distributed.all_reduce`."""
        return self._all_reduce('all_reduce', tensors, opts)

    def allreduce_coalesced(
        self, tensors: List[Tensor], opts: Optional['c10d.AllreduceCoalescedOptions'] = None
    ) -> StagedWork:
        """Reduce several tensors, of any types, in one call."""
        return self._all_reduce('all_reduce_coalesced', tensors, opts)

    def _all_reduce(self, name: str, tensors: List[Tensor], opts: Any) -> StagedWork:
        op = ReduceOp.SUM if opts is None else opts.reduceOp

        def start(buffers: HostBuffers) -> List[Any]:
            return [self._reduce(buffers, tensor, op) for tensor in tensors]

        return self._run(name, tensors, tensors, start, op)

    def reduce(self, tensors: List[Tensor], opts: 'c10d.ReduceOptions') -> StagedWork:
        """See :func:`torch.distributed.reduce`; other ranks than the root keep their values."""

        def start(buffers: HostBuffers) -> List[Any]:
            if self.rank() == opts.rootRank:
                return [self._reduce(buffers, tensors[0], opts.reduceOp, opts.rootRank)]
            # Not in place: gloo leaves intermediate results there.
            copy = buffers.read(tensors[0]).clone()
            return [self._reduce(HostBuffers(), copy, opts.reduceOp, opts.rootRank)]

        return self._run('reduce', tensors, tensors, start, opts.reduceOp)

    def _reduce(
        self, buffers: HostBuffers, tensor: Tensor, op: ReduceOp, root: Optional[int] = None
    ) -> Any:
        """Begin to reduce one tensor, on all ranks or on one."""
        if tensor.is_sparse:
            return self._reduce_sparse(buffers, tensor, op)
        average = is_average(op)
        if root is None and (average or op == ReduceOp.SUM):
            shared = self.large.begin(tensor.numel(), tensor.dtype, tensor.device.type)
            if shared is not None:
                self._start_shared(buffers, shared, tensor, average)
                return shared
        flat = buffers.change(tensor)
        if root is None:
            call, options = self._gloo.allreduce, torch_dist.AllreduceOptions()
        else:
            call, options = self._gloo.reduce, torch_dist.ReduceOptions()
            options.rootRank = root
        options.reduceOp = ReduceOp.SUM if average else op

        def begin() -> Any:
            summed = summand(flat)
            # The sum of halves may be larger than they can be.
            divided = average and summed.dtype in HALVES
            summed = averaged(summed, self.size()) if divided else summed

            def finish() -> None:
                if average and not divided:
                    flat.copy_(averaged(summed, self.size()))
                elif summed is not flat:
                    flat.copy_(summed)

            buffers.before_copying(finish)
            return call([summed], options)

        return self._when_copied(buffers, begin)

    def _reduce_sparse(self, buffers: HostBuffers, tensor: Tensor, op: ReduceOp) -> Any:
        """Begin to add up a sparse tensor, of which each rank stores other elements."""
        # Not detached: gloo and PyTorch 1.10 replace indices and values of these objects.
        here = tensor.cpu().clone()
        options = torch_dist.AllreduceOptions()
        options.reduceOp = ReduceOp.SUM if is_average(op) else op
        work = self._gloo.allreduce([here], options)

        def finish() -> None:
            tensor.copy_(here / self.size() if is_average(op) else here)

        buffers.before_copying(finish)
        return work

    def average(self, tensor: Tensor, keeps_nonfinite: bool = False) -> StagedWork:
        """Average a floating-point tensor of all ranks.

        ``finite`` of the work says whether the result has neither NaN nor infinity, the same on
        all ranks. If it has one, ``keeps_nonfinite`` leaves each rank its own values.
        """

        def start(buffers: HostBuffers) -> List[Any]:
            shared = self.large.begin(tensor.numel(), tensor.dtype, tensor.device.type)
            if shared is not None:
                self._start_shared(buffers, shared, tensor, True, keeps_nonfinite)
                return [shared]
            read = buffers.read(tensor, later=True)

            def begin() -> Any:
                flat = summand(read)
                flat = flat.clone() if flat.data_ptr() == tensor.data_ptr() else flat
                divided = flat.dtype in HALVES
                if divided:
                    scale(flat, 1 / self.size())

                def finish() -> None:
                    buffers.finite = scale(flat, 1.0 if divided else 1 / self.size())
                    if buffers.finite or not keeps_nonfinite:
                        tensor.detach().copy_(flat.view(tensor.shape))

                buffers.before_copying(finish)
                return self._gloo.allreduce([flat], torch_dist.AllreduceOptions())

            return [self._when_copied(buffers, begin)]

        return self._run('average', [tensor], [tensor], start)

    def begin_sum(
        self, numel: int, dtype: torch.dtype, device_type: str, room: Callable[[], Tensor]
    ) -> Union[SharedSum, HostSum]:
        """Open a sum whose memory the caller fills and reads, see :class:`SharedSum`.

        It is ``room()`` where the ranks do not share memory.
        """
        self._check_process('begin_sum')
        self._begin_deferred()
        shared = self.large.begin(numel, dtype, device_type)
        return HostSum(room(), self._gloo, self.size()) if shared is None else shared

    def make_room(self, size: int, device_type: str) -> None:
        """Share memory for ``size`` bytes of sums that are open at a time."""
        self.large.make_room(size, device_type)

    def _start_shared(
        self,
        buffers: HostBuffers,
        shared: SharedSum,
        tensor: Tensor,
        average: bool,
        keeps: bool = False,
    ) -> None:
        copy_from_device(tensor.detach(), shared.own)
        shared.start(average)

        def finish() -> None:
            buffers.finite = shared.finite
            if shared.finite or not keeps:
                shared.copy_to(tensor.detach())
            shared.close()

        buffers.before_copying(finish)

    def reduce_scatter(
        self,
        outputs: List[Tensor],
        inputs: List[List[Tensor]],
        opts: Optional['c10d.ReduceScatterOptions'] = None,
    ) -> StagedWork:
        """See :func:`torch.distributed.reduce_scatter`."""
        return self._scatter_sums('reduce_scatter', outputs, inputs, opts)

    def _reduce_scatter_base(
        self, output: Tensor, source: Tensor, opts: Optional['c10d.ReduceScatterOptions'] = None
    ) -> StagedWork:
        """See :func:`torch.distributed.reduce_scatter_tensor`."""
        return self._scatter_sums('reduce_scatter_tensor', [output], [source], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self,
        outputs: List[Tensor],
        inputs: List[Tensor],
        opts: Optional['c10d.ReduceScatterOptions'] = None,
    ) -> StagedWork:
        """Reduce and scatter several tensors in one call."""
        return self._scatter_sums('reduce_scatter_tensor_coalesced', outputs, inputs, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _scatter_sums(
        self,
        name: str,
        outputs: List[Tensor],
        inputs: Sequence[Parts],
        opts: Optional['c10d.ReduceScatterOptions'],
    ) -> StagedWork:
        # Gloo has no such collective in most releases. Each rank sends the others their parts and
        # adds up its own in the order of the ranks: a share of the bytes of all_reduce().
        op = ReduceOp.SUM if opts is None else opts.reduceOp

        def start(buffers: HostBuffers) -> List[Any]:
            return [self._scatter_sum(buffers, *pair, op) for pair in zip(outputs, inputs)]

        return self._run(name, [*outputs, *tensors_in(inputs)], outputs, start, op)

    def _scatter_sum(
        self, buffers: HostBuffers, output: Tensor, parts: Parts, op: ReduceOp
    ) -> Any:
        source, sizes = self._sources(buffers, parts)
        result = buffers.write(output)
        found = source.new_empty(self.size() * output.numel())
        work = self._exchange(found, source, [output.numel()] * self.size(), sizes)
        rows = found.view(self.size(), output.numel())
        buffers.before_copying(lambda: result.copy_(combine(list(rows), op)))
        return work

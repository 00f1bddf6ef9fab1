"""The collectives of a staged group that compute: sums, averages, minima."""

from typing import TYPE_CHECKING, List, Optional, Sequence, Union

import torch
from torch import Tensor, distributed as torch_dist
from torch.distributed import ReduceOp, distributed_c10d as c10d

from .group_base import GroupBase, Parts
from .host_buffers import HALVES, SUM, HostBuffers, averaged, combine, is_average, scale, summand
from .work import Beginning, StagedWork, Work, overlap, tensors_in

if TYPE_CHECKING:
    from .shared_sum import SharedSum, SharedSums

#: Of fewer bytes, the message takes less time than waiting for the others in shared memory.
LEAST_BYTES = 1 << 20
_SHARED_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def keeping_nan(values: Tensor, result: Tensor, op: ReduceOp, buffers: HostBuffers) -> Tensor:
    """Return what gloo reduces in place of values, of which it loses NaN of some ranks.

    Infinity stands for NaN, and a flag beside each value says so.
    """
    sign = 1 if op == ReduceOp.MAX else -1
    flat = values.reshape(-1)
    missing = torch.isnan(flat)
    both = torch.cat([flat.masked_fill(missing, -sign * float('inf')), sign * missing.to(flat)])

    def finish() -> None:
        reduced, flags = both.chunk(2)
        result.copy_(reduced.masked_fill(flags != 0, float('nan')).view_as(result))

    buffers.due.append(finish)
    return both


class Reductions(GroupBase):
    """Large sums are added up in memory that the ranks of a host share, see :mod:`.large_sums`."""

    def allreduce(
        self,
        tensors: List[Tensor],
        opts: Optional['c10d.AllreduceOptions'] = None,
        name: str = 'all_reduce',
    ) -> StagedWork:
        """See :func:`torch.distributed.all_reduce`."""
        op = SUM if opts is None else opts.reduceOp
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors  # as C++ takes it, too

        def start(buffers: HostBuffers) -> List[Beginning]:
            begins = []
            for place, tensor in enumerate(tensors):
                # A tensor that is there twice is added up once, as by gloo.
                twice = place and overlap([tensor], tensors[:place])
                source = tensor.detach().clone() if twice else tensor
                begins.append(self._reduce(buffers, source, op))
                if twice:
                    buffers.written.append((tensor, source))
            return begins

        return self._run(name, tensors, tensors, start, op)

    def allreduce_coalesced(
        self, tensors: List[Tensor], opts: Optional['c10d.AllreduceCoalescedOptions'] = None
    ) -> StagedWork:
        """Reduce several tensors, of any types, in one call."""
        return self.allreduce(tensors, opts, 'all_reduce_coalesced')

    def reduce(self, tensors: List[Tensor], opts: 'c10d.ReduceOptions') -> StagedWork:
        """See :func:`torch.distributed.reduce`; other ranks than the root keep their values."""

        def start(buffers: HostBuffers) -> List[Beginning]:
            if self._rank == opts.rootRank:
                return [self._reduce(buffers, tensors[0], opts.reduceOp, opts.rootRank)]
            # Not in place: gloo leaves intermediate results there.
            copy = buffers.read(tensors[0]).clone()
            return [self._reduce(HostBuffers(), copy, opts.reduceOp, opts.rootRank)]

        return self._run('reduce', tensors, tensors, start, opts.reduceOp)

    def _shared_sums(self, tensor: Tensor) -> Optional['SharedSums']:
        """Where ranks add up a tensor in shared memory; None on all ranks where they do not."""
        size = tensor.numel() * tensor.element_size()
        if not size or size < LEAST_BYTES or tensor.dtype not in _SHARED_DTYPES:
            return None
        if self._sums_are_due:
            from .large_sums import share_sums

            self._sums_are_due = False
            self.sums = share_sums(self, tensor.device.type)
        return self.sums

    def _reduce(
        self, buffers: HostBuffers, tensor: Tensor, op: ReduceOp, root: Optional[int] = None
    ) -> Beginning:
        """Begin to reduce one tensor, on all ranks or on one."""
        if tensor.is_sparse:
            return self._reduce_sparse(buffers, tensor, op)
        average = is_average(op)
        if root is None and (average or op == SUM):
            sums = self._shared_sums(tensor)
            if sums is not None:
                return self._start_shared(buffers, sums, tensor, average)
        flat = buffers.change(tensor)
        options: Union[torch_dist.AllreduceOptions, torch_dist.ReduceOptions]
        if root is None:
            call, options = self.gloo.allreduce, torch_dist.AllreduceOptions()
        else:
            call, options = self.gloo.reduce, torch_dist.ReduceOptions()
            options.rootRank = root
        options.reduceOp = SUM if average else op

        def begin() -> Work:
            summed = summand(flat)
            extreme = op == ReduceOp.MAX or op == ReduceOp.MIN
            if extreme and summed.is_floating_point():
                return call([keeping_nan(summed, flat, op, buffers)], options)
            # The sum of halves may be larger than they can be.
            divided = average and summed.dtype in HALVES
            summed = averaged(summed, self._size) if divided else summed
            if average and not divided:
                buffers.due.append(lambda: flat.copy_(averaged(summed, self._size)))
            elif summed is not flat:
                buffers.due.append(lambda: flat.copy_(summed))
            return call([summed], options)

        return begin

    def _reduce_sparse(self, buffers: HostBuffers, tensor: Tensor, op: ReduceOp) -> Work:
        """Begin to add up a sparse tensor, of which each rank stores other elements."""
        average = is_average(op)
        options = torch_dist.AllreduceOptions()
        options.reduceOp = SUM if average else op
        with torch.no_grad():
            # Not detached: gloo and PyTorch 1.10 replace indices and values of these objects.
            here = tensor.cpu().clone()
            work = self.gloo.allreduce([here], options)
        buffers.due.append(lambda: tensor.copy_(here / self._size if average else here))
        return work

    def average(self, tensor: Tensor, keeps_nonfinite: bool = False) -> StagedWork:
        """Average a floating-point tensor of all ranks.

        ``finite`` of the work says whether the result has neither NaN nor infinity, the same on
        all ranks. If it has one, ``keeps_nonfinite`` leaves each rank its own values, of a tensor
        in shared memory those of the piece.
        """

        def start(buffers: HostBuffers) -> List[Beginning]:
            sums = self._shared_sums(tensor)
            if sums is not None:
                return [self._start_shared(buffers, sums, tensor, True, keeps_nonfinite)]
            read = buffers.read(tensor, later=True)

            def begin() -> Work:
                flat = summand(read)
                flat = flat.clone() if flat.data_ptr() == tensor.data_ptr() else flat
                divided = flat.dtype in HALVES
                if divided:
                    scale(flat, 1 / self._size)

                def finish() -> None:
                    buffers.finite = scale(flat, 1.0 if divided else 1 / self._size)
                    if buffers.finite or not keeps_nonfinite:
                        buffers.written.append((tensor.detach(), flat))

                buffers.due.append(finish)
                return self.gloo.allreduce([flat], torch_dist.AllreduceOptions())

            return [begin]

        return self._run('average', [tensor], [tensor], start)

    def _start_shared(
        self, buffers: HostBuffers, sums: 'SharedSums', tensor: Tensor, *how: bool
    ) -> 'SharedSum':
        """Add up pieces of the tensor itself, or of its copy on the host."""
        shared = sums.begin(buffers.share(tensor), *how)

        def finish() -> None:
            buffers.finite = shared.finite

        buffers.due.append(finish)
        return shared

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
        op = SUM if opts is None else opts.reduceOp

        def start(buffers: HostBuffers) -> List[Beginning]:
            return [self._scatter_sum(buffers, *pair, op) for pair in zip(outputs, inputs)]

        return self._run(name, [*outputs, *tensors_in(inputs)], outputs, start, op)

    def _scatter_sum(
        self, buffers: HostBuffers, output: Tensor, parts: Parts, op: ReduceOp
    ) -> Work:
        source, sizes = self._sources(buffers, parts)
        result = buffers.write(output)
        found = source.new_empty(self._size * output.numel())
        work = self._exchange(found, source, [output.numel()] * self._size, sizes)
        rows = found.view(self._size, output.numel())
        buffers.due.append(lambda: result.copy_(combine(list(rows), op)))
        return work

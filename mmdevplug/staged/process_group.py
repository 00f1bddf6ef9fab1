"""The process group of the backend ``staged``."""

import os
import threading
from collections import deque
from datetime import timedelta
from typing import Any, Callable, Deque, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, distributed as torch_dist
from torch.distributed import ProcessGroup, ReduceOp, distributed_c10d as c10d

from mmdevplug.errors import StagedError, first_line
from mmdevplug.utils.torch_compat import is_at_least

from .host_buffers import (
    HALVES,
    HostBuffers,
    as_bytes,
    averaged,
    check_reduction,
    combine,
    copy_from_device,
    is_average,
    scale,
    summand,
)
from .host_sum import HostSum
from .large_sums import LargeSums
from .shared_sum import SharedSum
from .work import DeferredWork, StagedWork

NAME = 'staged'
#: A tensor for each rank, or one for all.
Parts = Union[Tensor, Sequence[Tensor]]


def register() -> None:
    """Make ``staged`` a backend of torch.distributed; a second call does nothing."""
    if hasattr(torch_dist.Backend, NAME.upper()):
        return
    if not is_at_least('2.0'):
        torch_dist.Backend.register_backend(NAME, _create)
        return
    # The only type of device for which init_process_group() could choose this backend by itself
    # has gloo already: jobs that do not name it are as before.
    torch_dist.Backend.register_backend(NAME, _create, devices=['cpu'])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> 'StagedProcessGroup':
    if not getattr(c10d, '_GLOO_AVAILABLE', False):
        raise StagedError(
            f'the backend {NAME!r} moves tensors with gloo, which torch {torch.__version__} was '
            f'built without. Use the backend of the device, or another build of PyTorch.'
        )
    return StagedProcessGroup(store, rank, size, timeout)


#: PyTorch 1 calls groups from Python alone, and lets nothing inherit from its own.
_Base: Any = ProcessGroup if is_at_least('2.0') else object


class StagedProcessGroup(_Base):
    """Move tensors of any device between ranks: to the host, over gloo, and back.

    All ranks of a group call the same collectives in the same order, as of any backend. A
    collective has read its tensors when it returns, or when its work has been waited for if the
    device copies by itself; then its results are where they belong. Tensors of the host are not
    copied, but large sums: ``large.wanted`` says whether ranks of a host share memory for them.

    Args:
        store (Store): Where the ranks meet.
        rank (int): This process in the group.
        size (int): Processes in the group.
        timeout (timedelta): How long a collective waits for the other ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        if _Base is not object:
            super().__init__(rank, size)
        self._rank, self._size = rank, size
        gloo = torch_dist.ProcessGroupGloo(store, rank, size, timeout)
        debugs = getattr(torch_dist, 'get_debug_level', None)  # since PyTorch 1.11
        if debugs is not None and debugs() == torch_dist.DebugLevel.DETAIL:
            # Compares collectives and shapes of all ranks before each of them.
            gloo = c10d._create_process_group_wrapper(gloo, NAME, store, rank, size, timeout)
        # Not registered with the group of C++, which PyTorch's DDP may free last, holding the lock
        # of the interpreter: gloo would wait for its threads, and they for that lock.
        self._gloo = gloo
        self.large = LargeSums(gloo, store, rank, size, timeout)
        self._deferred: Deque[DeferredWork] = deque()
        self._deferring = threading.Lock()
        self._name = self._description = ''
        self._process = os.getpid()
        self._coalesced: Optional[List[StagedWork]] = None

    def rank(self) -> int:
        """This process in the group."""
        return self._rank

    def size(self) -> int:
        """Processes in the group."""
        return self._size

    def getBackendName(self) -> str:  # noqa: N802
        """See :class:`torch.distributed.ProcessGroup`."""
        return NAME

    def name(self) -> str:
        """See :class:`torch.distributed.ProcessGroup`."""
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        """The name by which PyTorch finds the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """See :meth:`getGroupName`."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """What the group is for."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """See :meth:`getGroupDesc`."""
        self._description = description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def _get_backend(self, device: Any) -> Any:
        """Gloo, whose timeout PyTorch sets and reads."""
        return self._gloo

    # Reductions ----------------------------------------------------------------------------------

    def allreduce(self, tensors: List[Tensor], opts: Any = None) -> StagedWork:
        """See :func:`torch.distributed.all_reduce`."""
        return self._all_reduce('all_reduce', tensors, opts)

    def allreduce_coalesced(self, tensors: List[Tensor], opts: Any = None) -> StagedWork:
        """Reduce several tensors, of any types, in one call."""
        return self._all_reduce('all_reduce_coalesced', tensors, opts)

    def _all_reduce(self, name: str, tensors: List[Tensor], opts: Any) -> StagedWork:
        op = ReduceOp.SUM if opts is None else opts.reduceOp

        def start(buffers: HostBuffers) -> List[Any]:
            return [self._reduce(buffers, tensor, op) for tensor in tensors]

        return self._run(name, tensors, tensors, start, op)

    def reduce(self, tensors: List[Tensor], opts: Any) -> StagedWork:
        """See :func:`torch.distributed.reduce`; other ranks than the root keep their values."""

        def start(buffers: HostBuffers) -> List[Any]:
            if self.rank() == opts.rootRank:
                return [self._reduce(buffers, tensors[0], opts.reduceOp, opts.rootRank)]
            # Not in place: gloo leaves intermediate results there.
            copy = buffers.read(tensors[0]).clone()
            return [self._reduce(HostBuffers(), copy, opts.reduceOp, opts.rootRank)]

        return self._run('reduce', tensors, tensors, start, opts.reduceOp)

    def _reduce(
        self, buffers: HostBuffers, tensor: Tensor, op: Any, root: Optional[int] = None
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

    def _when_copied(self, buffers: HostBuffers, begin: Callable[[], Any]) -> Any:
        """Begin a message when what it sends is on the host; until then the program goes on."""
        if not buffers.arrive_later:
            return begin()
        deferred = DeferredWork(buffers.wait_for_copies, begin, self._begin_deferred)
        self._deferred.append(deferred)
        # Other ranks need it, even if nothing here waits or calls another collective for long.
        threading.Thread(target=self._begin_deferred, name='staged', daemon=True).start()
        return deferred

    def _begin_deferred(self) -> None:
        """Begin messages that wait for copies, in their order: a later one is to begin."""
        with self._deferring:
            while self._deferred:
                self._deferred.popleft().begin()

    def _reduce_sparse(self, buffers: HostBuffers, tensor: Tensor, op: Any) -> Any:
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
        self, outputs: List[Tensor], inputs: List[List[Tensor]], opts: Any = None
    ) -> StagedWork:
        """See :func:`torch.distributed.reduce_scatter`."""
        return self._scatter_sums('reduce_scatter', outputs, inputs, opts)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> StagedWork:
        """See :func:`torch.distributed.reduce_scatter_tensor`."""
        return self._scatter_sums('reduce_scatter_tensor', [output], [source], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: List[Tensor], inputs: List[Tensor], opts: Any = None
    ) -> StagedWork:
        """Reduce and scatter several tensors in one call."""
        return self._scatter_sums('reduce_scatter_tensor_coalesced', outputs, inputs, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _scatter_sums(
        self, name: str, outputs: List[Tensor], inputs: Sequence[Parts], opts: Any
    ) -> StagedWork:
        # Gloo has no such collective in most releases. Each rank sends the others their parts and
        # adds up its own in the order of the ranks: a share of the bytes of all_reduce().
        op = ReduceOp.SUM if opts is None else opts.reduceOp

        def start(buffers: HostBuffers) -> List[Any]:
            return [self._scatter_sum(buffers, *pair, op) for pair in zip(outputs, inputs)]

        return self._run(name, [*outputs, *_tensors(inputs)], outputs, start, op)

    def _scatter_sum(self, buffers: HostBuffers, output: Tensor, parts: Parts, op: Any) -> Any:
        source, sizes = self._sources(buffers, parts)
        result = buffers.write(output)
        found = source.new_empty(self.size() * output.numel())
        work = self._exchange(found, source, [output.numel()] * self.size(), sizes)
        rows = found.view(self.size(), output.numel())
        buffers.before_copying(lambda: result.copy_(combine(list(rows), op)))
        return work

    # What is moved as it is ----------------------------------------------------------------------

    def broadcast(self, tensors: List[Tensor], opts: Any) -> StagedWork:
        """See :func:`torch.distributed.broadcast`."""

        def start(buffers: HostBuffers) -> List[Any]:
            is_root = self.rank() == opts.rootRank
            flats = [(buffers.read if is_root else buffers.write)(tensor) for tensor in tensors]
            return [self._gloo.broadcast([as_bytes(flat)], opts) for flat in flats]

        return self._run('broadcast', tensors, tensors, start)

    def allgather(
        self, outputs: List[List[Tensor]], inputs: List[Tensor], opts: Any = None
    ) -> StagedWork:
        """See :func:`torch.distributed.all_gather`."""
        return self._all_gather('all_gather', outputs, inputs, outputs)

    def allgather_coalesced(
        self, outputs: List[List[Tensor]], inputs: List[Tensor], opts: Any = None
    ) -> StagedWork:
        """Gather several tensors; ``outputs`` has a list for each rank."""
        by_tensor = [list(each) for each in zip(*outputs)]
        return self._all_gather('all_gather_coalesced', by_tensor, inputs, outputs)

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> StagedWork:
        """See :func:`torch.distributed.all_gather_into_tensor`."""
        return self._all_gather('all_gather_into_tensor', [output], [source], [output])

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: List[Tensor], inputs: List[Tensor], opts: Any = None
    ) -> StagedWork:
        """Gather several tensors, each into one."""
        return self._all_gather('all_gather_into_tensor_coalesced', outputs, inputs, outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _all_gather(
        self, name: str, outputs: Sequence[Parts], inputs: List[Tensor], results: List[Any]
    ) -> StagedWork:
        def start(buffers: HostBuffers) -> List[Any]:
            works = []
            for parts, source in zip(outputs, inputs):
                rooms = self._rooms(buffers, parts)
                flat = as_bytes(buffers.read(source))
                works.append(self._gloo.allgather([[as_bytes(room) for room in rooms]], [flat]))
            return works

        return self._run(name, [*inputs, *_tensors(outputs)], results, start)

    def gather(self, outputs: List[List[Tensor]], inputs: List[Tensor], opts: Any) -> StagedWork:
        """See :func:`torch.distributed.gather`."""

        def start(buffers: HostBuffers) -> List[Any]:
            rooms = [[as_bytes(buffers.write(each)) for each in parts] for parts in outputs]
            return [self._gloo.gather(rooms, [as_bytes(buffers.read(inputs[0]))], opts)]

        tensors = [*inputs, *(each for parts in outputs for each in parts)]
        return self._run('gather', tensors, outputs, start)

    def scatter(self, outputs: List[Tensor], inputs: List[List[Tensor]], opts: Any) -> StagedWork:
        """See :func:`torch.distributed.scatter`."""

        def start(buffers: HostBuffers) -> List[Any]:
            parts = [[as_bytes(buffers.read(each)) for each in parts] for parts in inputs]
            return [self._gloo.scatter([as_bytes(buffers.write(outputs[0]))], parts, opts)]

        tensors = [*outputs, *(each for parts in inputs for each in parts)]
        return self._run('scatter', tensors, outputs, start)

    def alltoall_base(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: List[int],
        input_splits: List[int],
        opts: Any = None,
    ) -> StagedWork:
        """See :func:`torch.distributed.all_to_all_single`; splits count rows."""

        def start(buffers: HostBuffers) -> List[Any]:
            room, flat = buffers.write(output), buffers.read(source)
            sizes = self._sizes(output, output_splits), self._sizes(source, input_splits)
            return [self._exchange(room, flat, *sizes)]

        return self._run('all_to_all_single', [output, source], [output], start)

    all_to_all_single = alltoall_base

    def alltoall(
        self, outputs: List[Tensor], inputs: List[Tensor], opts: Any = None
    ) -> StagedWork:
        """See :func:`torch.distributed.all_to_all`."""

        def start(buffers: HostBuffers) -> List[Any]:
            source, sizes = self._sources(buffers, inputs)
            rooms = self._rooms(buffers, outputs)
            found = source.new_empty(sum(room.numel() for room in rooms))
            parts = found.split([room.numel() for room in rooms])

            def finish() -> None:
                for room, part in zip(rooms, parts):
                    room.copy_(part)

            buffers.before_copying(finish)
            return [self._exchange(found, source, [len(room) for room in rooms], sizes)]

        return self._run('all_to_all', [*outputs, *inputs], outputs, start)

    def _exchange(
        self, found: Tensor, source: Tensor, found_sizes: List[int], source_sizes: List[int]
    ) -> Any:
        """Begin to send each rank its part of a flat tensor."""
        size = source.element_size()
        return self._gloo.alltoall_base(
            as_bytes(found),
            as_bytes(source),
            [count * size for count in found_sizes],
            [count * size for count in source_sizes],
            torch_dist.AllToAllOptions(),
        )

    # One rank to another -------------------------------------------------------------------------

    def send(self, tensors: List[Tensor], rank: int, tag: int = 0) -> StagedWork:
        """See :func:`torch.distributed.send`."""

        def start(buffers: HostBuffers) -> List[Any]:
            return [self._gloo.send([as_bytes(buffers.read(tensors[0]))], rank, tag)]

        return self._run(f'send to rank {rank}', tensors, tensors, start)

    def recv(self, tensors: List[Tensor], rank: int, tag: int = 0) -> StagedWork:
        """See :func:`torch.distributed.recv`."""

        def start(buffers: HostBuffers) -> List[Any]:
            return [self._gloo.recv([as_bytes(buffers.write(tensors[0]))], rank, tag)]

        return self._run(f'recv from rank {rank}', tensors, tensors, start)

    def recv_anysource(self, tensors: List[Tensor], tag: int = 0) -> StagedWork:
        """Receive from whoever sends first."""

        def start(buffers: HostBuffers) -> List[Any]:
            return [self._gloo.recv_anysource([as_bytes(buffers.write(tensors[0]))], tag)]

        return self._run('recv', tensors, tensors, start)

    # The group -----------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> StagedWork:
        """See :func:`torch.distributed.barrier`; waits on the host, whatever the device."""
        return self._run('barrier', [], [], lambda buffers: [self._gloo.barrier()])

    def monitored_barrier(
        self, timeout: Optional[timedelta] = None, wait_all_ranks: bool = False
    ) -> None:
        """See :func:`torch.distributed.monitored_barrier`."""
        limit = dict(timeout=timeout) if timeout else {}
        self._gloo.monitored_barrier(wait_all_ranks=wait_all_ranks, **limit)

    def _start_coalescing(self, device: Any) -> None:
        """Collect the works of the collectives until :meth:`_end_coalescing`."""
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> StagedWork:
        """Return one work for all that were collected."""
        works, self._coalesced = self._coalesced or [], None
        return StagedWork(works, lambda: None, [], 'coalesced collectives', None)

    def _run(
        self,
        name: str,
        tensors: Sequence[Tensor],
        results: List[Any],
        start: Callable[[HostBuffers], List[Any]],
        op: Any = None,
    ) -> StagedWork:
        """Begin a collective.

        Raises:
            StagedError: If the tensors do not go together, or gloo refuses them.
        """
        self._check_tensors(name, tensors)
        self._begin_deferred()
        buffers = HostBuffers()
        try:
            if op is not None:
                check_reduction(op)
            with torch.no_grad():
                works = start(buffers)
        except (RuntimeError, ValueError, TypeError) as error:
            raise StagedError(
                f'{self._describe(name, tensors)} cannot begin: {first_line(error)}'
            ) from error
        work = StagedWork(
            works,
            buffers.copy_back,
            results,
            self._describe(name, tensors),
            buffers,
        )
        for part in works:
            if isinstance(part, SharedSum):
                part.reclaim = work.wait
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _describe(self, name: str, tensors: Sequence[Tensor]) -> str:
        kinds = sorted({f'{list(each.shape)} {each.dtype} on {each.device}' for each in tensors})
        shown = ', '.join(kinds[:3]) + (', ...' if len(kinds) > 3 else '')
        return f'rank {self.rank()} of {self.size()}: {name}' + (f' of {shown}' if shown else '')

    def _check_process(self, name: str, tensors: Sequence[Tensor] = ()) -> None:
        if os.getpid() != self._process:
            raise StagedError(
                f'{self._describe(name, tensors)}: the process {os.getpid()} was forked from '
                f'{self._process}, whose group does not reach it. Make the group after the fork, '
                f'or start processes with the method "spawn".'
            )

    def _check_tensors(self, name: str, tensors: Sequence[Tensor]) -> None:
        self._check_process(name, tensors)
        devices = {str(tensor.device) for tensor in tensors}
        if len(devices) > 1:
            raise StagedError(
                f'{self._describe(name, tensors)}: expected tensors of one device, got '
                f'{", ".join(sorted(devices))}. Move them to one before the call.'
            )

    def _rooms(self, buffers: HostBuffers, parts: Parts) -> List[Tensor]:
        """Room for what each rank sends: a tensor for each, or one for all."""
        if isinstance(parts, Tensor):
            room = buffers.write(parts)
            return list(room.split(self._sizes(room)))
        self._check_count(parts)
        return [buffers.write(part) for part in parts]

    def _sources(self, buffers: HostBuffers, parts: Parts) -> Tuple[Tensor, List[int]]:
        """What each rank is sent, in one flat tensor, and its sizes."""
        if isinstance(parts, Tensor):
            flat = buffers.read(parts)
            return flat, self._sizes(flat)
        self._check_count(parts)
        flats = [buffers.read(part) for part in parts]
        return torch.cat(flats), [len(flat) for flat in flats]

    def _check_count(self, parts: Sequence[Tensor]) -> None:
        if len(parts) != self.size():
            raise ValueError(
                f'expected {self.size()} tensors, one for each rank, got {len(parts)}'
            )

    def _sizes(self, tensor: Tensor, splits: Sequence[int] = ()) -> List[int]:
        """The elements of each rank's rows."""
        rows = len(tensor)
        if not splits:
            if rows % self.size():
                raise ValueError(f'{rows} rows cannot be divided by {self.size()} ranks')
            splits = [rows // self.size()] * self.size()
        if sum(splits) != rows or len(splits) != self.size():
            raise ValueError(
                f'expected the rows of {self.size()} ranks, {rows} together, got {list(splits)}'
            )
        of_one = tensor.numel() // rows if rows else 0
        return [count * of_one for count in splits]


def _tensors(parts: Sequence[Parts]) -> List[Tensor]:
    return [tensor for part in parts for tensor in ([part] if isinstance(part, Tensor) else part)]


def _keep_from_tracing() -> None:
    """Let torch.compile call the methods, which backward may do inside of what it traces."""
    disable = getattr(torch, '_disable_dynamo', None)  # since PyTorch 2.1
    for name in _COLLECTIVES if disable is not None else ():
        setattr(StagedProcessGroup, name, disable(getattr(StagedProcessGroup, name)))


_COLLECTIVES = (
    *('allgather', '_allgather_base', 'allgather_coalesced', 'allgather_into_tensor_coalesced'),
    *('all_gather_single', 'all_gather_single_coalesced', 'allreduce', 'allreduce_coalesced'),
    *('alltoall', 'alltoall_base', 'all_to_all_single', 'average', 'barrier', 'broadcast'),
    *('gather', 'recv', 'recv_anysource', 'reduce', 'reduce_scatter', '_reduce_scatter_base'),
    *('reduce_scatter_single', 'reduce_scatter_single_coalesced'),
    *('reduce_scatter_tensor_coalesced', 'scatter', 'send'),
)
_keep_from_tracing()

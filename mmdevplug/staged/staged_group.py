"""The process group of the backend ``staged``."""

from datetime import timedelta
from typing import List, Optional, Sequence, Set

import torch
from torch import Tensor, distributed as torch_dist
from torch.distributed import distributed_c10d as c10d

from mmdevplug.errors import StagedError
from mmdevplug.utils.torch_compat import is_at_least

from .group_base import NAME, Parts
from .host_buffers import HostBuffers, as_bytes
from .reductions import Reductions
from .work import Beginning, Results, StagedWork, tensors_in


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
    # PyTorch's flight recorder, since 2.15, would look for a backend that C++ knows; gloo of the
    # group writes records by itself.
    recording: Set[str] = getattr(c10d, '_FR_SELF_RECORDING_BACKENDS', set())
    recording.add(NAME)


def _create(
    store: 'torch_dist.Store', rank: int, size: int, timeout: timedelta
) -> 'StagedProcessGroup':
    if not getattr(c10d, '_GLOO_AVAILABLE', False):
        raise StagedError(
            f'the backend {NAME!r} moves tensors with gloo, which torch {torch.__version__} was '
            f'built without. Use the backend of the device, or another build of PyTorch.'
        )
    return StagedProcessGroup(store, rank, size, timeout)


class StagedProcessGroup(Reductions):
    """Move tensors of any device between ranks: to the host, over gloo, and back.

    All ranks of a group call the same collectives in the same order, as of any backend. A
    collective has read its tensors when it returns, or when its work has been waited for if the
    device copies by itself; then its results are where they belong. Tensors of the host are not
    copied, but large sums, for which ranks of a host share memory.

    Args:
        store (Store): Where the ranks meet.
        rank (int): This process in the group.
        size (int): Processes in the group.
        timeout (timedelta): How long a collective waits for the other ranks.
    """

    # What is moved as it is ----------------------------------------------------------------------

    def broadcast(self, tensors: List[Tensor], opts: 'c10d.BroadcastOptions') -> StagedWork:
        """See :func:`torch.distributed.broadcast`."""

        def start(buffers: HostBuffers) -> List[Beginning]:
            place = buffers.read if self._rank == opts.rootRank else buffers.write
            return [self.gloo.broadcast([as_bytes(place(each))], opts) for each in tensors]

        return self._run('broadcast', tensors, tensors, start)

    def allgather(
        self,
        outputs: List[List[Tensor]],
        inputs: List[Tensor],
        opts: Optional['c10d.AllgatherOptions'] = None,
    ) -> StagedWork:
        """See :func:`torch.distributed.all_gather`."""
        return self._all_gather('all_gather', outputs, inputs, outputs)

    def allgather_coalesced(
        self,
        outputs: List[List[Tensor]],
        inputs: List[Tensor],
        opts: Optional['c10d.AllgatherOptions'] = None,
    ) -> StagedWork:
        """Gather several tensors; ``outputs`` has a list for each rank."""
        by_tensor = [list(each) for each in zip(*outputs)]
        return self._all_gather('all_gather_coalesced', by_tensor, inputs, outputs)

    def _allgather_base(
        self, output: Tensor, source: Tensor, opts: Optional['c10d.AllgatherOptions'] = None
    ) -> StagedWork:
        """See :func:`torch.distributed.all_gather_into_tensor`."""
        return self._all_gather('all_gather_into_tensor', [output], [source], [output])

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self,
        outputs: List[Tensor],
        inputs: List[Tensor],
        opts: Optional['c10d.AllgatherOptions'] = None,
    ) -> StagedWork:
        """Gather several tensors, each into one."""
        return self._all_gather('all_gather_into_tensor_coalesced', outputs, inputs, outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _all_gather(
        self, name: str, outputs: Sequence[Parts], inputs: List[Tensor], results: Results
    ) -> StagedWork:
        def start(buffers: HostBuffers) -> List[Beginning]:
            works = []
            for parts, source in zip(outputs, inputs):
                rooms = self._rooms(buffers, parts)
                flat = as_bytes(buffers.read(source))
                works.append(self.gloo.allgather([list(map(as_bytes, rooms))], [flat]))
            return works

        return self._run(name, [*inputs, *tensors_in(outputs)], results, start)

    def gather(
        self, outputs: List[List[Tensor]], inputs: List[Tensor], opts: 'c10d.GatherOptions'
    ) -> StagedWork:
        """See :func:`torch.distributed.gather`."""

        def start(buffers: HostBuffers) -> List[Beginning]:
            rooms = [[as_bytes(buffers.write(each)) for each in parts] for parts in outputs]
            return [self.gloo.gather(rooms, [as_bytes(buffers.read(inputs[0]))], opts)]

        return self._run('gather', [*inputs, *tensors_in(outputs)], outputs, start)

    def scatter(
        self, outputs: List[Tensor], inputs: List[List[Tensor]], opts: 'c10d.ScatterOptions'
    ) -> StagedWork:
        """See :func:`torch.distributed.scatter`."""

        def start(buffers: HostBuffers) -> List[Beginning]:
            parts = [[as_bytes(buffers.read(each)) for each in parts] for parts in inputs]
            return [self.gloo.scatter([as_bytes(buffers.write(outputs[0]))], parts, opts)]

        return self._run('scatter', [*outputs, *tensors_in(inputs)], outputs, start)

    def alltoall_base(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: List[int],
        input_splits: List[int],
        opts: Optional['c10d.AllToAllOptions'] = None,
    ) -> StagedWork:
        """See :func:`torch.distributed.all_to_all_single`; splits count rows."""

        def start(buffers: HostBuffers) -> List[Beginning]:
            room, flat = buffers.write(output), buffers.read(source)
            sizes = self._sizes(output, output_splits), self._sizes(source, input_splits)
            return [self._exchange(room, flat, *sizes)]

        return self._run('all_to_all_single', [output, source], [output], start)

    all_to_all_single = alltoall_base

    def alltoall(
        self,
        outputs: List[Tensor],
        inputs: List[Tensor],
        opts: Optional['c10d.AllToAllOptions'] = None,
    ) -> StagedWork:
        """See :func:`torch.distributed.all_to_all`."""

        def start(buffers: HostBuffers) -> List[Beginning]:
            source, sizes = self._sources(buffers, inputs)
            rooms = self._rooms(buffers, outputs)
            found = source.new_empty(sum(room.numel() for room in rooms))
            parts = found.split([room.numel() for room in rooms])

            def finish() -> None:
                for room, part in zip(rooms, parts):
                    room.copy_(part)

            buffers.due.append(finish)
            return [self._exchange(found, source, [len(room) for room in rooms], sizes)]

        return self._run('all_to_all', [*outputs, *inputs], outputs, start)

    # One rank to another -------------------------------------------------------------------------

    def send(self, tensors: List[Tensor], rank: int, tag: int = 0) -> StagedWork:
        """See :func:`torch.distributed.send`."""

        def start(buffers: HostBuffers) -> List[Beginning]:
            return [self.gloo.send([as_bytes(buffers.read(tensors[0]))], rank, tag)]

        return self._run(f'send to rank {rank}', tensors, tensors, start)

    def recv(self, tensors: List[Tensor], rank: int, tag: int = 0) -> StagedWork:
        """See :func:`torch.distributed.recv`."""

        def start(buffers: HostBuffers) -> List[Beginning]:
            return [self.gloo.recv([as_bytes(buffers.write(tensors[0]))], rank, tag)]

        return self._run(f'recv from rank {rank}', tensors, tensors, start)

    def recv_anysource(self, tensors: List[Tensor], tag: int = 0) -> StagedWork:
        """Receive from whoever sends first."""

        def start(buffers: HostBuffers) -> List[Beginning]:
            return [self.gloo.recv_anysource([as_bytes(buffers.write(tensors[0]))], tag)]

        return self._run('recv', tensors, tensors, start)

    # The group -----------------------------------------------------------------------------------

    def barrier(self, opts: Optional['c10d.BarrierOptions'] = None) -> StagedWork:
        """See :func:`torch.distributed.barrier`; waits on the host, whatever the device.

        What began before has its results then.
        """
        before = list(self.works.values())

        def start(buffers: HostBuffers) -> List[Beginning]:
            buffers.due.append(lambda: [work.wait() for work in before])
            return [self.gloo.barrier()]

        return self._run('barrier', [], [], start)

    def monitored_barrier(
        self, timeout: Optional[timedelta] = None, wait_all_ranks: bool = False
    ) -> None:
        """See :func:`torch.distributed.monitored_barrier`."""
        self._check_tensors('monitored_barrier', [])
        limit = {} if timeout is None else dict(timeout=timeout)
        self.gloo.monitored_barrier(wait_all_ranks=wait_all_ranks, **limit)


def _keep_from_tracing() -> None:
    """Let torch.compile call the methods, which backward may do inside of what it traces."""
    disable = getattr(torch, '_disable_dynamo', None)  # since PyTorch 2.1
    for name, method in [*vars(Reductions).items(), *vars(StagedProcessGroup).items()]:
        if disable is not None and (name[0] != '_' or name.endswith('_base')):
            setattr(StagedProcessGroup, name, disable(method))


_keep_from_tracing()

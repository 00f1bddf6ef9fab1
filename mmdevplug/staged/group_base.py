"""What all collectives of a staged group share: how they begin, and what is checked before."""

import atexit
import ctypes
import json
import os
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Any, Callable, Deque, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, distributed as torch_dist
from torch.distributed import ProcessGroup, distributed_c10d as c10d

from mmdevplug.errors import StagedError, first_line
from mmdevplug.utils.torch_compat import is_at_least

from .host_buffers import HostBuffers, as_bytes, check_reduction
from .large_sums import LargeSums
from .shared_memory import has_ended, host_name
from .work import SLICE, DeferredWork, OpenWorks, StagedWork, tensors_in

NAME = 'staged'
#: A tensor for each rank, or one for all.
Parts = Union[Tensor, Sequence[Tensor]]
#: PyTorch 1 calls groups from Python alone, and lets nothing inherit from its own.
_Base: Any = ProcessGroup if is_at_least('2.0') else object
#: Those of this process that may still have threads.
_GROUPS: 'weakref.WeakSet[GroupBase]' = weakref.WeakSet()
#: How long the end of the interpreter waits for collectives that never complete.
_END_SECONDS = 10.0
#: How long a rank whose collective timed out waits for others to say the same.
_OTHERS_SECONDS = 1.0


class GroupBase(_Base):
    """A group of gloo, the name by which PyTorch knows it, and how a collective begins."""

    def __init__(
        self, store: 'torch_dist.Store', rank: int, size: int, timeout: timedelta
    ) -> None:
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
        self._gloo: Any = gloo
        self._open = OpenWorks()
        self.large = LargeSums(gloo, store, rank, size, timeout, self._open.start_thread)
        self._store, self._limit = store, timeout
        store.set(f'staged/process/{rank}', json.dumps([host_name(), os.getpid()]))
        self._deferred: Deque[DeferredWork] = deque()
        self._deferring = threading.Lock()
        self._name = self._description = ''
        self._process = os.getpid()
        self._coalesced: Optional[List[StagedWork]] = None
        self._count = 0  # of collectives that have begun
        _GROUPS.add(self)
        atexit.unregister(end_all)
        atexit.register(end_all)

    def shutdown(self, limit: Optional[float] = None) -> None:
        """End what is under way and gloo's threads, within ``limit`` seconds or the group's.

        PyTorch's :func:`destroy_process_group` calls it, or Python's end. Until then a thread may
        hold tensors of the last collective. Freeing them takes the interpreter; a thread that
        finds it ending aborts the process ("terminate called without an active exception").
        Others keep this group longer than that: PyTorch's DDP does.
        """
        _GROUPS.discard(self)
        if os.getpid() != self._process or self._gloo is None:
            return  # gloo's threads are not in a process forked from it
        end = time.monotonic() + (self._limit.total_seconds() if limit is None else limit)
        with suppress(RuntimeError):
            self._begin_deferred()
        for work in list(self._open.works.values()):
            while work.end(SLICE) is not None and time.monotonic() < end:
                pass
        self.large.close()
        self._open.join()
        if self._open.works:
            # Other ranks are lost or late. Gloo's threads go on, with what they may free.
            for kept in (self._gloo, *self._open.works.values()):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        self._gloo = None

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

    def _get_backend(self, device: torch.device) -> Any:
        """Gloo, whose timeout PyTorch sets and reads."""
        return self._gloo

    def _run(
        self,
        name: str,
        tensors: Sequence[Tensor],
        results: List[Any],
        start: Callable[[HostBuffers], List[Any]],
        op: Optional['c10d.ReduceOp'] = None,
    ) -> StagedWork:
        """Begin a collective.

        Raises:
            StagedError: If the tensors do not go together, or gloo refuses them.
        """
        self._check_tensors(name, tensors)
        self._begin_deferred()
        self._count += 1
        between_two = name.startswith(('send', 'recv'))
        written = [] if name.startswith('send') else tensors_in(results)
        if self._open.works and not between_two:
            self._open.finish_completed()
            self._open.finish_before(tensors, written)
        buffers = HostBuffers()
        try:
            if op is not None:
                check_reduction(op)
            with torch.no_grad():
                works = start(buffers)
        except (RuntimeError, ValueError, TypeError) as error:
            told = f'{self._describe(name, tensors)} cannot begin: {self._explain(error)}'
            raise StagedError(told) from error
        described = self._describe(name, tensors)
        work = StagedWork(
            works,
            buffers.copy_back,
            results,
            lambda error: f'{described} failed: {self._explain(error)}',
            buffers,
            self._open,
            tracked=not between_two,
        )
        work.inference = work.inference or any(each.is_inference() for each in tensors)
        work.read, work.written = list(tensors), written
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _explain(self, error: BaseException) -> str:
        """What to say of an error, with the ranks that are gone or late as far as they show."""
        told, late = first_line(error), 'imed out' in str(error)
        if 'process' in told:  # in shared memory, where they are known
            return told
        others = [rank for rank in range(self._size) if rank != self._rank]
        with suppress(RuntimeError):  # the store may be gone with its rank
            prefix = f'staged/late/{self._count}'
            self._store.add(f'{prefix}/{self._rank}', 1)
            end = time.monotonic() + (_OTHERS_SECONDS if late else 0.0)
            while late and others and time.monotonic() < end:
                others = [each for each in others if not self._store.add(f'{prefix}/{each}', 0)]
                time.sleep(0.02)
            for rank in others:
                host, pid = json.loads(self._store.get(f'staged/process/{rank}'))
                if host == host_name() and has_ended(pid):
                    told += f'; rank {rank} (process {pid}) has ended'
                elif late:
                    told += f'; rank {rank} (process {pid}) did not wait for it'
        return told

    def _describe(self, name: str, tensors: Sequence[Tensor]) -> str:
        kinds = sorted({f'{list(each.shape)} {each.dtype} on {each.device}' for each in tensors})
        shown = ', '.join(kinds[:3]) + (', ...' if len(kinds) > 3 else '')
        return f'rank {self.rank()} of {self.size()}: {name}' + (f' of {shown}' if shown else '')

    def _check_tensors(self, name: str, tensors: Sequence[Tensor]) -> None:
        if os.getpid() != self._process:
            raise StagedError(
                f'{self._describe(name, tensors)}: the process {os.getpid()} was forked from '
                f'{self._process}, whose group does not reach it. Make the group after the fork, '
                f'or start processes with the method "spawn".'
            )
        if self._gloo is None:
            raise StagedError(
                f'{self._describe(name, tensors)}: the group has ended, with '
                f'destroy_process_group() or the program. Call it before, or start another group.'
            )
        devices = {str(tensor.device) for tensor in tensors}
        if len(devices) > 1:
            raise StagedError(
                f'{self._describe(name, tensors)}: expected tensors of one device, got '
                f'{", ".join(sorted(devices))}. Move them to one before the call.'
            )

    def _when_copied(self, buffers: HostBuffers, begin: Callable[[], Any]) -> Any:
        """Begin a message when what it sends is on the host; until then the program goes on."""
        if not buffers.arrive_later:
            return begin()
        deferred = DeferredWork(buffers.wait_for_copies, begin, self._begin_deferred)
        self._deferred.append(deferred)
        # Other ranks need it, even if nothing here waits or calls another collective for long.
        self._open.start_thread(self._begin_deferred)
        return deferred

    def _begin_deferred(self) -> None:
        """Begin messages that wait for copies, in their order: a later one is to begin."""
        with self._deferring:
            while self._deferred:
                self._deferred.popleft().begin()

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

    def _start_coalescing(self, device: torch.device) -> None:
        """Collect the works of the collectives until :meth:`_end_coalescing`."""
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> StagedWork:
        """Return one work for all that were collected."""
        works, self._coalesced = self._coalesced or [], None
        return StagedWork(works, lambda: None, [], first_line, None, self._open)

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


def end_all() -> None:
    """End the groups before the interpreter does, but do not wait for lost ranks for ever."""
    end = time.monotonic() + _END_SECONDS
    for group in list(_GROUPS):
        group.shutdown(max(0.0, end - time.monotonic()))

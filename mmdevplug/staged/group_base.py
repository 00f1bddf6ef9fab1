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
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Deque,
    Dict,
    List,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import torch
from torch import Tensor, distributed as torch_dist
from torch.distributed import ProcessGroup, distributed_c10d as c10d

from mmdevplug.errors import StagedError, first_line
from mmdevplug.utils.host import has_ended, host_name
from mmdevplug.utils.signals import start_thread
from mmdevplug.utils.torch_compat import is_at_least

from .host_buffers import HostBuffers, as_bytes, check_reduction
from .work import SLICE, Beginning, Results, StagedWork, Work, overlap

if TYPE_CHECKING:
    from .shared_sum import SharedSums

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

    #: Types of devices by which PyTorch's distributed checkpoints choose where to put a message:
    #: C++ knows none, as this object is the whole group.
    _device_types = (torch.device('cpu'),)

    def __init__(
        self, store: 'torch_dist.Store', rank: int, size: int, timeout: timedelta
    ) -> None:
        if _Base is not object:
            super().__init__(rank, size)
        self._rank, self._size, self.store, self.limit = rank, size, store, timeout
        # First: others ask for it as soon as this rank is connected.
        store.set(f'staged/process/{rank}', json.dumps([host_name(), os.getpid()]))
        gloo = connect(store, rank, size, timeout)
        debugs = getattr(torch_dist, 'get_debug_level', None)  # since PyTorch 1.11
        if debugs is not None and debugs() == torch_dist.DebugLevel.DETAIL:
            # Compares collectives and shapes of all ranks before each of them.
            gloo = c10d._create_process_group_wrapper(gloo, NAME, store, rank, size, timeout)
        # Not registered with the group of C++, which PyTorch's DDP may free last, holding the lock
        # of the interpreter: gloo would wait for its threads, and they for that lock.
        self.gloo: Any = gloo  # or its wrapper; None when the group has ended
        # From the first large sum on where ranks share memory.
        self.sums: Optional[SharedSums] = None
        self._sums_are_due = size > 1
        # Works that have not ended, and those that callers in C++ may still have. C++ has a half
        # of a work, which does nothing when its Python half is gone: PyTorch's reducer would wait
        # for ever for a work that Python has dropped (``DDP.join``).
        self.works: Dict[int, StagedWork] = {}
        self.dropped: Deque[StagedWork] = deque(maxlen=128)
        self._threads: Dict[threading.Thread, None] = {}
        self.ending = False
        self._deferred: Deque[StagedWork] = deque()
        self._deferring, self.future_lock = threading.Lock(), threading.Lock()
        self._name = self._description = ''
        self._process = os.getpid()
        self._coalesced: Optional[List[StagedWork]] = None
        self._count = 0  # of collectives that have begun; not of messages, which ranks choose
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
        if os.getpid() != self._process or self.gloo is None:
            return  # gloo's threads are not in a process forked from it
        end = time.monotonic() + (self.limit.total_seconds() if limit is None else limit)
        self.begin_deferred()
        for work in list(self.works.values()):
            while work.end(SLICE) is not None and time.monotonic() < end:
                pass
        if self.sums is not None:
            self.sums.close()
        self.ending = True  # for threads: one that comes back to an ended interpreter aborts it
        alive: List[threading.Thread] = []
        for closes in (False, True):
            if closes and alive and self._size > 1:
                # One waits for a message. A limit that passes closes the connections: it wakes.
                peer, none = (self._rank + 1) % self._size, torch.zeros(1, device='cpu')
                with suppress(RuntimeError):
                    self.gloo.recv([none], peer, 0x7FFFFFFF).wait(timedelta(milliseconds=1))
            end = time.monotonic() + 0.5
            for thread in list(self._threads):
                if thread is not threading.current_thread():
                    thread.join(max(0.0, end - time.monotonic()))
            alive = [thread for thread in list(self._threads) if thread.is_alive()]
        if self.works or alive:
            # Other ranks are lost or late. Gloo's threads go on, with what they may free.
            for kept in (self.gloo, *self.works.values(), *alive):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        self.gloo = None

    def rank(self) -> int:
        """This process in the group."""
        return self._rank

    def size(self) -> int:
        """Processes in the group."""
        return self._size

    def getBackendName(self) -> str:  # noqa: N802
        """See :class:`torch.distributed.ProcessGroup`."""
        return NAME

    name = getBackendName

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

    def _get_backend(self, device: torch.device) -> object:
        """Gloo, whose timeout PyTorch sets and reads."""
        return self.gloo

    def _run(
        self,
        name: str,
        tensors: Sequence[Tensor],
        results: Results,
        start: Callable[[HostBuffers], Sequence[Beginning]],
        op: Optional['c10d.ReduceOp'] = None,
    ) -> StagedWork:
        """Begin a collective.

        Raises:
            StagedError: If the tensors do not go together, or gloo refuses them.
        """
        self._check_tensors(name, tensors)
        if self._deferred:
            self.begin_deferred()
        work = StagedWork(self, name, tensors, results)
        if work.tracked:
            if self.works:
                self._finish_before(tensors, work.written)
            self._count += 1
            work.number = self._count
        try:
            if op is not None:
                check_reduction(op)
            work.begins = start(work.buffers)
            if not work.buffers.copied:
                work.begin()
        except (RuntimeError, ValueError, TypeError) as error:
            told = f'{self.describe(name, tensors)} cannot begin: {self.explain(error)}'
            raise StagedError(told) from error
        if work.begins:
            # Other ranks need it, even if nothing here waits or calls another collective for long.
            self._deferred.append(work)
            self.start_thread(self.begin_deferred)
        if work.tracked:  # not before: who finds it here begins what is deferred
            self.works[id(work)] = work
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _finish_before(self, tensors: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Finish works that write any of these tensors, or read one that is to be written.

        The first ones that have ended are finished, too, as nobody may wait for them.
        """
        completed = True
        for work in list(self.works.values()):
            completed = completed and work.is_completed()
            if not completed and (overlap(tensors, work.written) or overlap(written, work.read)):
                work.wait()

    def start_thread(self, target: Callable[[], None]) -> bool:
        """Start a thread that :meth:`shutdown` ends; not while Python ends."""
        for thread in list(self._threads):  # others are started at the same time
            if not thread.is_alive():
                self._threads.pop(thread, None)
        # A daemon, so that a rank whose peers are lost ends with its main thread.
        try:
            thread = start_thread(target, 'staged')
        except RuntimeError:  # "can't create new thread at interpreter shutdown"
            return False
        self._threads[thread] = None
        return True

    def begin_deferred(self) -> None:
        """Begin works that wait for copies, in their order: a later one is to begin."""
        with self._deferring:
            while self._deferred:
                work = self._deferred[0]
                try:
                    work.begin()
                except BaseException as error:  # an interrupt, too: it has not begun
                    work.refused = error
                    if not isinstance(error, Exception):
                        raise
                finally:
                    # Not before: who finds none here goes on with the next message.
                    self._deferred.popleft()

    def explain(self, error: BaseException, number: int = 0) -> str:
        """What to say of an error, with the ranks that are gone or late as far as they show.

        ``number``: of the collective, the same on all ranks; 0 of a message, which concerns two.
        """
        told = first_line(error)
        if 'process' in told:  # in shared memory, where they are known
            return told
        late = number > 0 and any(words in str(error) for words in ('imed out', 'timeout'))
        others: Dict[int, Tuple[str, int]] = {}
        with suppress(RuntimeError):  # the store may be gone with its rank, before others know
            for rank in {*range(self._size)} - {self._rank}:
                others[rank] = json.loads(self.store.get(f'staged/process/{rank}'))
            self.store.add(f'staged/late/{number}/{self._rank}', 1)
            end = time.monotonic() + _OTHERS_SECONDS
            while late and others and time.monotonic() < end:
                for rank in list(others):
                    if self.store.add(f'staged/late/{number}/{rank}', 0):
                        del others[rank]
                time.sleep(0.02)
        for rank, (host, pid) in others.items():
            if host == host_name() and has_ended(pid):
                told += f'; rank {rank} (process {pid}) has ended'
            elif late:
                told += f'; rank {rank} (process {pid}) did not wait for it'
        return told

    def describe(self, name: str, tensors: Sequence[Tensor]) -> str:
        """Name a collective, the rank, and the tensors."""
        kinds = sorted({f'{list(each.shape)} {each.dtype} on {each.device}' for each in tensors})
        shown = ', '.join(kinds[:3]) + (', ...' if len(kinds) > 3 else '')
        return f'rank {self._rank} of {self._size}: {name}' + (f' of {shown}' if shown else '')

    def _check_tensors(self, name: str, tensors: Sequence[Tensor]) -> None:
        if os.getpid() != self._process:
            raise StagedError(
                f'{self.describe(name, tensors)}: the process {os.getpid()} was forked from '
                f'{self._process}, whose group does not reach it. Make the group after the fork, '
                f'or start processes with the method "spawn".'
            )
        if self.gloo is None:
            raise StagedError(
                f'{self.describe(name, tensors)}: the group has ended, with '
                f'destroy_process_group() or the program. Call it before, or start another group.'
            )
        devices = {str(each.device) for each in tensors} if len(tensors) > 1 else ()
        if len(devices) > 1:
            raise StagedError(
                f'{self.describe(name, tensors)}: expected tensors of one device, got '
                f'{", ".join(sorted(devices))}. Move them to one before the call.'
            )

    def _exchange(
        self, found: Tensor, source: Tensor, found_sizes: List[int], source_sizes: List[int]
    ) -> Work:
        """Begin to send each rank its part of a flat tensor."""
        size = source.element_size()
        return self.gloo.alltoall_base(
            as_bytes(found),
            as_bytes(source),
            [count * size for count in found_sizes],
            [count * size for count in source_sizes],
            torch_dist.AllToAllOptions(),
        )

    def _start_coalescing(self, device: Optional[torch.device] = None) -> None:
        """Collect the works of the collectives until :meth:`_end_coalescing`.

        PyTorch 1.13 names no device, and waits for each work by itself.
        """
        self._coalesced = None if device is None else []

    def _end_coalescing(self, device: object) -> Optional[StagedWork]:
        """Return one work for all that were collected."""
        if self._coalesced is None:
            return None
        works, self._coalesced = self._coalesced, None
        work = StagedWork(self, 'coalesced', [], [])
        work.begins = works
        work.begin()
        return work

    def _rooms(self, buffers: HostBuffers, parts: Parts) -> List[Tensor]:
        """Room for what each rank sends: a tensor for each, or one for all."""
        if isinstance(parts, Tensor):
            room = buffers.write(parts)
            return list(room.split(self._sizes(room)))
        self._check_count(parts)
        return list(map(buffers.write, parts))

    def _sources(self, buffers: HostBuffers, parts: Parts) -> Tuple[Tensor, List[int]]:
        """What each rank is sent, in one flat tensor, and its sizes."""
        if isinstance(parts, Tensor):
            flat = buffers.read(parts)
            return flat, self._sizes(flat)
        self._check_count(parts)
        flats = [buffers.read(part) for part in parts]
        return torch.cat(flats), [len(flat) for flat in flats]

    def _check_count(self, parts: Sequence[Tensor]) -> None:
        if len(parts) != self._size:
            raise ValueError(f'expected {self._size} tensors, one for each rank, got {len(parts)}')

    def _sizes(self, tensor: Tensor, splits: Sequence[int] = ()) -> List[int]:
        """The elements of each rank's rows."""
        rows = len(tensor)
        if not splits:
            if rows % self._size:
                raise ValueError(f'{rows} rows cannot be divided by {self._size} ranks')
            splits = [rows // self._size] * self._size
        if sum(splits) != rows or len(splits) != self._size:
            raise ValueError(
                f'expected the rows of {self._size} ranks, {rows} together, got {list(splits)}'
            )
        of_one = tensor.numel() // rows if rows else 0
        return [count * of_one for count in splits]


def connect(store: 'torch_dist.Store', rank: int, size: int, timeout: timedelta) -> Any:
    """Make a group of gloo.

    The first group of a process connects all ranks, and so finds the links that do not work. A
    later one connects two ranks with their first message where PyTorch can (since 2.8): else each
    group costs each rank a descriptor for every other one.
    """
    gloo: Any = torch_dist.ProcessGroupGloo
    if not torch_dist.is_initialized() or 'lazy_init' not in (gloo.create_device.__doc__ or ''):
        return gloo(store, rank, size, timeout)
    options = gloo._Options()
    options._timeout = timeout
    interfaces = [name for name in os.environ.get('GLOO_SOCKET_IFNAME', '').split(',') if name]
    options._devices = [
        gloo.create_device(interface=name, lazy_init=True) for name in interfaces
    ] or [gloo.create_default_device(lazy_init=True)]
    options._threads = 2 * len(options._devices)
    made = gloo(store, rank, size, options)
    # The ring: a rank that ends is missed at once by its neighbours, and by others in 30 s.
    made.allreduce([torch.zeros(1, device='cpu')]).wait()
    return made


def end_all() -> None:
    """End the groups before the interpreter does, but do not wait for lost ranks for ever."""
    end = time.monotonic() + _END_SECONDS
    for group in list(_GROUPS):
        group.shutdown(max(0.0, end - time.monotonic()))

"""What averaging gradients must cost: the copies and the bytes on the wire, measured bare.

Both are measured in the processes of the benchmark, with all ranks at once, so that they share
cores, memory and links as the averaging does.
"""

import fcntl
import os
import socket
import struct
import threading
from typing import Any, Callable, Dict, List, NamedTuple, Sequence

import torch
from torch import Tensor, distributed as torch_dist

CHUNK_BYTES = 1 << 20
#: A longer stream measures the same bandwidth in more time.
STREAM_BYTES = 32 << 20
#: The request of Linux that asks for the address of an interface.
SIOCGIFADDR = 0x8915


def wire_bytes(size: float, world_size: int) -> float:
    """Bytes that each rank sends when ``size`` bytes are averaged, as a ring does it."""
    return 2.0 * size * (world_size - 1) / world_size


class Floor(NamedTuple):
    """The parts of the floor, in milliseconds.

    Attributes:
        compute (float): A step that averages nothing.
        to_host (float): All gradients from device to host.
        to_device (float): The same, back.
        wire (float): The bytes of a ring, 2·G·(N−1)/N for each rank.
        wire_between_hosts (float): The bytes that the ranks of a host must send to other hosts
            when they add up among themselves first, 2·G·(H−1)/H; ``wire`` on a single host.
    """

    compute: float
    to_host: float
    to_device: float
    wire: float
    wire_between_hosts: float

    @property
    def total(self) -> float:
        """One after the other, over a flat ring."""
        return self.compute + self.to_host + self.to_device + self.wire

    @property
    def total_between_hosts(self) -> float:
        """The same with the ranks of a host as one."""
        return self.total - self.wire + self.wire_between_hosts


def floor_of(
    medians: Dict[str, float], size: float, hosts: int, ranks: int, stream: float
) -> Floor:
    """Put a floor together.

    Args:
        medians (Dict[str, float]): ``none``, ``to_host``, ``to_device`` and ``wire``, in
            milliseconds; ``wire`` is the time of a stream.
        size (float): Bytes of the gradients.
        hosts (int): Number of hosts.
        ranks (int): Number of ranks on all hosts.
        stream (float): Bytes that each rank sent in the stream.
    """
    ms_per_byte = medians['wire'] / stream
    flat = wire_bytes(size, ranks) * ms_per_byte
    between = flat if hosts == 1 else wire_bytes(size, hosts) * ms_per_byte
    return Floor(medians['none'], medians['to_host'], medians['to_device'], flat, between)


class Ring:
    """A TCP connection from each rank to the next one, by the interface that gloo uses.

    Ranks of one host follow each other, so one connection leaves each host and has the host's
    link for itself, as in gloo's ring.
    """

    def __init__(self) -> None:
        rank, self.world_size = torch_dist.get_rank(), torch_dist.get_world_size()
        with socket.create_server((_own_address(), 0)) as server:
            addresses: List[Any] = [None] * self.world_size
            torch_dist.all_gather_object(addresses, server.getsockname())
            self._next = socket.create_connection(addresses[(rank + 1) % self.world_size])
            self._previous, _ = server.accept()

    def stream(self, size: int) -> None:
        """Send ``size`` bytes to the next rank while receiving as many from the one before."""
        sender = threading.Thread(target=self._send, args=(size,))
        sender.start()
        chunk = memoryview(bytearray(CHUNK_BYTES))
        while size:
            received = self._previous.recv_into(chunk[: min(size, CHUNK_BYTES)])
            if not received:
                raise ConnectionError('the rank before closed its connection')
            size -= received
        sender.join()

    def _send(self, size: int) -> None:
        chunk = memoryview(bytes(CHUNK_BYTES))
        while size:
            size -= self._next.send(chunk[: min(size, CHUNK_BYTES)])

    def close(self) -> None:
        self._next.close()
        self._previous.close()


def _own_address() -> str:
    """The address of the interface that gloo uses; loopback unless it is told another."""
    interface = os.environ.get('GLOO_SOCKET_IFNAME', 'lo')
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack('256s', interface.encode()))
    return socket.inet_ntoa(answer[20:24])


class Probes:
    """The copies and the stream, each called like a step of training.

    Args:
        parameters (Sequence[Tensor]): Parameters on the device; gradients have their shapes.
        context (DeviceContext): What ``init_device`` returned.
    """

    def __init__(self, parameters: Sequence[Tensor], context: Any) -> None:
        self._accelerator, self._device = context.accelerator, context.device
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        world_size = torch_dist.get_world_size()
        self.stream_bytes = min(STREAM_BYTES, int(wire_bytes(size, world_size)))
        self._ring = Ring()
        self._on_device = [torch.zeros_like(parameter) for parameter in parameters]
        self._accelerator.compilation.materialize(self._device)
        self._on_host = self._accelerator.copies.to_host(self._on_device)

    def steps(self) -> Dict[str, Callable[[], None]]:
        """What to call and to time; there are no copies where the gradients lie on the host."""
        steps = dict(wire=lambda: self._ring.stream(self.stream_bytes))
        if self._device.type != 'cpu':
            steps.update(to_host=self._to_host, to_device=self._to_device)
        return steps

    def _to_host(self) -> None:
        self._accelerator.copies.to_host(self._on_device)

    def _to_device(self) -> None:
        self._accelerator.copies.into_device(self._on_host, self._on_device)
        self._accelerator.synchronize(self._device)

    def close(self) -> None:
        self._ring.close()


def slowest(milliseconds: float) -> float:
    """The longest time of any rank."""
    value = torch.tensor([milliseconds], dtype=torch.float64)
    torch_dist.all_reduce(value, op=torch_dist.ReduceOp.MAX)
    return value.item()

"""Ranks as processes of one machine, on CPU memory that they share.

Every pair of ranks holds a Unix socket, at an address in the kernel's abstract namespace, which is no file. Over it go
the collectives and the file descriptors of the buffers, which are anonymous (memfd). So nothing in the file system
names what the group uses, at no time: when processes are killed, the kernel frees everything with the last of them.
And when a process ends, in whatever way, the kernel closes its sockets: its peers see that at once.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import select
import socket
import struct
import time
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.errors import ConfigError, MegaMoETimeoutError, ProtocolError, RankFailedError, WorkspaceError
from megamoe.symm.agreement import BOOT_ID
from megamoe.symm.base import Group, SymmetricBuffer

MAX_MESSAGE_BYTES = 1 << 16  # fits a socket's buffer, so that all ranks can send before any receives
_LENGTH = struct.Struct("<I")
_UCRED = struct.Struct("3i")  # pid, uid, gid; see unix(7), SO_PEERCRED
_RETRY_S = 0.005  # between attempts to reach a rank that does not listen yet


class ShmGroup(Group):
    """One rank of a group of processes; `connect` joins it."""

    def __init__(self, rank: int, size: int, sockets: dict[int, socket.socket]) -> None:
        super().__init__(rank, size)
        self._sockets = sockets
        self._dead: set[int] = set()
        self._poll = select.poll()
        for sock in sockets.values():
            self._poll.register(sock, select.POLLRDHUP)
        self._peer_of = {sock.fileno(): peer for peer, sock in sockets.items()}

    @classmethod
    def connect(cls, name: str, rank: int, size: int, *, timeout_s: float) -> ShmGroup:
        """COLLECTIVE. Meet the other ranks.

        Args:
            name: the same on all ranks, and no other group's on this machine.
            rank: this process.
            size: how many there are.
            timeout_s: seconds to wait for the others.

        Raises:
            ConfigError: a machine whose memory order flags don't fit, a rank outside the group, a name in use.
            MegaMoETimeoutError: a rank did not come.
        """
        if not 0 <= rank < size:
            raise ConfigError("rank is not one of the group", got=rank, expected=f"0 to {size - 1}")
        if platform.machine() not in ("x86_64", "AMD64"):
            raise ConfigError(
                "ranks as processes need the memory order of x86-64",
                got=platform.machine(),
                hint="use VirtualRanks() or an InprocGroup",
            )
        deadline = time.monotonic() + timeout_s
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(_address(name, rank))
            except OSError as error:
                raise ConfigError(f"another rank {rank} of group {name!r} is there already: {error}") from None
            listener.listen(size)
            sockets: dict[int, socket.socket] = {}
            try:
                for peer in range(rank):
                    sockets[peer] = _reach(name, rank, peer, deadline, timeout_s)
                while len(sockets) < size - 1:
                    peer, sock = _accept(listener, rank, size, sockets.keys(), deadline, timeout_s)
                    sockets[peer] = sock
            except BaseException:
                for sock in sockets.values():
                    sock.close()
                raise
        return cls(rank, size, sockets)

    def allocate(self, num_bytes: int, *, timeout_s: float) -> SymmetricBuffer:
        """See `Group.allocate`."""
        fd = os.memfd_create("megamoe", os.MFD_CLOEXEC)
        try:
            failure = _size_file(fd, num_bytes, self.size)
            reports = self.all_gather(failure.encode(), timeout_s=timeout_s, phase="allocate")
            for rank, report in enumerate(reports):
                if report:
                    raise WorkspaceError(f"rank {rank} can't allocate {num_bytes} bytes: {report.decode()}")
            return SymmetricBuffer(rank=self.rank, ranks=self._map_all(fd, num_bytes, timeout_s))
        finally:
            os.close(fd)

    def _map_all(self, own_fd: int, num_bytes: int, timeout_s: float) -> tuple[Tensor, ...]:
        deadline = time.monotonic() + timeout_s
        for sock in self._sockets.values():
            socket.send_fds(sock, [b"f"], [own_fd])
        mapped = {self.rank: _map(own_fd, num_bytes)}
        for peer, sock in self._sockets.items():
            sock.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                data, fds, _, _ = socket.recv_fds(sock, 1, 1)
            except TimeoutError:
                raise _timeout(self.rank, peer, "allocate", timeout_s) from None
            if not data or not fds:
                raise _died(self.rank, peer, "allocate")
            mapped[peer] = _map(fds[0], num_bytes)
            os.close(fds[0])
        return tuple(mapped[rank] for rank in range(self.size))

    def _all_gather(self, data: bytes, timeout_s: float, phase: str) -> list[bytes]:
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(data)} bytes is too long, the limit is {MAX_MESSAGE_BYTES}")
        deadline = time.monotonic() + timeout_s
        for peer, sock in self._sockets.items():
            try:
                sock.settimeout(timeout_s)
                sock.sendall(_LENGTH.pack(len(data)) + data)
            except TimeoutError:
                raise _timeout(self.rank, peer, phase, timeout_s) from None
            except OSError:
                raise _died(self.rank, peer, phase) from None
        gathered = {self.rank: data}
        for peer in self._sockets:
            (length,) = _LENGTH.unpack(self._receive(peer, _LENGTH.size, deadline, timeout_s, phase))
            gathered[peer] = self._receive(peer, length, deadline, timeout_s, phase)
        return [gathered[rank] for rank in range(self.size)]

    def _receive(self, peer: int, num_bytes: int, deadline: float, timeout_s: float, phase: str) -> bytes:
        data = b""
        while len(data) < num_bytes:
            self._sockets[peer].settimeout(max(1e-3, deadline - time.monotonic()))
            try:
                chunk = self._sockets[peer].recv(num_bytes - len(data))
            except TimeoutError:
                raise _timeout(self.rank, peer, phase, timeout_s) from None
            except ConnectionError:
                chunk = b""
            if not chunk:
                raise _died(self.rank, peer, phase)
            data += chunk
        return data

    def dead_peers(self) -> frozenset[int]:
        """Ranks whose process ended or closed the group."""
        if self._sockets:
            self._dead |= {self._peer_of[fd] for fd, _ in self._poll.poll(0)}
        return frozenset(self._dead)

    def close(self) -> None:
        """Close the sockets, so that peers see this rank as gone."""
        for sock in self._sockets.values():
            sock.close()
        self._sockets = {}
        self._broken = self._broken or "it is closed"


def connect_process_group(process_group: dist.ProcessGroup, *, timeout_s: float) -> ShmGroup:
    """COLLECTIVE. The ranks of a `torch.distributed` group as processes that share memory.

    Raises:
        ConfigError: the ranks are not on one machine.
    """
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    hello: list[Any] = [None] * size
    dist.all_gather_object(hello, (_machine(), secrets.token_hex(8)), group=process_group)
    machines = [machine for machine, _ in hello]
    if len(set(machines)) > 1:
        raise ConfigError("ranks that share memory are on one machine", got=machines, expected="the same on all ranks")
    return ShmGroup.connect(hello[0][1], rank, size, timeout_s=timeout_s)


def _machine() -> str:
    """Tells apart what can't meet at an abstract socket: machines, their boots, and network namespaces."""
    return f"{platform.node()} {BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/net')}"


def _address(name: str, rank: int) -> str:
    """In the abstract namespace (first byte 0); the user's id keeps users apart."""
    return f"\0megamoe-{os.getuid()}-{name}-{rank}"


def _reach(name: str, rank: int, peer: int, deadline: float, timeout_s: float) -> socket.socket:
    """Connect to a lower rank and say who this is."""
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(_address(name, peer))
            sock.sendall(_LENGTH.pack(rank))
            return sock
        except OSError:
            sock.close()
            if time.monotonic() > deadline:
                raise _timeout(rank, peer, "connect", timeout_s) from None
            time.sleep(_RETRY_S)


def _accept(
    listener: socket.socket, rank: int, size: int, known: Collection[int], deadline: float, timeout_s: float
) -> tuple[int, socket.socket]:
    """Take a higher rank's connection; strangers (of another user) are turned away."""
    while True:
        listener.settimeout(max(1e-3, deadline - time.monotonic()))
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            missing = next(peer for peer in range(rank + 1, size) if peer not in known)
            raise _timeout(rank, missing, "connect", timeout_s) from None
        _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        sock.settimeout(max(1e-3, deadline - time.monotonic()))
        hello = sock.recv(_LENGTH.size) if uid == os.getuid() else b""
        if len(hello) == _LENGTH.size:
            return _LENGTH.unpack(hello)[0], sock
        sock.close()


def _size_file(fd: int, num_bytes: int, num_ranks: int) -> str:
    """Give the file its size; what stands against it, or nothing.

    Pages come when they are touched, and the kernel kills a process for which there is none then. So what all ranks
    together may touch is held against what the machine has now.
    """
    available = _available_bytes()
    if num_bytes * num_ranks > available:
        return f"{num_ranks} ranks ask for that, and this machine has {available} bytes available"
    try:
        os.ftruncate(fd, max(num_bytes, 1))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _available_bytes() -> int:
    """MemAvailable of /proc/meminfo: what can be had without swapping."""
    with open("/proc/meminfo") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _map(fd: int, num_bytes: int) -> Tensor:
    """The file's bytes as a tensor, which keeps the mapping."""
    return torch.frombuffer(mmap.mmap(fd, max(num_bytes, 1)), dtype=torch.uint8)[:num_bytes]


def _timeout(rank: int, peer: int, phase: str, timeout_s: float) -> MegaMoETimeoutError:
    return MegaMoETimeoutError(rank=rank, peer=peer, phase=phase, timeout_s=timeout_s, epoch=0)


def _died(rank: int, peer: int, phase: str) -> RankFailedError:
    return RankFailedError(
        f"rank {rank} waited for rank {peer} in phase {phase}, but its process has ended or left the group",
        rank=rank,
        peer=peer,
        hint=f"see rank {peer}'s own log",
    )

"""How ranks find out together whether they can open a session, before any of them waits for memory of another.

A rank that lacks something and raised alone would leave its peers in a collective that never completes. So each step of
`open()` that can fail on one rank ends in `agree`: all ranks exchange what went wrong, and all raise the same, or none.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from megamoe import errors
from megamoe.errors import BackendUnavailableError, ConfigError, MegaMoEError, RankFailedError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # one per running kernel, so containers of one host share it

T = TypeVar("T")


class Ranks(Protocol):
    """What agreeing needs of a group: any `megamoe.symm.Group` has it, and `ProcessGroupRanks`."""

    rank: int
    size: int

    def all_gather(self, data: bytes, *, timeout_s: float, phase: str) -> list[bytes]: ...


class ProcessGroupRanks:
    """The ranks of a torch process group, before they share any memory."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self._process_group = process_group

    def all_gather(self, data: bytes, *, timeout_s: float, phase: str) -> list[bytes]:
        """COLLECTIVE. Everybody's `data` in rank order; waits as long as the process group does."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, data, group=self._process_group)
        return gathered


def agree(group: Ranks | None, step: str, act: Callable[[], T], *, timeout_s: float) -> T:
    """COLLECTIVE. Run `act` on every rank; if it raises on any, raise on all, else return this rank's result.

    Args:
        group: the ranks; None for one process that has no peers.
        step: what `act` does, for the message: "look at the machine", "allocate the workspace".
        act: enters no collective that a rank on which it raises would miss.
        timeout_s: seconds to wait for the others.

    Raises:
        MegaMoEError: of the lowest rank that failed; its own error there, one of the same type that names it elsewhere.
    """
    error: MegaMoEError | None = None
    result: T | None = None
    try:
        result = act()
    except MegaMoEError as raised:
        error = raised
    except Exception as raised:  # a library's own error must not leave the peers waiting either
        error = BackendUnavailableError(f"could not {step}: {type(raised).__name__}: {raised}")
        error.__cause__ = raised
    if group is not None:
        for rank, data in enumerate(group.all_gather(_encode(error), timeout_s=timeout_s, phase=step)):
            if data and rank != group.rank:
                raise _of_peer(data, rank, step, group.rank)
            if data:
                break  # this rank is the lowest that failed
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _encode(error: MegaMoEError | None) -> bytes:
    if error is None:
        return b""
    parts = {name: value if value is None else str(value) for name, value in vars(error).items()}
    text = {"type": type(error).__name__} | {name: parts[name] for name in ("message", "got", "expected", "hint")}
    return json.dumps(text).encode()


def _of_peer(data: bytes, peer: int, step: str, rank: int) -> MegaMoEError:
    """The error of another rank, as this one raises it."""
    text = json.loads(data)
    kind = getattr(errors, text["type"], MegaMoEError)
    message = f"rank {peer} could not {step}: {text['message']}"
    if issubclass(kind, errors.ProtocolError):
        return RankFailedError(message, rank=rank, peer=peer, hint=text["hint"])
    error: MegaMoEError = kind(message, got=text["got"], expected=text["expected"], hint=text["hint"])
    return error


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a rank runs.

    Args:
        boot: identity of the host's running kernel.
        host: the host's name, for messages.
        gpu: uuid of the rank's GPU.
        plan: digest of the plan that it opens.
    """

    boot: str
    host: str
    gpu: str
    plan: str


def take_seat(gpu: str, plan: str) -> Seat:
    """This process's seat."""
    return Seat(boot=BOOT_ID.read_text().strip(), host=socket.gethostname(), gpu=gpu, plan=plan)


def exchange_seats(group: Ranks, own: Seat, *, timeout_s: float) -> list[Seat]:
    """COLLECTIVE. Seats of all ranks, in rank order."""
    gathered = group.all_gather(json.dumps(asdict(own)).encode(), timeout_s=timeout_s, phase="exchange seats")
    return [Seat(**json.loads(data)) for data in gathered]


def check_seats(
    seats: list[Seat], rank: int, can_access: Callable[[str], bool | None], *, ranks_per_gpu: int = 1
) -> None:
    """Whether `rank` can work with all others, before any memory is shared.

    Args:
        seats: of all ranks.
        rank: whose view this is.
        can_access: GPU uuid of a peer on this host -> whether this rank's GPU can address its memory; None where this
            process does not see that GPU, and only mapping the memory will tell.
        ranks_per_gpu: how many ranks may share a GPU, which is for rehearsals.

    Raises:
        ConfigError: plans differ, or more ranks share a GPU than may.
        BackendUnavailableError: no peer-to-peer path to another rank.
    """
    own = seats[rank]
    shared = sum((seat.boot, seat.gpu) == (own.boot, own.gpu) for seat in seats) <= ranks_per_gpu
    for peer, seat in enumerate(seats):
        if peer == rank:
            continue
        if seat.plan != own.plan:
            raise ConfigError(
                f"ranks {rank} and {peer} open different plans",
                hint="every rank plans the same problem for the same device, with the same version of its package",
            )
        if seat.boot != own.boot:
            raise BackendUnavailableError(
                f"no peer-to-peer path from rank {rank} to rank {peer}: they are on different hosts",
                got=f"{own.host} and {seat.host}",
                expected="GPUs of one host, joined by NVLink or PCIe peer-to-peer",
            )
        if seat.gpu == own.gpu and not shared:
            raise ConfigError(
                f"ranks {rank} and {peer} are on one GPU",
                got=own.gpu,
                hint="call torch.cuda.set_device(local_rank) first, or let one process run all ranks: VirtualRanks(). "
                "To rehearse processes on one GPU, MEGAMOE_RANKS_PER_GPU says how many ranks may share it",
            )
        if seat.gpu != own.gpu and can_access(seat.gpu) is False:
            raise BackendUnavailableError(
                f"no peer-to-peer path from rank {rank} ({own.gpu}) to rank {peer} ({seat.gpu})",
                hint="`nvidia-smi topo -p2p r` or `rocm-smi --showtopoaccess` shows paths; in a virtual machine, pass "
                "the GPUs through with peer access",
            )

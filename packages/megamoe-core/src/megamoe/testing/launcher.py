"""Worlds: the ranks of a test, however they are run, behind one face that plain sequential test code can drive.

    with world.open(plan) as session:
        weights = session.prepare(shards)          # one entry per rank, here and below
        outputs = session.forward(calls, weights)

| kind | ranks are | group argument of `Backend.open` |
|---|---|---|
| `VirtualWorld` | virtual, driven by one session in this process | `VirtualRanks()`, or None for one rank |
| `ThreadWorld` | threads of this process | `megamoe.symm` group over plain memory |
| `ProcessWorld`, on a CPU | processes | `megamoe.symm` group over shared memory |
| `ProcessWorld`, on GPUs | processes, one GPU each | `torch.distributed` process group |

A command goes to all ranks at once, and every rank's outcome comes back: a test of failures sees what each rank saw.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import secrets
import signal
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.backend import Backend, Plan, SessionStats, StageTaps, VirtualRanks
from megamoe.errors import ProtocolError
from megamoe.launch import RankContext, RankProcessError, dumps, spawn_ranks
from megamoe.registry import Candidate, load, load_class
from megamoe.symm import InprocGroup, ShmGroup
from megamoe.tensors import ExpertWeights, PreparedWeights
from megamoe.testing.agent import Agent
from megamoe.testing.data import Call

START_TIMEOUT_S = 120.0  # eight interpreters that import torch at once on two cores take about 20 s
WORLD_TIMEOUT_S = 3600.0  # a test run's processes never live longer than this


@dataclass(frozen=True)
class Outcome:
    """What one rank made of a command: a value or an error."""

    value: Any = None
    error: BaseException | None = None


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """Every rank's value.

    Raises:
        the error that is nearest to the cause: errors about a peer come last.
    """
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, ProtocolError))
    return [outcome.value for outcome in outcomes]


class World(ABC):
    """Ranks that carry out the methods of `Agent`. A context manager; `close` ends the ranks."""

    def __init__(self, ep_size: int) -> None:
        self.ep_size = ep_size
        self.broken = False  # a rank is gone: of no use to further tests
        self._next_key = 0

    @abstractmethod
    def command(self, method: str, *shared: Any, per_rank: Sequence[Any] | None = None, **named: Any) -> list[Outcome]:
        """Have every rank run a method of its agent.

        Args:
            method: of `Agent`.
            shared: first arguments, the same for all ranks.
            per_rank: last argument: entry r goes to rank r.
            named: keyword arguments, the same for all ranks.
        """

    @abstractmethod
    def close(self) -> None:
        """End the ranks; calling it again does nothing."""

    def open(self, plan: Plan, *, timeout_s: float | None = None) -> GroupSession:
        """Open `plan` on every rank."""
        return GroupSession(self, plan, timeout_s)

    def new_key(self) -> int:
        """A name for a session or for weights that no other has."""
        self._next_key += 1
        return self._next_key

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class GroupSession:
    """The sessions of all ranks of one plan; its methods take and return one entry per rank."""

    def __init__(self, world: World, plan: Plan, timeout_s: float | None) -> None:
        self.world = world
        self.plan = plan
        self.problem = plan.problem
        self.key = world.new_key()
        values(world.command("open", self.key, plan, timeout_s))

    def prepare(self, shards: Sequence[ExpertWeights]) -> int:
        """Prepare each rank's experts; returns the name to call `forward` with."""
        key = self.world.new_key()
        values(self.world.command("prepare", self.key, key, per_rank=shards))
        return key

    def prepare_tensors(self, arguments: Sequence[dict[str, Any]]) -> int:
        """`Session.prepare_weights(**arguments)` on each rank."""
        key = self.world.new_key()
        values(self.world.command("prepare_tensors", self.key, key, per_rank=arguments))
        return key

    def change_weights(self, weights: int, change: Callable[[PreparedWeights], PreparedWeights]) -> None:
        """Replace every rank's prepared weights by what an importable function makes of them."""
        values(self.world.command("change_weights", weights, per_rank=[change] * self.world.ep_size))

    def move_expert(self, weights: int, moves: Sequence[tuple[int, int] | None]) -> None:
        """Copy local expert over local expert in place, where a rank has a move."""
        values(self.world.command("move_expert", weights, per_rank=moves))

    def forward(self, calls: Sequence[Call], weights: int) -> list[Tensor]:
        """One call on every rank; raises the first cause."""
        return values(self.outcomes(calls, weights))

    def outcomes(self, calls: Sequence[Call], weights: int) -> list[Outcome]:
        """One call on every rank; never raises for a rank."""
        return self.world.command("forward", self.key, weights, per_rank=calls)

    def forward_many(self, rounds: Sequence[Sequence[Call]], order: Sequence[int], weights: int) -> list[list[Tensor]]:
        """Calls back to back without synchronisation; returns, per rank, its outputs in order."""
        by_rank = [list(calls) for calls in zip(*rounds)]
        return values(self.world.command("forward_many", self.key, weights, list(order), per_rank=by_rank))

    def capture_and_replay(self, rounds: Sequence[Sequence[Call]], weights: int) -> list[list[Tensor]]:
        """Capture one call, replay it for each round; returns, per rank, its outputs by round."""
        by_rank = [list(calls) for calls in zip(*rounds)]
        return values(self.world.command("capture_and_replay", self.key, weights, per_rank=by_rank))

    def capture_cold(self, calls: Sequence[Call], weights: int) -> list[Outcome]:
        """First call inside a capture."""
        return self.world.command("capture_cold", self.key, weights, per_rank=calls)

    def receive_counts(self) -> list[Tensor]:
        """`[E_local]` of each rank."""
        return values(self.world.command("receive_counts", self.key))

    def stats(self) -> list[SessionStats]:
        """Counters of each rank."""
        return values(self.world.command("stats", self.key))

    def keep_taps(self) -> None:
        """From the next call on, keep what stands between the stages."""
        values(self.world.command("keep_taps", self.key))

    def taps(self) -> list[StageTaps | None]:
        """Taps of each rank's last call; None where it received no rows."""
        return values(self.world.command("taps", self.key))

    def warmup(self) -> list[float]:
        """Compile and load; each rank's seconds."""
        return values(self.world.command("warmup", self.key))

    def reset(self) -> None:
        """Recover after a failed call."""
        values(self.world.command("reset", self.key))

    def recover(self) -> None:
        """Reset where a rank's refused arguments end the call of its peers; virtual ranks are refused together."""
        if not isinstance(self.world, VirtualWorld):
            self.reset()

    def close(self, *, forget: bool = True) -> list[Outcome]:
        """Close on every rank. `forget=False` keeps the closed sessions, for tests that use them again."""
        return self.world.command("close", self.key, forget=forget)

    def __enter__(self) -> GroupSession:
        return self

    def __exit__(self, *exc: object) -> None:
        outcomes = self.close()
        if exc[0] is None:
            values(outcomes)


class VirtualWorld(World):
    """All ranks in this process, driven by one session."""

    def __init__(self, backend: Backend, device: torch.device, ep_size: int) -> None:
        super().__init__(ep_size)
        self.agent = Agent(backend, device, range(ep_size), lambda size: VirtualRanks() if size > 1 else None)

    def command(self, method: str, *shared: Any, per_rank: Sequence[Any] | None = None, **named: Any) -> list[Outcome]:
        try:
            result = getattr(self.agent, method)(*shared, *_entries(per_rank, slice(None)), **named)
        except Exception as error:
            return [Outcome(error=error)] * self.ep_size
        return [Outcome(value=value) for value in result]

    def close(self) -> None:
        self.agent.sessions.clear()
        self.agent.weights.clear()


class ThreadWorld(World):
    """Ranks as threads of this process."""

    def __init__(self, backend: Backend, device: torch.device, ep_size: int) -> None:
        super().__init__(ep_size)
        groups = SharedGroups(ep_size)
        agents = [Agent(backend, device, (rank,), partial(groups.of_rank, rank)) for rank in range(ep_size)]
        self.inboxes: list[queue.SimpleQueue[_Command | None]] = [queue.SimpleQueue() for _ in agents]
        self.outbox: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self._serve, args=(rank, agent), daemon=True) for rank, agent in enumerate(agents)
        ]
        for thread in self.threads:
            thread.start()

    def _serve(self, rank: int, agent: Agent) -> None:
        torch.set_num_threads(1)
        while (command := self.inboxes[rank].get()) is not None:
            self.outbox.put((rank, command.run(agent)))

    def command(self, method: str, *shared: Any, per_rank: Sequence[Any] | None = None, **named: Any) -> list[Outcome]:
        for rank, inbox in enumerate(self.inboxes):
            inbox.put(_Command(method, (*shared, *_entries(per_rank, slice(rank, rank + 1))), named))
        outcomes = dict(self.outbox.get() for _ in self.inboxes)
        return [outcomes[rank] for rank in range(self.ep_size)]

    def close(self) -> None:
        for inbox in self.inboxes:
            inbox.put(None)
        for thread in self.threads:
            thread.join()


class SharedGroups:
    """Groups of threads: the n-th one that each rank asks for is the same."""

    def __init__(self, ep_size: int) -> None:
        self._lock = threading.Lock()
        self._asked = [0] * ep_size
        self._groups: list[list[InprocGroup]] = []

    def of_rank(self, rank: int, ep_size: int) -> InprocGroup:
        """This rank's member of its next group."""
        with self._lock:
            index = self._asked[rank]
            self._asked[rank] += 1
            if index == len(self._groups):
                self._groups.append(InprocGroup.create(ep_size))
            return self._groups[index][rank]


class ProcessWorld(World):
    """Ranks as processes; on GPUs, one each (`RankContext.gpu`).

    Args:
        backend_name: each process finds the backend through its entry point, as an application does, or, where this is
            `module:Class`, imports it.
        device_type: "cpu" or "cuda".
        ep_size: processes.
    """

    def __init__(self, backend_name: str, device_type: str, ep_size: int) -> None:
        super().__init__(ep_size)
        self.directory = tempfile.TemporaryDirectory(prefix="megamoe-world")
        authkey = secrets.token_bytes(16)
        address = str(Path(self.directory.name) / "socket")
        with Listener(address, "AF_UNIX", backlog=ep_size, authkey=authkey) as listener:
            self.launch = threading.Thread(
                target=spawn_ranks,
                args=(serve, ep_size, address, authkey, backend_name, device_type),
                kwargs={"timeout_s": WORLD_TIMEOUT_S, "grace_s": WORLD_TIMEOUT_S, "num_threads": 1},
                daemon=True,
            )
            self.launch.start()
            accepted = [listener.accept() for _ in range(ep_size)]
        self.pipes: dict[int, Connection] = {pickle.loads(pipe.recv_bytes()): pipe for pipe in accepted}  # noqa: S301 - from our own child

    def command(self, method: str, *shared: Any, per_rank: Sequence[Any] | None = None, **named: Any) -> list[Outcome]:
        for rank in range(self.ep_size):
            self._send(rank, _Command(method, (*shared, *_entries(per_rank, slice(rank, rank + 1))), named))
        return [self._receive(rank) for rank in range(self.ep_size)]

    def forward_while_killing(
        self, rank: int, session: GroupSession, calls: Sequence[Call], weights: int
    ) -> list[Outcome]:
        """One call on every rank but `rank`, whose process is killed instead of calling."""
        for other in range(self.ep_size):
            if other != rank:
                self._send(other, _Command("forward", (session.key, weights, [calls[other]]), {}))
        self._send(rank, _Command("", (), {}))
        return [self._receive(other) for other in range(self.ep_size)]

    def _send(self, rank: int, command: _Command) -> None:
        with contextlib.suppress(OSError):  # a dead rank; _receive says so
            self.pipes[rank].send_bytes(dumps(command))

    def _receive(self, rank: int) -> Outcome:
        try:
            outcome = pickle.loads(self.pipes[rank].recv_bytes())  # noqa: S301 - from our own child
        except (EOFError, OSError):
            self.broken = True
            return Outcome(error=RankProcessError(f"rank {rank}'s process is gone", rank=rank))
        assert isinstance(outcome, Outcome)
        return outcome

    def close(self) -> None:
        for pipe in self.pipes.values():
            pipe.close()  # the end of the file is the end of `serve`
        self.pipes.clear()
        self.launch.join()
        self.directory.cleanup()


@dataclass(frozen=True)
class _Command:
    method: str  # of Agent; "" kills the process
    positional: tuple[Any, ...]
    named: dict[str, Any]

    def run(self, agent: Agent) -> Outcome:
        try:
            (value,) = getattr(agent, self.method)(*self.positional, **self.named)
        except Exception as error:
            error.__traceback__ = None  # frames would keep the call's tensors alive, and do not pickle
            return Outcome(error=error)
        return Outcome(value=value)


def find_backend(name: str) -> Candidate:
    """The backend under test by its name, or by `module:Class`."""
    return load_class(name) if ":" in name else load(name)


def serve(context: RankContext, address: str, authkey: bytes, backend_name: str, device_type: str) -> None:
    """Body of a rank's process: carry out commands until the test closes the pipe."""
    candidate = find_backend(backend_name)
    assert candidate.backend is not None, candidate.verdict.detail
    device = context.gpu if device_type == "cuda" else torch.device(device_type)
    agent = Agent(candidate.backend, device, (context.rank,), _group_maker(context, device))
    with Client(address, "AF_UNIX", authkey=authkey) as pipe:
        pipe.send_bytes(pickle.dumps(context.rank))
        while True:
            try:
                command = pickle.loads(pipe.recv_bytes())  # noqa: S301 - from our own parent
            except (EOFError, OSError):
                return
            if not command.method:
                os.kill(os.getpid(), signal.SIGKILL)
            pipe.send_bytes(dumps(command.run(agent)))


def _group_maker(context: RankContext, device: torch.device) -> Callable[[int], Any]:
    """What makes the group argument of each session in a rank's process."""
    if device.type == "cpu":
        numbers = itertools.count()
        return lambda size: ShmGroup.connect(
            f"{context.name}x{next(numbers)}", context.rank, size, timeout_s=START_TIMEOUT_S
        )
    context.join_gpus(device)
    return lambda size: dist.group.WORLD


def _entries(per_rank: Sequence[Any] | None, ranks: slice) -> tuple[list[Any], ...]:
    return () if per_rank is None else (list(per_rank)[ranks],)

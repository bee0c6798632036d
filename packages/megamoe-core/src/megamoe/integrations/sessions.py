"""What adapters share: the backend for the device that a model is on, and one session for all layers of a problem."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch

from megamoe import env
from megamoe.backend import Backend, Session
from megamoe.errors import BackendUnavailableError, CapacityError, SessionError
from megamoe.meter import LayerCounter, Meter, Metrics
from megamoe.problem import MoEProblem
from megamoe.registry import REFERENCE, select_backend

logger = logging.getLogger("megamoe")


def backend_for(device: torch.device, name: str, problem: MoEProblem) -> Backend:
    """`select_backend`, bound to where the model is: the CPU never computes for a model on a GPU.

    Args:
        device: where the experts are. "auto" is the reference for a CPU; it is refused for any other device, also
            where it was asked for.
        name: "auto" or a backend.
        problem: what it has to support.

    Raises:
        BackendError: no backend can be used, with the reason against each.
    """
    if device.type == "cpu" and name == "auto" and env.backend() is None:
        logger.warning("MegaMoE runs on the CPU reference backend: the experts are on CPU")
        name = REFERENCE
    backend = select_backend(name, problem)
    if backend.name == REFERENCE and device.type != "cpu":
        raise BackendUnavailableError(
            "the reference backend computes on CPU, the experts are elsewhere",
            got=device,
            expected="experts on CPU, or a GPU backend",
            hint="move the model to the CPU, or choose another backend",
        )
    return backend


def session_for(most_tokens: int, sessions: Iterable[Session]) -> Session:
    """The session of the smallest capacity that holds a step, as of one for decoding and one for prefill.

    Args:
        most_tokens: that any rank brings to this step. Not this rank's own number: ranks that took different sessions
            would wait for each other until the time-out.
        sessions: of the same ranks.

    Raises:
        CapacityError: none is large enough; on every rank, since all ask for the same number.
    """
    by_capacity = sorted(sessions, key=_capacity)
    for session in by_capacity:
        if most_tokens <= _capacity(session):
            return session
    raise CapacityError(
        "no session holds this step",
        got=f"{most_tokens} tokens on a rank",
        expected=f"at most {[_capacity(session) for session in by_capacity]}",
        hint="split the step on every rank, or plan a larger capacity",
    )


def _capacity(session: Session) -> int:
    return session.plan.problem.num_max_tokens_per_rank


class SessionPool:
    """One session per problem, group and device, opened when it is first asked for."""

    def __init__(self, *, once_closed: str = "load the model again") -> None:
        """Empty.

        Args:
            once_closed: what an adapter's user can do then; the hint of what is raised.
        """
        self.closed = False
        self._once_closed = once_closed
        self._sessions: dict[tuple[MoEProblem, str | None, torch.device], Session] = {}
        self._meters: dict[Session, Meter] = {}

    def get(self, problem: MoEProblem, *, backend: str, device: torch.device, group: Any = None) -> Session:
        """COLLECTIVE for a new problem of several ranks: the session to use, opened and warmed up.

        Args:
            problem: equal on every rank.
            backend: "auto" or a name.
            device: where the experts are.
            group: process group of torch.distributed, or None for `ep_size` 1.

        Raises:
            BackendError: see `backend_for`; on a rank alone where ranks differ in hardware.
            SessionError: the pool is closed.
        """
        if self.closed:
            raise SessionError("this adapter is closed", hint=self._once_closed)
        key = (problem, None if group is None else group.group_name, device)
        if key not in self._sessions:
            chosen = backend_for(device, backend, problem)
            plan = chosen.plan(problem)
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                session = chosen.open(plan, group)
                seconds = session.warmup()
            logger.info("MegaMoE is warm after %.1f s", seconds)
            session.once_closed = f"its adapter closed it: {self._once_closed}"
            self._sessions[key] = session
        return self._sessions[key]

    def counter(self, session: Session, layer: str) -> LayerCounter:
        """What counts the calls of a layer that one of the pool's sessions runs, under the name `layer`."""
        if session not in self._meters:
            self._meters[session] = Meter(session)
        return self._meters[session].layer(layer)

    def metrics(self) -> list[Metrics]:
        """Of each session with counters, since it was asked last. Synchronises."""
        return [metrics for meter in self._meters.values() for metrics in meter.collect()]

    def problems(self) -> tuple[MoEProblem, ...]:
        """What the open sessions run."""
        return tuple(session.plan.problem for session in self._sessions.values())

    def close(self) -> None:
        """COLLECTIVE where sessions have several ranks. Close every session; calling it again does nothing."""
        self.closed = True
        self._meters.clear()
        while self._sessions:
            self._sessions.popitem()[1].close()

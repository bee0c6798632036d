"""The exception tree.

Every error says what was got, what was expected and what to do about it, so that a log line is enough to act on. All
derive from `MegaMoEError`; catch that to catch everything this library raises on purpose.
"""

from __future__ import annotations


class MegaMoEError(Exception):
    """Base of all errors that MegaMoE raises on purpose.

    Args:
        message: what went wrong, one sentence.
        got: the offending value, if there is one.
        expected: what would have been accepted.
        hint: what to do about it.
    """

    def __init__(self, message: str, *, got: object = None, expected: object = None, hint: str | None = None) -> None:
        self.message = message
        self.got = got
        self.expected = expected
        self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        parts = [self.message]
        if self.got is not None:
            parts.append(f"got {self.got}")
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.hint is not None:
            parts.append(self.hint)
        return "; ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries in the test launcher and in engines; keyword arguments need help to pickle.
        return (_rebuild, (type(self), dict(self.__dict__)))


def _rebuild(cls: type[MegaMoEError], state: dict[str, object]) -> MegaMoEError:
    error = cls.__new__(cls)
    error.__dict__.update(state)
    Exception.__init__(error, state["message"])
    return error


class ConfigError(MegaMoEError):
    """A problem, plan or configuration that contradicts itself."""


class FormatError(MegaMoEError):
    """A tensor that is not in the number format that it was declared to be in, or can't be put into it."""


class LayoutError(MegaMoEError):
    """A weight whose layout tag is not the one that the operation reads."""


class InputError(MegaMoEError):
    """An argument of a call with the wrong dtype, shape, device or value."""


class CapacityError(InputError):
    """More tokens than `num_max_tokens_per_rank`; raised before anything is launched or sent."""


class CheckpointError(MegaMoEError):
    """A checkpoint file that is corrupt, truncated, incomplete or in an unknown naming."""


class WorkspaceError(MegaMoEError):
    """A workspace that is too small, misaligned or could not be allocated."""


class BackendError(MegaMoEError):
    """Base of what goes wrong while a backend is found and chosen."""


class BackendUnavailableError(BackendError):
    """The backend that was asked for is not installed, failed to import, or lacks its hardware or libraries."""


class UnsupportedProblemError(BackendError):
    """The backend that was asked for can't run this problem; the message holds the reason and the limit."""


class NoBackendError(BackendError):
    """No installed backend can run this problem here; the message names each with its reason."""


class SessionError(MegaMoEError):
    """A session that was used after `close()`, after a failure without `reset()`, or in the child of a fork."""


class CaptureError(SessionError):
    """A call that would have to compile or allocate was made inside a graph capture; run `warmup()` first."""


class LaunchError(MegaMoEError):
    """The device refused a launch."""


class ProtocolError(MegaMoEError):
    """Base of failures of the protocol between ranks."""


class RankFailedError(ProtocolError):
    """A peer raised in the middle of a call and told the others; its own error says why.

    Args:
        rank: the rank that raises this.
        peer: the rank that failed first.
    """

    def __init__(self, message: str, *, rank: int, peer: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.rank = rank
        self.peer = peer


class MegaMoETimeoutError(ProtocolError):
    """A wait of the protocol that ran out of time.

    Args:
        rank: the rank that waited.
        peer: the rank that it waited for (its own for a wait between its own workers).
        phase: the protocol phase, by the name that `megamoe.schedule.protocol` gives it.
        timeout_s: how long it waited, seconds.
        epoch: the call's epoch.
        index: which flag of the phase: a block, a source rank.
        observed: the flag's value when the time was out, where it is known.
        awaited: the value that was waited for.
        if_it_died: what the ranks that are left can do if the peer is gone for good.
    """

    def __init__(
        self,
        *,
        rank: int,
        peer: int,
        phase: str,
        timeout_s: float,
        epoch: int,
        index: int = 0,
        observed: int | None = None,
        awaited: int | None = None,
        if_it_died: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(
            f"rank {rank} waited {timeout_s:g} s for rank {peer} in phase {phase} (epoch {epoch}, index {index})",
            got=observed,
            expected=awaited,
            hint=hint
            or f"look at rank {peer}'s own log; if it is only slow, raise MEGAMOE_TIMEOUT_S; "
            "after a failure every rank calls session.reset() together, or opens a new session"
            + (f"; if rank {peer} died, {if_it_died}" if if_it_died else ""),
        )
        self.rank = rank
        self.peer = peer
        self.phase = phase
        self.timeout_s = timeout_s
        self.epoch = epoch
        self.index = index

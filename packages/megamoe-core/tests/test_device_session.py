"""The life of a session on a GPU, seen by a backend that only writes down what it is asked to do."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.backend import Plan, SessionStats, StageTaps
from megamoe.device_session import DeviceSession
from megamoe.errors import (
    CapacityError,
    CaptureError,
    InputError,
    MegaMoETimeoutError,
    ProtocolError,
    RankFailedError,
    SessionError,
)
from megamoe.problem import MoEProblem
from megamoe.reference.backend import ReferenceBackend
from megamoe.symm import Group, InprocGroup, PeerMemory
from megamoe.tensors import ExpertWeights, Fp8BlockWeights, PreparedWeights
from megamoe.testing.data import make_weights, shard
from megamoe.testing.threads import on_ranks

PROBLEM = MoEProblem(
    hidden_size=128, intermediate_size=128, num_experts=4, top_k=1, num_max_tokens_per_rank=4, ep_size=2
)
PLAN: Plan = ReferenceBackend().plan(PROBLEM)
TIMEOUT = MegaMoETimeoutError(rank=0, peer=1, phase="dispatch", timeout_s=1, epoch=7)
PEER_FAILED = RankFailedError("rank 1 gave up", rank=0, peer=1)


class Diary(DeviceSession):
    """Calls do nothing; a failure is what `fault` holds; `diary` is what happened, in order."""

    weight_layout = "diary"

    def __init__(self, group: Group | None = None) -> None:
        self.diary: list[str] = []
        self.fault: ProtocolError | None = None
        self.refused: BaseException | None = None
        self.meanwhile: Callable[[], None] = lambda: None
        super().__init__(
            PLAN,
            group=group,
            virtual=group is None,
            device=torch.device("cpu"),
            timeout_s=1.0,
            allocate=lambda num_bytes: PeerMemory(
                ranks=tuple(torch.full((num_bytes,), 7, dtype=torch.uint8) for _ in range(PROBLEM.ep_size)),
                release=lambda: self.diary.append("release"),
            ),
        )

    def call(self, refused: BaseException | None = None) -> Any:
        """`forward`, which ends in `refused` before anything is launched."""
        self.refused = refused
        nothing: Any = None
        return self.forward(nothing, nothing, nothing, nothing)

    def _call(self, rows: Sequence[Sequence[Any]]) -> list[Tensor]:
        self.meanwhile()
        if self.refused is not None:
            raise self.refused
        return [torch.empty(0) for _ in rows]

    def _prepare(self, weights: ExpertWeights) -> PreparedWeights:
        assert isinstance(weights, Fp8BlockWeights)
        return PreparedWeights.of(PROBLEM, backend="", layout="", tensors={"w2_scale": weights.w2_weight_scale + 0})

    def _take_memory(self) -> None:
        self._memory = self._allocate(self._layout.num_bytes)

    def _words(self, rank: int, array: str) -> Tensor:
        place = self._layout[array]
        return self._memory.ranks[rank][place.offset : place.offset + place.num_bytes].view(torch.int32)

    def _set_flags(self, rank: int, epoch: int) -> None:
        self.diary.append(f"flags of {rank} at {epoch}")

    def _load_kernels(self) -> None:
        self.diary.append("load")

    def _unload_kernels(self) -> None:
        self.diary.append("unload")

    def _find_failure(self) -> ProtocolError | None:
        return self.fault

    def _forget_failure(self) -> None:
        self.diary.append("forget")
        self.fault = None

    def _receive_counts(self) -> list[Tensor]:
        return [torch.full((PROBLEM.num_local_experts,), rank, dtype=torch.int32) for rank in self._driven]

    def _read_taps(self) -> list[StageTaps | None]:
        return [None for _ in self._driven]

    def _synchronize(self) -> None:
        self.diary.append("synchronize")

    def _meet(self, phase: str, timeout_s: float | None = None) -> None:
        self.diary.append(f"meet: {phase}")
        super()._meet(phase, timeout_s)


def opened(group: Group | None = None) -> Diary:
    session = Diary(group)
    session.start()
    session.diary.clear()
    return session


def test_flags_are_set_only_between_two_meetings_of_all_ranks() -> None:
    """The first: no launch of an earlier call is under way on any rank. The second: no rank's flag is still old."""
    session = opened()
    session.reset()
    assert session.diary == [
        "synchronize",
        "meet: reset: all launches have ended",
        "forget",
        "flags of 0 at 0",
        "flags of 1 at 0",
        "synchronize",
        "meet: reset: all flags are set",
    ]


def test_memory_goes_after_the_last_launch_of_the_last_rank() -> None:
    session = opened()
    session.close()
    session.close()
    assert session.diary == ["synchronize", "unload", "meet: close", "release"]
    for use in (session.call, session.warmup, session.check, session.reset, session.stats, session.receive_counts):
        with pytest.raises(SessionError, match="closed"):
            use()


def test_memory_stays_where_a_rank_does_not_come_to_the_last_meeting(caplog: pytest.LogCaptureFixture) -> None:
    """A release that is collective would wait for the rank that is gone."""

    def body(group: InprocGroup) -> list[str]:
        session = opened(group)
        if group.rank == 0:
            with caplog.at_level(logging.WARNING, logger=f"megamoe.{PLAN.backend}"):
                session.close()
        return session.diary

    assert on_ranks(2, body)[0] == ["synchronize", "unload", "meet: close"]
    assert "another rank is gone" in caplog.text


@pytest.mark.parametrize("fault, timeouts", [(TIMEOUT, 1), (PEER_FAILED, 0)])
def test_a_failure_is_raised_by_each_use_until_the_reset(fault: ProtocolError, timeouts: int) -> None:
    """It counts once; a peer that gave up is no time-out of this rank."""
    session = opened()
    session.call()
    session.fault = fault
    for use in (session.call, session.check, session.warmup):
        with pytest.raises(type(fault)) as raised:
            use()
        assert raised.value is fault
    session.reset()
    session.call()
    session.check()
    session.diary.clear()
    assert session.stats() == [SessionStats(calls=2, timeouts=timeouts)] * 2
    assert session.diary == ["synchronize"]  # calls may be on other streams than the one that reads


@pytest.mark.parametrize(
    "error",
    [CapacityError("too many", hint="split"), torch.OutOfMemoryError("no memory for out"), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__,
)
def test_a_rank_that_is_left_out_of_a_call_makes_no_other_before_the_reset(error: BaseException) -> None:
    """Its peers would take the next call for the one that it did not make. They come to the reset a time-out later."""

    def body(group: InprocGroup) -> SessionStats:
        session = opened(group)
        if group.rank == 0:
            with pytest.raises(type(error)):
                session.call(error)
            with pytest.raises(SessionError, match=rf"last call failed \({type(error).__name__}: .*reset\(\) on every"):
                session.call()
            with pytest.raises(SessionError, match="the last call failed"):
                session.check()
        else:
            session.call()
            time.sleep(1.2 * session._timeout_s)  # as a launch that waits for rank 0
        session.reset()
        session.call()
        return session.stats()

    assert on_ranks(2, body) == [SessionStats(calls=1), SessionStats(calls=2)]
    if isinstance(error, CapacityError):
        assert (
            error.hint == "split; peers that made this call end with an error too, and every rank calls session.reset()"
        )


def test_a_reset_that_a_rank_did_not_live_to_see_is_none() -> None:
    session = opened()
    session.fault = PEER_FAILED
    with pytest.raises(RankFailedError):
        session.call()

    def set_flags(rank: int, epoch: int) -> None:
        raise RuntimeError("lost the device")

    session._set_flags = set_flags  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="lost"):
        session.reset()
    with pytest.raises(RankFailedError):
        session.call()


def test_a_second_thread_is_told_that_the_session_is_busy() -> None:
    """Both would write the arguments of their launch into the same memory. With peers the call that was not made counts
    as any other."""

    def body(group: Group | None) -> str:
        session = opened(group)
        errors: list[BaseException] = []

        def call() -> None:
            try:
                session.call()
            except SessionError as error:
                errors.append(error)

        def call_in_another_thread() -> None:
            session.meanwhile = lambda: None
            second = threading.Thread(target=call)
            second.start()
            second.join()

        session.meanwhile = call_in_another_thread
        session.call()
        call()
        assert "another thread is in a call" in str(errors.pop(0))
        session.reset()
        session.call()
        return " ".join(map(str, errors))

    assert body(None) == ""
    for later in on_ranks(2, body):
        assert "the last call failed (SessionError: another thread" in later


def test_ids_of_valid_rows_are_looked_at_but_not_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look is to wait for the stream, which ends a capture."""
    session, ids = opened(), torch.tensor([[3], [4]])
    for valid in (1, torch.tensor(1, dtype=torch.int32), torch.tensor(-1, dtype=torch.int32)):
        session._look_at_ids(ids, valid)
    for valid in (None, 2, torch.tensor(9, dtype=torch.int32)):
        with pytest.raises(InputError, match=r"topk_ids\[1, 0\] is no expert's id; got 4"):
            session._look_at_ids(ids, valid)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    session._look_at_ids(ids, None)


def test_without_peers_and_in_a_capture_nobody_is_left_out() -> None:
    session = opened()
    with pytest.raises(InputError) as raised:
        session.call(InputError("wrong"))
    assert raised.value.hint is None
    session.call()

    def body(group: InprocGroup) -> None:
        session = opened(group)
        with pytest.raises(CaptureError):
            session.call(CaptureError("cold"))
        session.warmup()
        session.call()

    assert on_ranks(2, body) == [None, None]


def test_dropped_ids_are_summed_over_resets_from_zero() -> None:
    session = opened()  # in memory that was full of sevens
    session._words(1, "dropped_ids").add_(3)
    session.reset()
    assert [stats.dropped_ids for stats in session.stats()] == [0, 3]


def test_one_rank_of_a_group_reports_for_itself() -> None:
    def body(group: InprocGroup) -> tuple[Any, Any]:
        with opened(group) as session:
            assert session.warmup() >= 0
            assert session.diary == ["load", "meet: warmup"]
            return session.receive_counts().tolist(), session.stats()

    assert on_ranks(2, body) == [([0, 0], SessionStats()), ([1, 1], SessionStats())]
    with opened() as session:
        assert [counts.tolist() for counts in session.receive_counts()] == [[0, 0], [1, 1]]


def test_weights_that_were_prepared_in_any_mode_can_be_written_to_in_any_other() -> None:
    share: Any = shard(make_weights(PROBLEM, torch.device("cpu")), PROBLEM.ep_size)[0]
    parameters = replace(share, w2_weight_scale=torch.nn.Parameter(share.w2_weight_scale))
    with opened() as session:
        with torch.inference_mode():
            prepared = [session.prepare(share)]
        prepared.append(session.prepare(parameters))
        for weights in prepared:
            scale = weights.tensors["w2_scale"]
            scale[0] = 5  # as an expert load balancer does, which knows of no mode
            assert not scale.requires_grad


def test_taps_have_to_be_kept() -> None:
    with opened() as session:
        with pytest.raises(SessionError, match="keep_taps"):
            session.taps()
        session._gate_up = [torch.zeros(1)] * 2
        assert session.taps() == [None, None]

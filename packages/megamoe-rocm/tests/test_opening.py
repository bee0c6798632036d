"""Opening together: what one rank lacks is an error on all, before memory is shared; and what a session then shares."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from megamoe.backend import VirtualRanks
from megamoe.errors import BackendUnavailableError, ConfigError
from megamoe.problem import MoEProblem
from megamoe.symm import InprocGroup
from megamoe.testing.threads import on_ranks
from megamoe_rocm.planning import make_plan
from megamoe_rocm.rungs import PLANNED_FOR, Rung

pytest.importorskip("triton")

from megamoe_rocm import opening
from megamoe_rocm.kernels.launch import GFX950, Launch
from megamoe_rocm.runtime.launcher import Launcher

TIMEOUT_S = 20.0
PLAN = make_plan(
    MoEProblem(
        hidden_size=512,
        intermediate_size=256,
        num_experts=4,
        top_k=2,
        num_max_tokens_per_rank=24,
        ep_size=2,
        quant="a4w4",
    ),
    PLANNED_FOR[Rung.INTERPRETER],
)


class Idle(Launcher):
    """Runs nothing, on the CPU."""

    def __init__(self) -> None:
        self.device, self.target = torch.device("cpu"), GFX950

    def load(self, launches: Iterable[Launch]) -> None:
        pass

    def launch(self, launch: Launch, *, rank: int) -> None:
        pass


def open_on(group: InprocGroup) -> Any:
    return opening.open_session(PLAN, group, group, rung=Rung.INTERPRETER, timeout_s=TIMEOUT_S)


def test_a_rank_that_cannot_makes_all_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_launcher(rung: Rung) -> Launcher:
        if threading.current_thread().name == "1":
            raise BackendUnavailableError("no gfx950 here")
        return Idle()

    monkeypatch.setattr(opening, "make_launcher", make_launcher)
    first, second = on_ranks(2, open_on)
    assert isinstance(first, BackendUnavailableError)
    assert str(first).startswith("rank 1 could not look at the machine")
    assert str(second) == "no gfx950 here"


def test_out_of_memory_on_one_rank_is_an_error_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    from megamoe_rocm.session import RocmSession

    take = RocmSession._local_memory

    def local_memory(session: RocmSession) -> torch.Tensor:
        if session.ep_rank == 0:
            raise torch.OutOfMemoryError("HIP out of memory")
        return take(session)

    monkeypatch.setattr(opening, "make_launcher", lambda rung: Idle())
    monkeypatch.setattr(RocmSession, "_local_memory", local_memory)
    errors = on_ranks(2, open_on)
    assert all(isinstance(error, BackendUnavailableError) for error in errors)
    assert all("out of memory" in str(error) for error in errors)


def test_ranks_share_what_peers_address_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "make_launcher", lambda rung: Idle())
    layout = PLAN.workspace

    def body(group: InprocGroup) -> tuple[list[int], bool, bool]:
        with open_on(group) as session:
            (memory,) = session._ranks.values()
            shared = session._memory.ranks[group.rank]
            inside = [shared.data_ptr() <= memory.bytes(name).data_ptr() for name in ("combine", "rank_finished")]
            pool = memory.bytes("pool_payload").data_ptr()
            outside = not shared.data_ptr() <= pool < shared.data_ptr() + shared.numel()
            return [rank.numel() for rank in session._memory.ranks], all(inside), outside

    assert on_ranks(2, body) == [([layout.symmetric_bytes] * 2, True, True)] * 2
    assert layout.symmetric_bytes < PLAN.bytes


def test_the_instruction_interpreter_has_all_ranks_in_one_process() -> None:
    errors = on_ranks(2, lambda group: opening.open_session(PLAN, group, group, rung=Rung.ISA, timeout_s=TIMEOUT_S))
    assert all(isinstance(error, ConfigError) for error in errors)
    assert all("VirtualRanks" in str(error) for error in errors)
    with pytest.raises(ConfigError, match="VirtualRanks"):  # its session takes lists, as that of virtual ranks
        opening.open_session(PLAN, None, None, rung=Rung.ISA, timeout_s=TIMEOUT_S)


def test_without_the_device_opening_says_what_is_missing() -> None:
    with pytest.raises(BackendUnavailableError, match="no_device"):
        opening.open_session(PLAN, VirtualRanks(), None, rung=Rung.NVIDIA, timeout_s=TIMEOUT_S)

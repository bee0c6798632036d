"""Ranks as processes: the bits of virtual ranks, and what survivors see when one is killed."""

from __future__ import annotations

import os
import signal

import pytest
import rank_workers
import torch
from layers import make_layer

from megamoe import VirtualRanks
from megamoe.launch import run_ranks, spawn_ranks
from megamoe.reference.backend import ReferenceBackend

BACKEND = ReferenceBackend()


def segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "megamoe" in name}


@pytest.mark.parametrize("ep_size, config, over_gloo", [(4, "tight", False), (2, None, True)])
def test_processes_give_the_bits_of_virtual_ranks(ep_size: int, config: str | None, over_gloo: bool) -> None:
    layer = make_layer(**rank_workers.LAYER, ep_size=ep_size)
    with BACKEND.open(BACKEND.plan(layer.problem), VirtualRanks()) as session:
        expected = session.forward(*layer.all_tokens(), [session.prepare(owned) for owned in layer.all_weights()])
    got = run_ranks(rank_workers.forward, ep_size, config, over_gloo, 4, timeout_s=120, num_threads=1)
    assert torch.equal(torch.cat(got), torch.cat(expected))


@pytest.mark.parametrize("where", ["gemm1", "send_rows"])
def test_a_killed_rank_ends_the_call_on_all_others(where: str) -> None:
    """At once, since its sockets close; nothing of it stays behind; and the others go on in a new session."""
    before = segments()
    layer = make_layer(**rank_workers.LAYER, ep_size=2)
    with BACKEND.open(BACKEND.plan(layer.problem), VirtualRanks()) as session:
        expected = session.forward(*layer.all_tokens(), [session.prepare(owned) for owned in layer.all_weights()])
    outcomes = spawn_ranks(rank_workers.forward_until_killed, 3, 1, where, timeout_s=120, grace_s=60, num_threads=1)
    for outcome in outcomes:
        if outcome.rank == 1:
            assert outcome.error.exit_code == -signal.SIGKILL
        else:
            assert outcome.error is None, outcome.traceback
            error, seconds, is_nan, left, again = outcome.value
            assert error.startswith("RankFailedError: ")
            assert "rank 1's process ended" in error
            assert seconds < 30  # its timeout is 60
            assert is_nan
            assert left == before
            assert torch.equal(again, expected[(0, 2).index(outcome.rank)])
    assert segments() == before

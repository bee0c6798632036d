"""What the conformance matrix does not ask of one session on a GPU: time-outs by the clock, and what follows one."""

from __future__ import annotations

import time

import pytest
import torch

from megamoe.backend import VirtualRanks
from megamoe.errors import MegaMoETimeoutError
from megamoe.problem import MoEProblem
from megamoe.reference.staged import staged
from megamoe.testing.cases import A4W4, Layer, build
from megamoe.testing.data import make_calls, make_weights, shard
from megamoe.testing.tolerances import rel_l2
from megamoe_rocm.backend import RocmBackend

pytestmark = pytest.mark.gpu
TIMEOUT_S = 0.5


def layer() -> tuple[MoEProblem, list, tuple]:
    case = build(Layer.EDGE, "own", A4W4, device_class="gpu", ep_size=2, tokens=(33, 20))
    device = torch.device("cuda", 0)
    calls = make_calls(case, device, round_=0)
    arguments = ([c.hidden_states for c in calls], [c.topk_ids for c in calls], [c.topk_weights for c in calls])
    return case.problem, shard(make_weights(case.problem, device, redundant=False), 2), arguments


def test_a_wait_ends_when_its_time_is_over_and_reset_makes_the_session_usable_again() -> None:
    problem, weights, arguments = layer()
    rocm = RocmBackend()
    with torch.device("cuda", 0):
        expected = staged(problem, *arguments, weights).outputs
    with rocm.open(rocm.plan(problem), VirtualRanks(), timeout_s=TIMEOUT_S) as session:
        session.warmup()
        prepared = [session.prepare(of_rank) for of_rank in weights]
        run = session._launcher.launch
        session._launcher.launch = lambda launch, rank: (
            None if (launch.kernel.__name__, rank) == ("gemm2_p2p", 1) else run(launch, rank=rank)
        )
        start = time.perf_counter()
        outputs = session.forward(*arguments, prepared)
        with pytest.raises(MegaMoETimeoutError) as raised:
            session.check()
        waited = time.perf_counter() - start
        # Rank 0 waits for rank 1; then rank 1 hears of it, and does not wait for itself.
        assert TIMEOUT_S <= waited < 2 * TIMEOUT_S
        assert (raised.value.rank, raised.value.peer, raised.value.phase) == (0, 1, "combine")
        assert all(output.isnan().all() for output in outputs)
        print(f"waited {waited:.3f} s for a time-out of {TIMEOUT_S} s: {raised.value}")
        session._launcher.launch = run
        with pytest.raises(MegaMoETimeoutError):
            session.forward(*arguments, prepared)
        session.reset()
        for got, right in zip(session.forward(*arguments, prepared), expected, strict=True):
            assert rel_l2(got, right) < 0.02


def test_many_calls_without_a_synchronisation_between_them() -> None:
    problem, weights, arguments = layer()
    rocm = RocmBackend()
    with rocm.open(rocm.plan(problem), VirtualRanks()) as session:
        prepared = [session.prepare(of_rank) for of_rank in weights]
        session.start_epochs(2**32 - 100)
        first = [output.clone() for output in session.forward(*arguments, prepared)]
        for _ in range(300):
            outputs = session.forward(*arguments, prepared)
        session.check()
        assert all(torch.equal(a, b) for a, b in zip(first, outputs, strict=True))

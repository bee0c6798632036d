"""A session in the interpreter: virtual ranks, and ranks in threads of their own over an in-process group."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness import SMALL, problem, random_inputs, random_weights, rel_l2
from torch import Tensor

from megamoe.backend import Session, VirtualRanks
from megamoe.errors import CapacityError, InputError, LayoutError, MegaMoETimeoutError, SessionError
from megamoe.problem import MoEProblem
from megamoe.reference.staged import staged
from megamoe.schedule.device_spec import MI355X
from megamoe_rocm.heuristics import config_of
from megamoe_rocm.opening import open_session
from megamoe_rocm.planning import make_plan
from megamoe_rocm.rungs import Rung
from megamoe_rocm.session import PEER_GAVE_UP, RocmSession
from megamoe_rocm.symm_mori import MoriGroup

DEVICE = replace(MI355X, num_sms=1)  # few programs: the interpreter runs them one after the other
BOUND = 1e-2


def open_virtual(of: MoEProblem, timeout_s: float = 60.0) -> RocmSession:
    plan = make_plan(of, DEVICE, config=config_of(of, "small", (SMALL,)))
    return open_session(plan, VirtualRanks(), None, rung=Rung.INTERPRETER, timeout_s=timeout_s)


def prepared(session: Session) -> list:
    return [session.prepare(random_weights(session.plan.problem, r)) for r in range(session.plan.problem.ep_size)]


def reference(of: MoEProblem, inputs) -> list[Tensor]:
    weights = [random_weights(of, rank) for rank in range(of.ep_size)]
    return staged(of, inputs.hidden_states, inputs.topk_ids, inputs.topk_weights, weights).outputs


def arguments(inputs) -> tuple:
    return inputs.hidden_states, inputs.topk_ids, inputs.topk_weights


def test_calls_counts_taps_and_statistics() -> None:
    of = problem(expert_bias=True, transport="fp8_blockwise_1x32")
    with open_virtual(of) as session:
        session.keep_taps()
        weights = prepared(session)
        session.start_epochs(2**32 - 2)
        for seed, tokens in enumerate([(9, 4), (0, 6)]):
            inputs = random_inputs(of, tokens, seed=seed, low=-1)
            outs = session.forward(*arguments(inputs), weights)
            for out, expected in zip(outs, reference(of, inputs), strict=True):
                assert len(expected) == 0 or rel_l2(out, expected) < BOUND
            session.check()
            ids = torch.cat([i.flatten() for i in inputs.topk_ids])
            expected_counts = torch.bincount(ids[ids >= 0], minlength=of.num_experts).int()
            assert torch.equal(torch.cat(session.receive_counts()), expected_counts)
        weights_of = [random_weights(of, rank) for rank in range(of.ep_size)]
        expected_taps = staged(of, inputs.hidden_states, inputs.topk_ids, inputs.topk_weights, weights_of).taps
        for tap, expected in zip(session.taps(), expected_taps, strict=True):
            if tap is None:
                assert len(expected.src_pick) == 0
                continue
            key = torch.stack((tap.local_expert, tap.src_rank, tap.src_pick), 1).tolist()
            order = torch.tensor(sorted(range(len(key)), key=key.__getitem__))
            assert torch.equal(tap.src_pick[order], expected.src_pick)
            assert rel_l2(tap.gate_up[order], expected.gate_up) < 1e-6
            assert (tap.a2.payload[order] != expected.a2.payload).float().mean() < 1e-2
        assert [stats.calls for stats in session.stats()] == [2, 2]


def test_padding_given_outputs_and_a_reused_session() -> None:
    of = problem(quant="a8w4")
    with open_virtual(of) as session:
        weights = prepared(session)
        inputs = random_inputs(of, (8, 5))
        outs = [torch.full((count, of.hidden_size), 7.0).bfloat16() for count in (8, 5)]
        limits = [torch.tensor([3], dtype=torch.int32), 5]
        result = session.forward(*arguments(inputs), weights, out=outs, num_tokens=limits)
        assert all(a is b for a, b in zip(result, outs, strict=True))
        assert (outs[0][3:] == 0).all()
        full = session.forward(*arguments(inputs), weights)
        assert torch.equal(full[0][:3], outs[0][:3])
        assert session.warmup() >= 0
        assert torch.equal(session.forward(*arguments(inputs), weights)[1], full[1])


def test_wrong_arguments_are_refused_before_a_launch() -> None:
    of = problem()
    with open_virtual(of) as session:
        weights = prepared(session)
        inputs = random_inputs(of, (8, 5))
        x, ids, w = arguments(inputs)
        with pytest.raises(CapacityError, match="24"):
            session.forward([torch.zeros(25, 512, dtype=torch.bfloat16), x[1]], ids, w, weights)
        with pytest.raises(InputError, match="virtual rank"):
            session.forward(x[0], ids, w, weights)
        odd = torch.empty(1 + 8 * 512, dtype=torch.bfloat16)[1:].view(8, 512)
        with pytest.raises(InputError, match="out is not aligned to 16 bytes"):
            session.forward(x, ids, w, weights, out=[odd, None])
        memory = torch.zeros_like(x[1])
        with pytest.raises(InputError, match="virtual rank 1: out shares memory with topk_weights"):
            session.forward(x, ids, [w[0], memory.view(torch.float32)[:, : of.top_k]], weights, out=[None, memory])
        for num_tokens in (9, 2.5, True, "8", torch.tensor([8])):
            with pytest.raises(InputError, match="num_tokens"):
                session.forward(x, ids, w, weights, num_tokens=[num_tokens, 5])
        with pytest.raises(LayoutError):
            session.forward(x, ids, w, [replace(prepared, layout="other") for prepared in weights])
    with pytest.raises(SessionError, match="closed"):
        session.forward(x, ids, w, weights)


def test_a_rank_with_peers_is_left_out_by_wrong_arguments_until_the_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    of = problem()
    with open_virtual(of) as session:
        weights = prepared(session)
        x, ids, w = arguments(random_inputs(of, (2, 1)))
        group = SimpleNamespace(size=2, if_a_rank_died=None, barrier=lambda **_: None)
        monkeypatch.setattr(session, "_group", group)  # as if there were others
        with pytest.raises(InputError, match=r"wrong dtype.*every rank calls session.reset\(\)"):
            session.forward(x, ids, [each.double() for each in w], weights)
        with pytest.raises(SessionError, match="the last call failed .InputError: .*wrong dtype"):
            session.forward(x, ids, w, weights)
        session.reset()
        assert [len(out) for out in session.forward(x, ids, w, weights)] == [2, 1]


def test_a_timeout_is_named_and_reset_makes_the_session_usable_again() -> None:
    of = problem()
    with open_virtual(of, timeout_s=1e-4) as session:
        weights = prepared(session)
        inputs = random_inputs(of, (4, 4))
        expected = session.forward(*arguments(inputs), weights)
        run = session._launcher.launch
        session._launcher.launch = lambda launch, rank: (
            None if launch.kernel.__name__ == "gemm2_p2p" else run(launch, rank=rank)
        )
        outs = session.forward(*arguments(inputs), weights)
        assert all(out.isnan().all() for out in outs)
        session._launcher.launch = run
        with pytest.raises(MegaMoETimeoutError) as raised:
            session.forward(*arguments(inputs), weights)
        assert (raised.value.phase, raised.value.epoch) == ("combine", 2)
        with pytest.raises(MegaMoETimeoutError):
            session.check()
        session.reset()
        for out, other in zip(session.forward(*arguments(inputs), weights), expected, strict=True):
            assert torch.equal(out, other)


@pytest.mark.parametrize("why", [PEER_GAVE_UP - 1, PEER_GAVE_UP])
def test_without_a_dead_rank_mori_has_to_be_restarted(why: int) -> None:
    session = SimpleNamespace(_timeout_s=1.0, _if_a_rank_died=MoriGroup.if_a_rank_died)
    error = RocmSession._given_up(session, [[why, 0, 1, 0, 7, 0, 6, 7]])
    assert "died, restart the processes of all ranks" in str(error)

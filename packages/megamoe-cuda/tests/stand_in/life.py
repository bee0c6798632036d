"""Sessions in unusual surroundings; run by ../test_session_host.py beside the matrix."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe.backend import VirtualRanks
from megamoe.bench.trace import bars
from megamoe.errors import CaptureError, InputError, MegaMoETimeoutError, SessionError, WorkspaceError
from megamoe.problem import MoEProblem, QuantMode
from megamoe.schedule.device_spec import H200
from megamoe.symm import PeerMemory
from megamoe.testing.data import make_weights, shard
from megamoe_cuda.backend import CudaBackend
from megamoe_cuda.launcher import FAILURE_RECORD, FAILURES, PHASES
from megamoe_cuda.trace import trace_of

PROBLEM = MoEProblem(
    hidden_size=256, intermediate_size=128, num_experts=4, top_k=2, num_max_tokens_per_rank=16, ep_size=2
)
BACKEND = CudaBackend()


def open_session(**options: Any) -> Any:
    return BACKEND.open(BACKEND.plan(PROBLEM), VirtualRanks(), **options)


def make_call(seed: int) -> tuple[list[torch.Tensor], ...]:
    rng = torch.Generator().manual_seed(seed)
    hidden = [torch.randn(5, PROBLEM.hidden_size, generator=rng).bfloat16() for _ in range(2)]
    ids = [torch.randint(0, PROBLEM.num_experts, (5, 2), generator=rng) for _ in range(2)]
    return hidden, ids, [torch.rand(5, 2, generator=rng) for _ in range(2)]


def test_opened_in_inference_mode_and_under_the_meta_device() -> None:
    shares = shard(make_weights(PROBLEM, torch.device("cpu")), 2)
    with torch.inference_mode(), torch.device("meta"):
        session = open_session()
    with torch.inference_mode():
        weights = [session.prepare(share) for share in shares]
        expected = torch.cat(session.forward(*make_call(0), weights))
    session.reset()
    for tensor in weights[0].tensors.values():
        tensor[0].copy_(tensor[0].clone())
    assert torch.equal(torch.cat(session.forward(*make_call(0), weights)), expected)
    session.close()


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(
    "value",
    [None, 2.5, "x", (torch.zeros(5, 256), 2.5), (torch.zeros(5, 256).bfloat16(), None)],
    ids=["none", "number", "text", "half a pair", "a pair with none"],
)
def test_what_is_no_tensor_is_refused_by_name(place: int, value: Any) -> None:
    """They raised AttributeError and TypeError out of the host path that spares checks."""
    with open_session() as session:
        weights = [session.prepare(share) for share in shard(make_weights(PROBLEM, torch.device("cpu")), 2)]
        arguments: list[Any] = [*make_call(0), weights]
        expected = torch.cat(session.forward(*arguments))
        wrong = list(arguments)
        wrong[place] = [arguments[place][0], value]
        with pytest.raises(InputError, match="hidden_states is neither|is not a tensor|are not prepared"):
            session.forward(*wrong)
        for num_tokens in (True, 2.5, "3"):
            with pytest.raises(InputError, match="num_tokens is no count"):
                session.forward(*arguments, num_tokens=[5, num_tokens])
        assert torch.equal(torch.cat(session.forward(*arguments)), expected)


@pytest.mark.parametrize("error", [None, MegaMoETimeoutError, RuntimeError])
def test_memory_with_a_collective_release_is_kept_when_a_rank_is_gone(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None
) -> None:
    """NVSHMEM's free would wait for the dead rank for ever."""
    session, released = open_session(), []

    def meet(phase: str) -> None:
        if error is MegaMoETimeoutError:
            raise MegaMoETimeoutError(rank=0, peer=1, phase=phase, timeout_s=1, epoch=0)
        if error is not None:
            raise error("connection closed by peer")

    monkeypatch.setattr(session, "_meet", meet)
    session._memory = PeerMemory(ranks=session._memory.ranks, release=lambda: released.append(True))
    session.close()
    assert released == ([True] if error is None else [])


def test_a_failure_is_raised_until_the_session_is_reset() -> None:
    """Of several virtual ranks' records, the one that tells the cause; dropped ids are summed over a reset."""
    with open_session() as session:
        weights = [session.prepare(share) for share in shard(make_weights(PROBLEM, torch.device("cpu")), 2)]
        hidden, ids, router = make_call(0)
        ids[0][2, 1] = PROBLEM.num_experts
        expected = torch.cat(session.forward(hidden, ids, router, weights))
        heard = FAILURE_RECORD.pack(FAILURES.index("peer failed"), 0, 1, PHASES.index("combine"), 1, 1, 0, 1)
        cause = FAILURE_RECORD.pack(FAILURES.index("timeout"), 1, 0, PHASES.index("dispatch"), 1, 0, 0, 1)
        session._records.copy_(torch.frombuffer(bytearray(heard + cause), dtype=torch.int32))
        for call in (session.check, lambda: session.forward(hidden, ids, router, weights)):
            with pytest.raises(MegaMoETimeoutError, match="rank 1 waited .* for rank 0 in phase dispatch") as raised:
                call()
            assert (raised.value.got, raised.value.expected) == (0, 1)
        session.reset()
        assert torch.equal(torch.cat(session.forward(hidden, ids, router, weights)), expected)
        stats = session.stats()
        assert [rank.dropped_ids for rank in stats] == [2, 0]
        assert [rank.timeouts for rank in stats] == [1, 1]


def test_a_rank_with_peers_is_left_out_by_wrong_arguments_until_the_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next call would pass for this one with its peers."""
    with open_session() as session:
        weights = [session.prepare(share) for share in shard(make_weights(PROBLEM, torch.device("cpu")), 2)]
        hidden, ids, router = make_call(0)
        expected = torch.cat(session.forward(hidden, ids, router, weights))
        group = SimpleNamespace(size=2, if_a_rank_died=None, barrier=lambda **_: None)
        monkeypatch.setattr(session, "_group", group)  # as if there were others
        with pytest.raises(InputError, match=r"wrong dtype.*every rank calls session.reset\(\)"):
            session.forward(hidden, ids, [x.double() for x in router], weights)
        with pytest.raises(SessionError, match="the last call failed .InputError: .*wrong dtype"):
            session.forward(hidden, ids, router, weights)
        session.reset()
        assert torch.equal(torch.cat(session.forward(hidden, ids, router, weights)), expected)


def test_a_call_in_other_shapes_is_checked_anew() -> None:
    """Shapes that were found right are not looked at again; others are."""
    with open_session() as session:
        weights = [session.prepare(share) for share in shard(make_weights(PROBLEM, torch.device("cpu")), 2)]
        hidden, ids, router = make_call(0)
        session.forward(hidden, ids, router, weights)
        with pytest.raises(InputError, match="topk_weights has the wrong dtype"):
            session.forward(hidden, ids, [x.double() for x in router], weights)
        with pytest.raises(InputError, match="one entry per virtual rank"):
            session.forward(hidden, ids, router[0], weights)
        session.forward(hidden, ids, router, weights)


def test_ids_are_checked_on_the_host_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_DEBUG", "1")
    with open_session() as session:
        weights = [session.prepare(share) for share in shard(make_weights(PROBLEM, torch.device("cpu")), 2)]
        hidden, ids, router = make_call(0)
        ids[1][3, 1] = PROBLEM.num_experts
        with pytest.raises(InputError, match=r"topk_ids\[3, 1\] is no expert's id; got 4"):
            session.forward(hidden, ids, router, weights)


def test_a_workspace_can_be_handed_in_if_it_fits() -> None:
    plan = BACKEND.plan(PROBLEM)
    memory = torch.zeros(2 * plan.bytes, dtype=torch.uint8)
    open_session(workspace=memory).close()
    for wrong in (memory[:-1], memory[1:], memory.view(torch.int32)):
        with pytest.raises(WorkspaceError):
            open_session(workspace=wrong)


def test_in_place_with_padding_computes_on_the_tokens() -> None:
    """Padding rows of `out` are zeroed before the launch: the tokens in the same memory were, too."""
    with open_session() as session:
        weights = [session.prepare(share) for share in shard(make_weights(PROBLEM, torch.device("cpu")), 2)]
        hidden, ids, router = make_call(0)
        for num_tokens in ([3, 5], [torch.tensor(3, dtype=torch.int32), torch.tensor(5, dtype=torch.int32)]):
            expected = session.forward(hidden, ids, router, weights, num_tokens=num_tokens)
            rows = [aligned(7, PROBLEM.hidden_size) for _ in hidden]
            for out, tokens in (
                ([x[:5] for x in rows], [x[:5] for x in rows]),
                ([x[2:] for x in rows], [x[:5] for x in rows]),
                ([x[:5] for x in rows[::-1]], [x[:5] for x in rows]),  # in the place of another rank's
            ):
                for place, values in zip(tokens, hidden, strict=True):
                    place.copy_(values)
                outputs = session.forward(tokens, ids, router, weights, out=out, num_tokens=num_tokens)
                assert [y.data_ptr() for y in outputs] == [y.data_ptr() for y in out]
                assert torch.equal(torch.cat(outputs), torch.cat(expected))


@pytest.mark.parametrize("num_tokens", [None, [3, 5]], ids=["all rows", "padding"])
def test_out_may_come_from_inference_mode_or_ask_for_gradients(num_tokens: list[int] | None) -> None:
    with open_session() as session:
        weights = [session.prepare(share) for share in shard(make_weights(PROBLEM, torch.device("cpu")), 2)]
        expected = session.forward(*make_call(0), weights, num_tokens=num_tokens)
        with torch.inference_mode():
            out = [aligned(5, PROBLEM.hidden_size)]
        out.append(aligned(5, PROBLEM.hidden_size).requires_grad_())
        outputs = session.forward(*make_call(0), weights, out=out, num_tokens=num_tokens)
        assert all(map(torch.equal, outputs, expected))


def aligned(rows: int, columns: int, *, offset: int = 0) -> torch.Tensor:
    """BF16, `offset` elements behind a multiple of 16 bytes."""
    memory = torch.empty(rows * columns + 16, dtype=torch.bfloat16)
    first = -memory.data_ptr() % 16 // 2 + offset
    return memory[first : first + rows * columns].view(rows, columns)


def test_an_address_that_the_kernel_can_not_take_is_refused_in_shapes_seen_before() -> None:
    with open_session() as session:
        weights = [session.prepare(share) for share in shard(make_weights(PROBLEM, torch.device("cpu")), 2)]
        hidden, ids, router = make_call(0)
        good = [aligned(5, PROBLEM.hidden_size) for _ in hidden]
        session.forward(hidden, ids, router, weights, out=good)
        bad = [good[0], aligned(5, PROBLEM.hidden_size, offset=1)]
        with pytest.raises(InputError, match="out is not aligned to 16 bytes; got 0x.*expected a multiple of 16"):
            session.forward(hidden, ids, router, weights, out=bad)
        with pytest.raises(InputError, match="virtual rank 1: hidden_states is not aligned to 16 bytes"):
            session.forward(bad, ids, router, weights, out=good)
        shared = good[1].view(torch.float32).flatten()[4:14].view(5, 2)
        with pytest.raises(InputError, match="virtual rank 1: out shares memory with topk_weights"):
            session.forward(hidden, ids, [router[0], shared], weights, out=good)
        experts = weights[0].tensors["w2_weight"]
        over = experts.flatten().view(torch.uint8)[: 2 * 5 * PROBLEM.hidden_size].view(torch.bfloat16)
        before = experts.clone()
        for _ in range(2):
            with pytest.raises(InputError, match="virtual rank 0: out shares memory with w2_weight"):
                session.forward(hidden, ids, router, weights, out=[over.view(5, -1), good[1]])
        assert torch.equal(experts, before)
        session.forward(hidden, ids, router, weights, out=good)


def test_gradients_and_weights_elsewhere_are_refused_in_shapes_seen_before() -> None:
    with open_session() as session:
        weights = [session.prepare(share) for share in shard(make_weights(PROBLEM, torch.device("cpu")), 2)]
        hidden, ids, router = make_call(0)
        expected = torch.cat(session.forward(hidden, ids, router, weights))
        moved = replace(weights[1], tensors={name: x.to("meta") for name, x in weights[1].tensors.items()})
        with pytest.raises(InputError, match="prepared weights on another device: w13_weight"):
            session.forward(hidden, ids, router, [weights[0], moved])
        differentiable = [hidden[0], hidden[1].clone().requires_grad_()]
        with pytest.raises(InputError, match="there is no backward"):
            session.forward(differentiable, ids, router, weights)
        with torch.no_grad():
            assert torch.equal(torch.cat(session.forward(differentiable, ids, router, weights)), expected)


def test_arguments_of_another_device_are_refused() -> None:
    with open_session() as session:
        weights = [session.prepare(share) for share in shard(make_weights(PROBLEM, torch.device("cpu")), 2)]
        elsewhere = [[tensor.to("meta") for tensor in tensors] for tensors in make_call(0)]
        with pytest.raises(InputError, match="arguments on another device; got meta; expected cpu"):
            session.forward(*elsewhere, weights)


def test_a_call_in_a_capture_needs_its_kernel_to_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_session() as session:
        weights = [session.prepare(share) for share in shard(make_weights(PROBLEM, torch.device("cpu")), 2)]
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(CaptureError, match=r"can't be while a graph is captured; call session.warmup\(\)"):
            session.forward(*make_call(0), weights)
        session.warmup()
        session.forward(*make_call(0), weights)


def test_taps_are_kept_only_on_request() -> None:
    with open_session() as session, pytest.raises(SessionError, match="keep_taps"):
        session.taps()


def test_a_trace_is_kept_on_request_and_drawn() -> None:
    with open_session() as session:
        weights = [session.prepare(share) for share in shard(make_weights(PROBLEM, torch.device("cpu")), 2)]
        expected = session.forward(*make_call(0), weights)
        with pytest.raises(SessionError, match="keep_trace"):
            session.stamps_ns()
        session.keep_trace()
        assert not any(any(map(any, ctas)) for ctas in session.stamps_ns())  # no call yet
        outputs = session.forward(*make_call(0), weights)
        assert all(map(torch.equal, outputs, expected))
        trace = trace_of("a call", session)
        assert len(trace.stamps_ns) == 2
        assert len(trace.stamps_ns[0]) == H200.num_sms // 2
        # The stand-in's stamps are 1, 2, 3... us, on rank 1 twice that.
        found = {(bar.rank, bar.cta, bar.span.name): (bar.begin_us, bar.end_us) for bar in bars(trace)}
        assert len(found) == 2 * (H200.num_sms // 2) * len(trace.spans)
        assert found[0, 0, "stage and route"] == (0.0, 1.0)
        assert found[1, 1, "multiply"] == (18.0, 22.0)


def test_a_trace_has_no_row_of_a_cta_that_the_call_left_out() -> None:
    """Four ranks have 33 SMs each, of which clusters use 32."""
    problem = MoEProblem(
        hidden_size=512,
        intermediate_size=256,
        num_experts=4,
        top_k=1,
        num_max_tokens_per_rank=100,
        ep_size=4,
        quant=QuantMode.BF16,
    )
    with BACKEND.open(BACKEND.plan(problem), VirtualRanks()) as session:
        weights = [session.prepare(share) for share in shard(make_weights(problem, torch.device("cpu")), 4)]
        session.keep_trace()
        for num_tokens, num_ctas in ((5, 33), (100, 32)):
            hidden = [torch.ones(num_tokens, problem.hidden_size, dtype=torch.bfloat16)] * 4
            ids = [torch.full((num_tokens, 1), rank) for rank in range(4)]
            session.forward(hidden, ids, [torch.ones(num_tokens, 1)] * 4, weights)
            assert {len(ctas) for ctas in session.stamps_ns()} == {num_ctas}

"""Shared experts: ids and weights as a session takes them, one wide MLP cut into several, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megamoe.backend import Reason
from megamoe.checkpoint import convert
from megamoe.errors import ConfigError, InputError
from megamoe.expert_map import ExpertMap
from megamoe.meter import Meter
from megamoe.problem import MoEProblem, QuantMode
from megamoe.reference.backend import ReferenceBackend
from megamoe.reference.oracle import oracle
from megamoe.shared_experts import SharedExperts, fusible
from megamoe.tensors import Bf16Weights
from megamoe.testing.data import make_weights
from megamoe.testing.tolerances import rel_l2

PROBLEM = MoEProblem(
    hidden_size=256, intermediate_size=128, num_experts=6, top_k=2, num_max_tokens_per_rank=8, ep_size=2
)
BACKEND = ReferenceBackend()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_picks(dtype: torch.dtype) -> None:
    """Rank 0 owns 0 to 2 and the shared 3, 4; rank 1 owns 5 to 7 and the shared 8, 9."""
    ids = torch.tensor([[0, 2], [3, 5], [-1, 4], [-1, -1], [6, -2]], dtype=dtype)
    weights = torch.rand(5, 2)
    for rank, own in ((0, (3, 4)), (1, (8, 9))):
        shared = SharedExperts(PROBLEM, num_fused_shared_experts=2, ep_rank=rank)
        assert (shared.problem.num_experts, shared.problem.top_k) == (10, 4)
        got, got_weights = shared.picks(ids, weights)
        assert got.dtype == dtype
        assert got.tolist() == [
            [0, 2, *own],
            [5, 7, *own],
            [-1, 6, *own],
            [-1, -1, -1, -1],
            [10, -2, *own],  # ids that are no expert's stay so
        ]
        assert torch.equal(got_weights[:, :2], weights)
        assert bool((got_weights[:, 2:] == 1).all())
        assert shared.picks(ids[:0], weights[:0])[0].shape == (0, 4)


def test_picks_compile_into_one_graph() -> None:
    shared = SharedExperts(PROBLEM, num_fused_shared_experts=1, ep_rank=1)
    compiled = torch.compile(shared.picks, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (5, 3):
        ids, weights = torch.randint(-1, 6, (num_tokens, 2)), torch.rand(num_tokens, 2)
        for got, expected in zip(compiled(ids, weights), shared.picks(ids, weights), strict=True):
            assert torch.equal(got, expected)


def test_redundant_experts_come_first() -> None:
    """Logical to physical ids by the map, then shared experts: a load balancer does not see them."""
    experts = ExpertMap(torch.tensor([0, 1, 2, 3, 0, 1]), num_logical_experts=4, ep_rank=0, ep_size=2)
    shared = SharedExperts(PROBLEM, num_fused_shared_experts=1, ep_rank=0)
    ids, _ = shared.picks(experts.to_physical(torch.tensor([[0, 3]])), torch.rand(1, 2))
    assert ids.tolist() == [[0, 4, 3]]
    counts = torch.tensor([5, 6, 7, 9])
    assert experts.logical_counts(shared.routed_counts(counts)).tolist() == [5, 6, 7, 0]


@pytest.mark.parametrize("quant", ["bf16", "a8w8", "a4w4"])
@pytest.mark.parametrize("bias", [False, True])
def test_one_wide_mlp_is_cut_into_experts_that_add_up_to_it(quant: str, bias: bool) -> None:
    problem = replace(PROBLEM, ep_size=1, quant=quant, expert_bias=bias)
    wide_problem = replace(problem, num_experts=1, top_k=1, intermediate_size=256)
    wide, routed = make_weights(wide_problem, torch.device("cpu"), seed=1), make_weights(problem, torch.device("cpu"))
    shared = SharedExperts(problem, num_fused_shared_experts=2, ep_rank=0)
    joined = shared.join(routed, wide)
    x = torch.randn(5, 256)
    expected = oracle(wide_problem, x, torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1), [wide])
    ids = torch.tensor([6, 7]).expand(5, -1)
    got = oracle(replace(shared.problem, top_k=2), x, ids, torch.ones(5, 2), [joined])
    assert rel_l2(got, expected) < 1e-5
    for name, tensor in routed.tensors():
        assert torch.equal(dict(joined.tensors())[name][:6].view(torch.uint8), tensor.view(torch.uint8))


def test_what_does_not_fit_is_refused() -> None:
    shared = SharedExperts(PROBLEM, num_fused_shared_experts=1, ep_rank=0)
    local = replace(PROBLEM, num_experts=3, ep_size=1)
    routed = make_weights(local, torch.device("cpu"))
    one = make_weights(replace(local, num_experts=1, top_k=1), torch.device("cpu"))
    wide = make_weights(replace(local, num_experts=1, top_k=1, intermediate_size=384), torch.device("cpu"))
    in_bf16 = make_weights(replace(local, num_experts=1, top_k=1, quant="bf16"), torch.device("cpu"))
    assert isinstance(in_bf16, Bf16Weights)
    shared.join(routed, one)
    shared.join(routed, convert(in_bf16, QuantMode.A8W8))
    with pytest.raises(InputError, match="got Bf16Weights; expected Fp8BlockWeights; convert them"):
        shared.join(routed, in_bf16)
    for wrong in (wide, make_weights(replace(local, num_experts=2), torch.device("cpu"))):
        with pytest.raises(InputError, match="do not fit the routed ones in w13_weight"):
            shared.join(routed, wrong)
    for count, rank in ((0, 0), (15, 0), (1, 2)):
        with pytest.raises(ConfigError):
            SharedExperts(PROBLEM, num_fused_shared_experts=count, ep_rank=rank)
    assert fusible(BACKEND, PROBLEM, 14).ok
    assert fusible(BACKEND, PROBLEM, 15).reason is Reason.TOP_K


def test_a_meter_wants_a_number_of_calls() -> None:
    with BACKEND.open(BACKEND.plan(replace(PROBLEM, ep_size=1))) as session:
        for wrong in (0, -1, 2.5, True):
            with pytest.raises(ConfigError, match="every is not a number of calls"):
                Meter(session, every=wrong)  # type: ignore[arg-type]


def test_a_meter_calls_routed_experts_even_beside_shared_ones() -> None:
    """Two picks of each of six experts, and all six tokens through both shared ones."""
    fused = SharedExperts(replace(PROBLEM, ep_size=1), num_fused_shared_experts=2, ep_rank=0)
    ids = torch.arange(12, dtype=torch.int32).reshape(6, 2) % 6
    x = torch.randn(6, PROBLEM.hidden_size, dtype=torch.bfloat16)
    with BACKEND.open(BACKEND.plan(fused.problem)) as session:
        weights = session.prepare(make_weights(fused.problem, torch.device("cpu")))
        knows, blind = Meter(session, num_fused_shared_experts=2), Meter(session)
        session.forward(x, *fused.picks(ids, torch.full((6, 2), 0.5)), weights)
        for meter in (knows, blind):
            meter.count()
        (metrics,), (plain,) = knows.collect(), blind.collect()
        assert metrics.rows_per_expert.tolist() == plain.rows_per_expert.tolist() == [2] * 6 + [6] * 2
        assert (metrics.imbalance, plain.imbalance) == (1, 2)
        for wrong in (-1, 8):
            with pytest.raises(ConfigError, match=f"shared experts.*got {wrong}; expected 0 to 7"):
                Meter(session, num_fused_shared_experts=wrong)

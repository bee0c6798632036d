"""The table of cases and the routings: complete, replayable, and what their names say."""

from __future__ import annotations

import pytest
import torch

from megamoe.problem import MAX_TOP_K, Activation, MoEProblem, QuantMode, Transport
from megamoe.testing.cases import (
    EXPERTS_PER_RANK,
    GATED_HIDDEN_SIZES,
    MODES,
    InputKind,
    Layer,
    cases,
    stress_case,
    uneven,
)
from megamoe.testing.data import interleave, make_calls, make_weights, shard, swap_gate_and_up
from megamoe.testing.routings import ROUTINGS, Picks

CPU = torch.device("cpu")


@pytest.mark.parametrize("device_class", ["cpu", "gpu"])
def test_the_table_covers_what_the_matrix_promises(device_class: str) -> None:
    table = cases(device_class)  # type: ignore[arg-type]
    problems = [case.problem for case in table]
    assert len({case.id for case in table}) == len(table)
    assert {(p.quant, p.act_format) for p in problems} == {(mode.quant, mode.act_format) for mode in MODES}
    assert {(p.quant, p.transport) for p in problems} == {(q, t) for q in QuantMode for t in Transport}
    assert {(p.quant, p.ep_size) for p in problems} >= {(q, r) for q in QuantMode for r in (1, 2, 4, 8)}
    assert {(p.quant, p.activation) for p in problems} == {(q, a) for q in QuantMode for a in Activation}
    assert {p.quant for p in problems if p.expert_bias} == set(QuantMode)
    assert {p.hidden_size for p in problems} >= set(GATED_HIDDEN_SIZES)
    assert {p.num_local_experts for p in problems} >= set(EXPERTS_PER_RANK)
    assert {p.top_k for p in problems} == set(range(1, MAX_TOP_K + 1))
    assert any(p.intermediate_size % 256 for p in problems)
    assert {case.routing for case in table} == set(ROUTINGS)
    assert {case.inputs for case in table} == set(InputKind)
    assert {case.layer for case in table} == {Layer.SMOKE, Layer.SHAPES, Layer.EDGE}
    assert any(sum(case.tokens) == 0 for case in table)
    assert any(case.signed_weights for case in table)
    assert {256, 257} <= {case.tokens[0] for case in table if case.routing == "duplicates"}


def test_gpu_weights_go_beyond_4_gib() -> None:
    largest = max(
        cases("gpu"),
        key=lambda case: case.problem.num_experts * case.problem.hidden_size * case.problem.intermediate_size,
    )
    problem = largest.problem
    assert problem.num_local_experts * 2 * problem.intermediate_size * problem.hidden_size > 4 * 2**30
    assert largest.routing == "hot_expert", "the last expert is used by every row"


def test_uneven_counts() -> None:
    assert uneven(24, 8) == (24, 13, 0, 23, 1, 24, 8, 24)
    assert uneven(0, 3) == (0, 1, 0)


def test_stress_cases_are_replayed_by_their_seed() -> None:
    for seed in range(30):
        case = stress_case(seed, "cpu", lambda problem: True)
        assert case == stress_case(seed, "cpu", lambda problem: True)
        assert case.id == f"stress-{seed}"
    assert len({stress_case(seed, "cpu", lambda problem: True).problem for seed in range(30)}) == 30


def test_stress_cases_are_what_the_backend_accepts() -> None:
    def only_a8w8(problem: MoEProblem) -> bool:
        return problem.quant is QuantMode.A8W8

    assert all(only_a8w8(stress_case(seed, "cpu", only_a8w8).problem) for seed in range(10))
    with pytest.raises(RuntimeError, match="accepts no problem"):
        stress_case(0, "cpu", lambda problem: False)


def ids_of(routing: str, *, src_rank: int = 1, num_tokens: int = 500, ep_size: int = 4) -> torch.Tensor:
    picks = Picks(num_tokens=num_tokens, top_k=4, num_experts=32, ep_size=ep_size, src_rank=src_rank)
    return ROUTINGS[routing](picks, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("top_k, num_experts, ep_size", [(4, 32, 4), (16, 4, 2), (1, 1, 1), (3, 8, 8)])
def test_every_routing_fills_every_shape(
    routing: str, num_tokens: int, top_k: int, num_experts: int, ep_size: int
) -> None:
    for src_rank in range(ep_size):
        picks = Picks(num_tokens=num_tokens, top_k=top_k, num_experts=num_experts, ep_size=ep_size, src_rank=src_rank)
        ids = ROUTINGS[routing](picks, torch.Generator().manual_seed(0))
        assert ids.shape == (num_tokens, top_k)
        assert ids.dtype == torch.int64
        if routing != "out_of_range":
            assert ((ids >= -1) & (ids < num_experts)).all()


def owners(ids: torch.Tensor) -> set[int]:
    return set((ids[ids >= 0] // 8).tolist())


def test_routings_are_what_their_names_say() -> None:
    assert all(len(row.unique()) == 4 for row in ids_of("uniform"))
    assert owners(ids_of("uniform")) == {0, 1, 2, 3}
    counts = torch.bincount(ids_of("zipf").flatten(), minlength=32)
    assert counts[0] > 3 * counts[16:].float().mean()
    assert (ids_of("hot_expert")[:, 0] == 31).all()
    assert ids_of("one_expert").unique().numel() == 1
    assert owners(ids_of("hot_rank")) == {3}
    assert owners(ids_of("empty_ranks")) == {0, 2}
    assert owners(ids_of("own_rank")) == {1}
    assert owners(ids_of("next_rank")) == {2}
    assert owners(ids_of("next_rank", src_rank=3)) == {0}
    assert all(0 not in owners(ids_of("send_only", src_rank=rank)) for rank in range(4))
    assert 0.2 < (ids_of("masked_some") == -1).float().mean() < 0.5
    assert (ids_of("masked_rows")[::2] == -1).all()
    assert (ids_of("masked_rows")[1::2] >= 0).all()
    assert (ids_of("masked_all") == -1).all()
    assert (ids_of("masked_rank", src_rank=0) == -1).all()
    assert (ids_of("masked_rank") >= 0).all()
    outside = ids_of("out_of_range")
    outside = outside[(outside < 0) | (outside >= 32)]
    assert set(outside.tolist()) == {32, 95, -2, 2**31 - 1, -(2**31)}
    assert all(len(row.unique()) < 4 for row in ids_of("duplicates"))


def test_duplicates_are_the_published_pattern() -> None:
    picks = Picks(num_tokens=257, top_k=4, num_experts=128, ep_size=2, src_rank=0)
    assert ROUTINGS["duplicates"](picks, torch.Generator())[256].tolist() == [5, 88, 88, 65]


def test_redundant_copies_hold_the_same_weights() -> None:
    case = next(case for case in cases("cpu") if case.routing == "redundant")
    weights = make_weights(case.problem, CPU, redundant=True)
    half = case.problem.num_experts // 2
    for _, tensor in weights.tensors():
        raw = tensor.view(torch.uint8)
        assert torch.equal(raw[:half], raw[half:])
    ids = torch.cat([call.topk_ids for call in make_calls(case, CPU)])
    assert (ids < half).any()
    assert (ids >= half).any()


def test_a_case_is_the_same_each_time_and_rounds_differ() -> None:
    case = cases("cpu")[0]
    first, again, other = make_calls(case, CPU), make_calls(case, CPU), make_calls(case, CPU, round_=1)
    for one, two, three in zip(first, again, other):
        assert torch.equal(one.bf16, two.bf16)
        assert torch.equal(one.topk_ids, two.topk_ids)
        assert torch.equal(one.topk_weights, two.topk_weights)
        if one.num_rows > 2:
            assert not torch.equal(one.bf16, three.bf16)
            assert not torch.equal(one.topk_ids, three.topk_ids)
    assert not torch.equal(first[0].bf16[:5], first[1].bf16[:5])


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.id)
def test_shards_are_the_layer(mode: object) -> None:
    case = next(case for case in cases("cpu") if case.id == f"plain-{mode.id}-ep2")  # type: ignore[attr-defined]
    weights = make_weights(case.problem, CPU)
    parts = [dict(part.tensors()) for part in shard(weights, 2)]
    for name, tensor in weights.tensors():
        whole = torch.cat([part[name].view(torch.uint8) for part in parts])
        assert torch.equal(whole, tensor.view(torch.uint8))
        assert all(part[name].untyped_storage().nbytes() == part[name].nbytes for part in parts)


def test_rows_of_interleaved_and_swapped_weights() -> None:
    case = next(case for case in cases("cpu") if case.id == "plain-bf16-ep2")
    weights = dict(make_weights(case.problem, CPU).tensors())
    inter = case.problem.intermediate_size
    woven = dict(interleave(make_weights(case.problem, CPU)).tensors())
    assert torch.equal(woven["w13_weight"][:, 0], weights["w13_weight"][:, 0])
    assert torch.equal(woven["w13_weight"][:, 1], weights["w13_weight"][:, inter])
    assert torch.equal(woven["w13_weight"][:, -1], weights["w13_weight"][:, -1])
    swapped = dict(swap_gate_and_up(make_weights(case.problem, CPU)).tensors())
    assert torch.equal(swapped["w13_weight"][:, 0], weights["w13_weight"][:, inter])
    assert torch.equal(swapped["w2_weight"], weights["w2_weight"])

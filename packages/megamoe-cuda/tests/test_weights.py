"""Prepared weights: the kernel's order, its inverse, aliasing, and what is refused."""

from __future__ import annotations

import pytest
import torch

from megamoe.errors import LayoutError
from megamoe.problem import MoEProblem
from megamoe.tensors import Fp8BlockWeights, expert_tensors
from megamoe_cuda.weights import BACKEND, LAYOUT, prepare, restore

PROBLEM = MoEProblem(
    hidden_size=256, intermediate_size=128, num_experts=6, top_k=2, num_max_tokens_per_rank=8, ep_size=2, quant="a8w8"
)
CPU = torch.device("cpu")


def make_experts(layout: str = "packed", *, bias: bool = False) -> Fp8BlockWeights:
    rng = torch.Generator().manual_seed(0)
    experts, hidden, inter = PROBLEM.num_local_experts, PROBLEM.hidden_size, PROBLEM.intermediate_size

    def payload(*shape: int) -> torch.Tensor:
        return torch.randint(0, 120, shape, dtype=torch.uint8, generator=rng).view(torch.float8_e4m3fn)

    return Fp8BlockWeights(
        layout=layout,
        w13_weight=payload(experts, 2 * inter, hidden),
        w13_weight_scale=torch.rand(experts, 2 * inter // 128, hidden // 128, generator=rng),
        w2_weight=payload(experts, hidden, inter),
        w2_weight_scale=torch.rand(experts, hidden // 128, inter // 128, generator=rng),
        w13_bias=torch.rand(experts, 2 * inter, generator=rng) if bias else None,
        w2_bias=torch.rand(experts, hidden, generator=rng) if bias else None,
    )


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def test_gates_and_ups_alternate_in_groups_of_eight_rows() -> None:
    experts = make_experts()
    w13 = raw(prepare(experts, PROBLEM, CPU).tensors["w13_weight"])
    packed = raw(experts.w13_weight)
    inter = PROBLEM.intermediate_size
    for channel in (0, 7, 8, 100, inter - 1):
        gate_row = channel // 8 * 16 + channel % 8
        assert torch.equal(w13[:, gate_row], packed[:, channel])
        assert torch.equal(w13[:, gate_row + 8], packed[:, inter + channel])


@pytest.mark.parametrize("bias", [False, True])
def test_preparing_loses_nothing(bias: bool) -> None:
    experts = make_experts(bias=bias)
    restored = restore(prepare(experts, PROBLEM, CPU))
    assert restored.keys() == dict(experts.tensors()).keys()
    for name, tensor in experts.tensors():
        assert torch.equal(raw(restored[name]), raw(tensor)), name


def test_the_tag_is_the_one_that_forward_reads() -> None:
    prepared = prepare(make_experts(), PROBLEM, CPU)
    prepared.require(backend=BACKEND, layout=LAYOUT, problem=PROBLEM)
    assert all(tensor.is_contiguous() for tensor in prepared.tensors.values())


def test_an_expert_moves_in_place_by_copying_its_slot() -> None:
    prepared = prepare(make_experts(bias=True), PROBLEM, CPU)
    addresses = {name: tensor.data_ptr() for name, tensor in prepared.tensors.items()}
    for tensor in expert_tensors(prepared).values():
        raw(tensor)[0].copy_(raw(tensor)[2])
    restored = restore(prepared)
    original = make_experts(bias=True)
    for name, tensor in original.tensors():
        assert torch.equal(raw(restored[name])[0], raw(tensor)[2]), name
        assert torch.equal(raw(restored[name])[1], raw(tensor)[1]), name
        assert prepared.tensors[name].data_ptr() == addresses[name]


def test_moved_experts_do_not_reach_the_checkpoint() -> None:
    experts = make_experts(bias=True)
    before = {name: raw(tensor).clone() for name, tensor in experts.tensors()}
    for tensor in expert_tensors(prepare(experts, PROBLEM, CPU)).values():
        raw(tensor).zero_()
    assert all(torch.equal(raw(tensor), before[name]) for name, tensor in experts.tensors())


def test_alternating_rows_with_block_scales_are_refused() -> None:
    """Silently read as packed, they would mix gates and ups; the scales can't be split without requantising."""
    with pytest.raises(LayoutError, match=r"ALTERNATING\.invert"):
        prepare(make_experts("interleaved"), PROBLEM, CPU)

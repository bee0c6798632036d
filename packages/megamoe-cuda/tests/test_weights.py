"""Prepared weights: the kernel's order, its inverse, aliasing, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megamoe.errors import LayoutError
from megamoe.problem import MoEProblem
from megamoe.tensors import Fp8BlockWeights, expert_tensors
from megamoe.testing.data import interleave, make_weights
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
    restored = restore(prepare(experts, PROBLEM, CPU), replace(PROBLEM, expert_bias=bias))
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
    restored = restore(prepared, replace(PROBLEM, expert_bias=True))
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


OTHER_MODES = ({"quant": "bf16"}, {"quant": "a8w4", "act_format": "fp8_1x128"})


@pytest.mark.parametrize("mode", OTHER_MODES, ids=lambda mode: mode["quant"])
@pytest.mark.parametrize("hidden, inter", [(256, 128), (384, 256), (96, 160)])
def test_other_modes_lose_nothing_in_either_order_of_rows(mode: dict[str, str], hidden: int, inter: int) -> None:
    """H and I that are no multiples of 128 are padded, and what comes back has no padding."""
    problem = replace(PROBLEM, hidden_size=hidden, intermediate_size=inter, expert_bias=True, **mode)
    packed = make_weights(replace(problem, num_experts=3, ep_size=1), CPU)
    for experts in (packed, interleave(packed)):
        restored = restore(prepare(experts, problem, CPU), problem)
        for name, tensor in packed.tensors():
            assert torch.equal(raw(restored[name]), raw(tensor)), name


def test_padding_is_zero() -> None:
    """Channels past I come out of the activation as 0, whatever their neighbours are."""
    problem = replace(PROBLEM, quant="bf16", hidden_size=96, intermediate_size=160, expert_bias=True)
    prepared = prepare(make_weights(replace(problem, num_experts=3, ep_size=1), CPU), problem, CPU).tensors
    assert prepared["w13_weight"].shape == (3, 2 * 256, 96)
    assert prepared["w2_weight"].shape == (3, 96, 256)
    assert (prepared["w2_weight"][..., 160:] == 0).all()
    for name in ("w13_weight", "w13_bias"):
        by_groups = prepared[name].view(3, 2 * 256 // 16, 2, 8, -1).transpose(1, 2).reshape(3, 2, 256, -1)
        assert (by_groups[:, :, 160:] == 0).all(), name
        assert (by_groups[:, :, :160] != 0).any(-1).all(), name
    assert (prepared["w2_bias"][:, 96:] == 0).all()

"""Prepared weights hold the checkpoint's values at the places that the kernels read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megamoe.errors import LayoutError
from megamoe.problem import MoEProblem
from megamoe.tensors import Mxfp4Weights
from megamoe_rocm.weights import LAYOUT, prepare

EXPERTS, HIDDEN, INTER = 2, 512, 256
PROBLEM = MoEProblem(
    hidden_size=HIDDEN, intermediate_size=INTER, num_experts=EXPERTS, top_k=1, num_max_tokens_per_rank=1, quant="a4w4"
)


def checkpoint(layout: str, **changes: int) -> Mxfp4Weights:
    generator = torch.Generator().manual_seed(0)
    hidden = changes.get("hidden", HIDDEN)

    def random_bytes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    return Mxfp4Weights(
        layout=layout,
        w13_weight=random_bytes(EXPERTS, 2 * INTER, hidden // 2),
        w13_weight_scale=random_bytes(EXPERTS, 2 * INTER, hidden // 32),
        w2_weight=random_bytes(EXPERTS, hidden, INTER // 2),
        w2_weight_scale=random_bytes(EXPERTS, hidden, INTER // 32).view(torch.float8_e8m0fnu),
        w13_bias=torch.randn(EXPERTS, 2 * INTER, generator=generator),
    )


def test_prepared_weights_are_memory_of_their_own() -> None:
    weights = replace(checkpoint("packed"), w2_bias=torch.randn(EXPERTS, HIDDEN))
    assert weights.w2_bias is not None
    prepared = prepare(weights, PROBLEM).tensors
    assert torch.equal(prepared["w2_bias"], weights.w2_bias)
    before = {name: tensor.clone() for name, tensor in prepared.items()}
    for _, theirs in weights.tensors():
        theirs.view(torch.uint8).fill_(7)
    for name, tensor in prepared.items():
        assert torch.equal(tensor, before[name]), name


def kernel_row(channel: int, is_up: int) -> int:
    """Where design says a channel is: 64 J + 32 b + 16 is_up + 4 g + r for channel 32 J + 8 g + 4 b + r."""
    group, rest = divmod(channel, 32)
    g, rest = divmod(rest, 8)
    b, r = divmod(rest, 4)
    return 64 * group + 32 * b + 16 * is_up + 4 * g + r


@pytest.mark.parametrize("layout", ["packed", "interleaved"])
def test_every_byte_of_a_row_is_where_the_kernel_reads_it(layout: str) -> None:
    weights = checkpoint(layout)
    prepared = prepare(weights, PROBLEM)
    assert prepared.layout == LAYOUT
    w13, scale = prepared.tensors["w13_weight"].flatten(1), prepared.tensors["w13_weight_scale"].flatten(1)
    for channel, is_up in ((0, 0), (5, 1), (77, 0), (255, 1)):
        row = kernel_row(channel, is_up)
        source = channel + is_up * INTER if layout == "packed" else 2 * channel + is_up
        byte = torch.arange(HIDDEN // 2)
        at = row // 16 * 16 * (HIDDEN // 2) + byte // 16 * 256 + row % 16 * 16 + byte % 16
        assert torch.equal(w13[1, at], weights.w13_weight[1, source])
        k = torch.arange(HIDDEN // 32)
        at = row // 32 * HIDDEN + k // 8 * 256 + k % 4 * 64 + row % 16 * 4 + row // 16 % 2 * 2 + k // 4 % 2
        assert torch.equal(scale[1, at], weights.w13_weight_scale[1, source])
        assert weights.w13_bias is not None
        assert prepared.tensors["w13_bias"][1, row] == weights.w13_bias[1, source]


def test_scales_are_bytes_whatever_their_dtype() -> None:
    assert prepare(checkpoint("packed"), PROBLEM).tensors["w2_weight_scale"].dtype == torch.uint8


def test_sizes_that_the_operands_cannot_hold_are_refused() -> None:
    with pytest.raises(LayoutError, match="256"):
        prepare(checkpoint("packed", hidden=416), PROBLEM)

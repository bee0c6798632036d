"""Conversion on the way in: one rounding away from the file, and exact where formats allow it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamoe.checkpoint import conversion, convert
from megamoe.formats import FP8_128X128, MXFP4, Quantized
from megamoe.problem import QuantMode
from megamoe.tensors import WEIGHT_TYPE, Bf16Weights, ExpertWeights, Fp8BlockWeights, GateUpLayout, Mxfp4Weights

E, H, INTER = 2, 256, 128


def _bf16(layout: str = "packed") -> Bf16Weights:
    rng = torch.Generator().manual_seed(3)
    return Bf16Weights(
        layout=layout,
        w13_weight=torch.randn(E, 2 * INTER, H, generator=rng).bfloat16(),
        w2_weight=torch.randn(E, H, INTER, generator=rng).bfloat16(),
        w13_bias=torch.randn(E, 2 * INTER, generator=rng),
        w2_bias=torch.randn(E, H, generator=rng),
    )


def _values(weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """FP32 w13 and w2."""
    tensors = dict(weights.tensors())
    fmt = {Fp8BlockWeights: FP8_128X128, Mxfp4Weights: MXFP4}.get(type(weights))
    names = ("w13_weight", "w2_weight")
    if fmt is None:
        return tensors["w13_weight"].float(), tensors["w2_weight"].float()
    first, second = (Quantized(payload=tensors[n], scales=tensors[f"{n}_scale"], fmt=fmt).dequantize() for n in names)
    return first, second


@pytest.mark.parametrize("source", [QuantMode.BF16, QuantMode.A8W8, QuantMode.A4W4])
@pytest.mark.parametrize("target", list(QuantMode))
def test_values_survive_within_the_formats_step(source: QuantMode, target: QuantMode) -> None:
    stored = convert(_bf16(), source)
    result = convert(stored, target)
    assert type(result) is WEIGHT_TYPE[target]
    assert result.w13_bias is stored.w13_bias
    # e2m1 keeps one mantissa bit, e4m3 three, BF16 seven; relL2 of one rounding.
    bound = {QuantMode.BF16: 0.003, QuantMode.A8W8: 0.04}.get(target, 0.17)
    for got, expected in zip(_values(result), _values(stored), strict=True):
        assert (got - expected).norm() <= bound * expected.norm()
    if type(stored) is type(result):
        assert result is stored


def test_mxfp4_is_exact_in_bf16() -> None:
    stored = convert(_bf16(), QuantMode.A8W4)
    for got, expected in zip(_values(convert(stored, QuantMode.BF16)), _values(stored), strict=True):
        assert torch.equal(got, expected)


def test_interleaved_rows_are_packed_before_fp8_blocks_are_formed() -> None:
    packed = _bf16()
    gate, up = packed.w13_weight.chunk(2, dim=1)
    assert packed.w13_bias is not None
    gate_bias, up_bias = packed.w13_bias.chunk(2, dim=1)
    interleaved = Bf16Weights(
        layout="interleaved",
        w13_weight=torch.stack([gate, up], 2).flatten(1, 2),
        w2_weight=packed.w2_weight,
        w13_bias=torch.stack([gate_bias, up_bias], 2).flatten(1, 2),
        w2_bias=packed.w2_bias,
    )
    got, expected = convert(interleaved, QuantMode.A8W8), convert(packed, QuantMode.A8W8)
    assert got.layout is GateUpLayout.PACKED
    assert got.w13_bias is not None
    assert torch.equal(got.w13_bias, packed.w13_bias)
    for a, b in zip(_values(got), _values(expected), strict=True):
        assert torch.equal(a, b)
    assert convert(interleaved, QuantMode.A4W4).layout is GateUpLayout.INTERLEAVED


def test_a_conversion_is_said() -> None:
    assert conversion(Fp8BlockWeights, QuantMode.A8W8) == "as stored (fp8_128x128)"
    assert conversion(Mxfp4Weights, QuantMode.A4W4) == "as stored (mxfp4)"
    assert conversion(Bf16Weights, QuantMode.A8W8) == "bf16 -> fp8_128x128"

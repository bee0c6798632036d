"""Bringing experts from the format of a checkpoint into that of a quant mode."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megamoe.formats import BlockFormat, Quantized, weight_format
from megamoe.layouts import ALTERNATING
from megamoe.problem import QuantMode
from megamoe.tensors import WEIGHT_TYPE, Bf16Weights, ExpertWeights, Fp8BlockWeights, GateUpLayout, Mxfp4Weights

STORED_AS: dict[type[ExpertWeights], QuantMode] = {
    Bf16Weights: QuantMode.BF16,
    Fp8BlockWeights: QuantMode.A8W8,
    Mxfp4Weights: QuantMode.A8W4,
}  # the first mode that takes the type


def format_of(weights: type[ExpertWeights]) -> BlockFormat:
    """Number format of a weight type's matrices."""
    return weight_format(STORED_AS[weights])


def conversion(stored: type[ExpertWeights], quant: QuantMode) -> str:
    """What `convert` does to weights, in words: "as stored (fp8_128x128)" or "bf16 -> mxfp4"."""
    source, target = format_of(stored).name, weight_format(quant).name
    return f"as stored ({source})" if stored is WEIGHT_TYPE[quant] else f"{source} -> {target}"


def convert(weights: ExpertWeights, quant: QuantMode) -> ExpertWeights:
    """The same experts in the weight format of `quant`: dequantised to FP32, then rounded once.

    Weights that are in it already are returned as they are. Blocks of FP8 weights span 128 rows of gate or of up, so
    interleaved rows are brought into packed order first.

    Raises:
        FormatError: a size that the format's blocks don't divide.
    """
    if type(weights) is WEIGHT_TYPE[quant]:
        return weights
    if weights.layout is GateUpLayout.INTERLEAVED and weight_format(quant).block_rows > 1:
        weights = _packed(weights)
    source, target = format_of(type(weights)), weight_format(quant)
    tensors = dict(weights.tensors())
    converted: dict[str, Tensor] = {}
    for name in ("w13_weight", "w2_weight"):
        values = Quantized(payload=tensors[name], scales=tensors.get(f"{name}_scale"), fmt=source).dequantize()
        result = target.quantize(values)
        converted[name] = result.payload
        if result.scales is not None:
            converted[f"{name}_scale"] = result.scales
    return WEIGHT_TYPE[quant](layout=weights.layout, w13_bias=weights.w13_bias, w2_bias=weights.w2_bias, **converted)


def _packed(weights: ExpertWeights) -> ExpertWeights:
    """Interleaved weights, whose scales span single rows, with gate rows first."""
    tensors = {name: ALTERNATING.invert(tensor) for name, tensor in weights.tensors() if name.startswith("w13")}
    return replace(weights, layout=GateUpLayout.PACKED, **tensors)

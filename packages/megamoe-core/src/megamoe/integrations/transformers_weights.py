"""What an experts module of transformers computes, read off the module itself.

Its decorator says how the weights lie (`is_transposed`, `has_bias`, ...); its `_apply_gate` is the activation. That one
is recognised by what it computes, on a few numbers: sixty model families bring their own, under many names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megamoe.checkpoint.convert import convert
from megamoe.errors import UnsupportedProblemError
from megamoe.problem import Activation, QuantMode
from megamoe.stages.swiglu_quant import GPT_OSS_ALPHA, GPT_OSS_BETA, SwiGLU
from megamoe.tensors import (
    WEIGHT_TYPE,
    Bf16Weights,
    ExpertWeights,
    Fp8BlockWeights,
    GateUpLayout,
    Mxfp4Weights,
)

FP8_BLOCKS = [128, 128]


@dataclass(frozen=True, kw_only=True)
class StoredExperts:
    """One module's experts: sizes as `MoEProblem` names them, and weights that alias the module's parameters.

    Biases and scales may be copies: they are kept in FP32.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    activation: Activation
    swiglu_limit: float | None
    weights: ExpertWeights


def read_experts(experts: nn.Module) -> StoredExperts:
    """What `experts` computes.

    Args:
        experts: of a class that `use_experts_implementation` decorates, or `FP8Experts`.

    Raises:
        UnsupportedProblemError: something that MegaMoE has no name for; says what.
    """
    layer: Any = experts
    if not layer.has_gate:
        raise _unsupported(experts, "experts without a gate", "gate, up and down projections")
    if layer.has_post_expert_norm:
        raise _unsupported(experts, "a norm behind each expert", "experts that end with the down projection")
    activation, limit, layout = recognise_gate(experts)
    weights = _fp8(experts, layout) if hasattr(layer, "gate_up_proj_scale_inv") else _bf16(experts, layout)
    w13 = dict(weights.tensors())["w13_weight"]
    num_experts, _, columns = w13.shape
    return StoredExperts(
        hidden_size=columns * (2 if isinstance(weights, Mxfp4Weights) else 1),
        intermediate_size=w13.shape[1] // 2,
        num_experts=num_experts,
        activation=activation,
        swiglu_limit=limit,
        weights=weights,
    )


def recognise_gate(experts: nn.Module) -> tuple[Activation, float | None, GateUpLayout]:
    """Activation, clamp and order of gate and up, found by comparing `_apply_gate` with each that MegaMoE knows.

    Raises:
        UnsupportedProblemError: it is none of them.
    """
    limits = sorted(_limits(experts))
    reach = 2 * max([4.0, *limits])  # past every clamp
    generator = torch.Generator().manual_seed(0)
    gate_up = (2 * torch.rand(64, 64, generator=generator, dtype=torch.float32, device="cpu") - 1) * reach
    try:
        with torch.no_grad():
            got = experts._apply_gate(gate_up.clone())  # type: ignore[operator]
    except Exception as error:
        raise _unsupported(experts, f"an _apply_gate that fails on 32 channels ({error})", "a SwiGLU") from error
    for layout, (gate, up) in {
        GateUpLayout.PACKED: gate_up.chunk(2, dim=-1),
        GateUpLayout.INTERLEAVED: (gate_up[:, ::2], gate_up[:, 1::2]),
    }.items():
        for limit in (None, *limits):
            for activation, alpha, beta in (
                (Activation.SWIGLU, 1.0, 0.0),
                (Activation.SWIGLU_OAI, GPT_OSS_ALPHA, GPT_OSS_BETA),
            ):
                expected = SwiGLU(limit=limit, alpha=alpha, beta=beta)(gate, up)
                # FP32 forms of one formula differ by some 1e-6; the nearest other candidate by 0.1 and more.
                if got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-4, atol=1e-4):
                    return activation, limit, layout
    raise _unsupported(experts, "an activation that is none of MegaMoE's", "silu(gate) * up, or gpt-oss's form")


def _limits(experts: nn.Module) -> Iterator[float]:
    """Clamps that the module may apply: by name, as there is no telling which of its numbers is one."""
    found = {getattr(experts, name, None) for name in ("limit", "swiglu_limit")}
    return (float(value) for value in found if isinstance(value, int | float) and 0 < value < float("inf"))


def _bf16(experts: nn.Module, layout: GateUpLayout) -> Bf16Weights:
    layer: Any = experts
    w13, w2 = layer.gate_up_proj.detach(), layer.down_proj.detach()
    if w13.dtype != torch.bfloat16 or w2.dtype != torch.bfloat16:
        raise _unsupported(
            experts, f"weights in {w13.dtype}", "BF16 or FP8", hint="load the model with dtype=torch.bfloat16"
        )
    return Bf16Weights(
        layout=layout,
        w13_weight=w13.mT if layer.is_transposed else w13,
        w2_weight=w2.mT if layer.is_transposed else w2,
        w13_bias=layer.gate_up_proj_bias.detach().float() if layer.has_bias else None,
        w2_bias=layer.down_proj_bias.detach().float() if layer.has_bias else None,
    )


def _fp8(experts: nn.Module, layout: GateUpLayout) -> Fp8BlockWeights | Mxfp4Weights:
    """`FP8Experts`, whose weights are FP8 blocks or packed FP4."""
    layer: Any = experts
    if layer.activation_scheme != "dynamic":
        raise _unsupported(experts, f"activation_scheme {layer.activation_scheme!r}", "dynamic activation scales")
    w13, w2 = layer.gate_up_proj.detach(), layer.down_proj.detach()
    scales = [layer.gate_up_proj_scale_inv.detach(), layer.down_proj_scale_inv.detach()]
    if w13.dtype == torch.int8:
        if any(scale.dtype != torch.float8_e8m0fnu for scale in scales):
            raise _unsupported(experts, f"FP4 with scales in {scales[0].dtype}", 'E8M0 scales (scale_fmt="ue8m0")')
        return Mxfp4Weights(
            layout=layout,
            w13_weight=w13.view(torch.uint8),
            w13_weight_scale=scales[0],
            w2_weight=w2.view(torch.uint8),
            w2_weight_scale=scales[1],
        )
    if w13.dtype != torch.float8_e4m3fn or list(layer.block_size or ()) != FP8_BLOCKS:
        raise _unsupported(
            experts, f"{w13.dtype} with a scale per {layer.block_size}", f"float8_e4m3fn with a scale per {FP8_BLOCKS}"
        )
    w13_scale, w2_scale = (scale.float() for scale in scales)  # exact from E8M0
    return Fp8BlockWeights(
        layout=layout, w13_weight=w13, w13_weight_scale=w13_scale, w2_weight=w2, w2_weight_scale=w2_scale
    )


def in_format_of(weights: ExpertWeights, quant: QuantMode) -> ExpertWeights:
    """`megamoe.checkpoint.convert`, one expert after the other: a whole layer in FP32 may not fit beside the model.

    Raises:
        FormatError: a size that the format's blocks don't divide.
    """
    if type(weights) is WEIGHT_TYPE[quant]:
        return weights
    tensors = dict(weights.tensors())
    parts: list[dict[str, Any]] = []
    for expert in range(tensors["w13_weight"].shape[0]):
        alone: dict[str, Any] = {name: tensor[expert : expert + 1] for name, tensor in tensors.items()}
        converted = convert(replace(weights, **alone), quant)
        parts.append(dict(converted.tensors()))
    together: dict[str, Any] = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return replace(converted, **together)


def experts_device(experts: nn.Module) -> torch.device:
    """Where the module's experts are."""
    weight: Tensor = experts.down_proj  # type: ignore[assignment]
    return weight.device


def _unsupported(experts: nn.Module, got: str, expected: str, hint: str | None = None) -> UnsupportedProblemError:
    return UnsupportedProblemError(f"MegaMoE can't run {type(experts).__name__}", got=got, expected=expected, hint=hint)

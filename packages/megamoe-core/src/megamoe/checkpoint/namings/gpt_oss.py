"""gpt-oss, published in MXFP4 and, after training or dequantisation, in BF16; with biases, gate and up interleaved.

MXFP4: `gate_up_proj_blocks [E, 2I, H/32, 16]` and `down_proj_blocks [E, H, I/32, 16]` bytes of two e2m1 codes, the even
element in the low nibble, and `*_scales` without the last dimension, E8M0 bytes. A row's blocks follow each other, so
joining the last two dimensions gives `[E, 2I, H/2]`. BF16: `gate_up_proj [E, H, 2I]` and `down_proj [E, I, H]`, the
transposes. (transformers 5.24, integrations/mxfp4.py and models/gpt_oss.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from megamoe.checkpoint.files import TensorReader
from megamoe.checkpoint.namings.base import E8M0_BYTES, FLOATS, Naming, StoredLayer, as_bf16, positive
from megamoe.errors import CheckpointError
from megamoe.formats.mxfp8 import MX_BLOCK
from megamoe.problem import Activation
from megamoe.stages.swiglu_quant import GPT_OSS_ALPHA
from megamoe.tensors import Bf16Weights, ExpertWeights, GateUpLayout, Mxfp4Weights

DEFAULT_LIMIT = 7.0  # gpt-oss's configurations from before the limit was in them


def _biases(reader: TensorReader, layer: StoredLayer, expert: int) -> dict[str, Tensor]:
    experts, prefix = layer.num_experts, f"{layer.prefix}.experts"
    sizes = {
        "w13_bias": ("gate_up_proj_bias", 2 * layer.intermediate_size),
        "w2_bias": ("down_proj_bias", layer.hidden_size),
    }
    return {
        key: reader.read(f"{prefix}.{name}", shape=(experts, size), dtypes=FLOATS, index=expert).float()[None]
        for key, (name, size) in sizes.items()
    }


def _with_activation(layer: StoredLayer, config: Mapping[str, Any]) -> StoredLayer:
    alpha = config.get("swiglu_alpha", GPT_OSS_ALPHA)
    if alpha != GPT_OSS_ALPHA:
        raise CheckpointError(
            "config.json asks for another activation",
            got=f"swiglu_alpha {alpha}",
            expected=f"swiglu_alpha {GPT_OSS_ALPHA}",
        )
    limit = float(positive(config, "swiglu_limit", DEFAULT_LIMIT))
    return replace(layer, activation=Activation.SWIGLU_OAI, swiglu_limit=limit, expert_bias=True)


class GptOssMxfp4(Naming):
    """`mlp.experts.{gate_up,down}_proj_{blocks,scales,bias}`."""

    name: ClassVar[str] = "gpt-oss MXFP4"
    block: ClassVar[str] = "mlp"
    marker: ClassVar[str] = r"experts\.gate_up_proj_blocks"

    def describe(self, reader: TensorReader, prefix: str, config: Mapping[str, Any]) -> StoredLayer:
        name = f"{prefix}.experts.gate_up_proj_blocks"
        shape = reader.shape(name)
        if len(shape) != 4 or shape[1] % 2 or shape[3] != MX_BLOCK // 2:
            raise CheckpointError(
                f"tensor {name} in {reader.where[name]} has the wrong shape", got=shape, expected="[E, 2I, H/32, 16]"
            )
        layer = StoredLayer(
            naming=self.name,
            prefix=prefix,
            hidden_size=shape[2] * MX_BLOCK,
            intermediate_size=shape[1] // 2,
            num_experts=shape[0],
            weights=Mxfp4Weights,
            layout=GateUpLayout.INTERLEAVED,
        )
        return _with_activation(layer, config)

    def read_expert(self, reader: TensorReader, layer: StoredLayer, expert: int) -> ExpertWeights:
        prefix, hidden, inter = f"{layer.prefix}.experts", layer.hidden_size, layer.intermediate_size
        tensors: dict[str, Tensor] = {}
        for key, part, rows, columns in (
            ("w13", "gate_up_proj", 2 * inter, hidden),
            ("w2", "down_proj", hidden, inter),
        ):
            blocks = (layer.num_experts, rows, columns // MX_BLOCK)
            payload = reader.read(
                f"{prefix}.{part}_blocks", shape=(*blocks, MX_BLOCK // 2), dtypes=(torch.uint8,), index=expert
            )
            scales = reader.read(f"{prefix}.{part}_scales", shape=blocks, dtypes=E8M0_BYTES, index=expert)
            tensors[f"{key}_weight"] = payload.flatten(-2)[None]
            tensors[f"{key}_weight_scale"] = scales.view(torch.uint8)[None]
        return Mxfp4Weights(layout=layer.layout, **tensors, **_biases(reader, layer, expert))


class GptOssBf16(Naming):
    """`mlp.experts.gate_up_proj [E, H, 2I]`, `down_proj [E, I, H]` and their `_bias`."""

    name: ClassVar[str] = "gpt-oss BF16"
    block: ClassVar[str] = "mlp"
    marker: ClassVar[str] = r"experts\.gate_up_proj_bias"

    def describe(self, reader: TensorReader, prefix: str, config: Mapping[str, Any]) -> StoredLayer:
        name = f"{prefix}.experts.gate_up_proj"
        shape = reader.shape(name)
        if len(shape) != 3 or shape[2] % 2:
            raise CheckpointError(
                f"tensor {name} in {reader.where[name]} has the wrong shape", got=shape, expected="[E, H, 2I]"
            )
        layer = StoredLayer(
            naming=self.name,
            prefix=prefix,
            hidden_size=shape[1],
            intermediate_size=shape[2] // 2,
            num_experts=shape[0],
            weights=Bf16Weights,
            layout=GateUpLayout.INTERLEAVED,
        )
        return _with_activation(layer, config)

    def read_expert(self, reader: TensorReader, layer: StoredLayer, expert: int) -> ExpertWeights:
        experts, hidden, inter = layer.num_experts, layer.hidden_size, layer.intermediate_size
        prefix = f"{layer.prefix}.experts"
        w13 = reader.read(f"{prefix}.gate_up_proj", shape=(experts, hidden, 2 * inter), dtypes=FLOATS, index=expert)
        w2 = reader.read(f"{prefix}.down_proj", shape=(experts, inter, hidden), dtypes=FLOATS, index=expert)
        return Bf16Weights(
            layout=layer.layout,
            w13_weight=as_bf16(w13.T)[None],
            w2_weight=as_bf16(w2.T)[None],
            **_biases(reader, layer, expert),
        )

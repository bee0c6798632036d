"""Experts fused into two 3-D tensors, the form that transformers 5 keeps in memory and may save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from megamoe.checkpoint.files import TensorReader
from megamoe.checkpoint.namings.base import FLOATS, Naming, StoredLayer, as_bf16
from megamoe.errors import CheckpointError
from megamoe.tensors import Bf16Weights, ExpertWeights, GateUpLayout


class Fused(Naming):
    """`mlp.experts.gate_up_proj [E, 2I, H]`, gate rows first, and `down_proj [E, H, I]`, BF16, without biases."""

    name: ClassVar[str] = "fused BF16"
    block: ClassVar[str] = "mlp"
    marker: ClassVar[str] = r"experts\.gate_up_proj"

    def describe(self, reader: TensorReader, prefix: str, config: Mapping[str, Any]) -> StoredLayer:
        name = f"{prefix}.experts.gate_up_proj"
        shape = reader.shape(name)
        if len(shape) != 3 or shape[1] % 2:
            raise CheckpointError(
                f"tensor {name} in {reader.where[name]} has the wrong shape", got=shape, expected="[E, 2I, H]"
            )
        return StoredLayer(
            naming=self.name,
            prefix=prefix,
            hidden_size=shape[2],
            intermediate_size=shape[1] // 2,
            num_experts=shape[0],
            weights=Bf16Weights,
            layout=GateUpLayout.PACKED,
        )

    def read_expert(self, reader: TensorReader, layer: StoredLayer, expert: int) -> ExpertWeights:
        experts, hidden, inter = layer.num_experts, layer.hidden_size, layer.intermediate_size
        prefix = f"{layer.prefix}.experts"
        w13 = reader.read(f"{prefix}.gate_up_proj", shape=(experts, 2 * inter, hidden), dtypes=FLOATS, index=expert)
        w2 = reader.read(f"{prefix}.down_proj", shape=(experts, hidden, inter), dtypes=FLOATS, index=expert)
        return Bf16Weights(layout=layer.layout, w13_weight=as_bf16(w13)[None], w2_weight=as_bf16(w2)[None])

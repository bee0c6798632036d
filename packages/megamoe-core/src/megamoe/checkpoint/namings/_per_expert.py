"""Experts stored one matrix a tensor: `<prefix>.experts.E.<gate>.weight`, and so for up and down."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from megamoe.checkpoint.files import TensorReader
from megamoe.checkpoint.namings.base import FLOATS, Naming, StoredLayer, as_bf16, expert_count
from megamoe.errors import CheckpointError
from megamoe.formats.fp8_block import FP8_BLOCK
from megamoe.schedule.tiles import ceil_div
from megamoe.tensors import Bf16Weights, ExpertWeights, Fp8BlockWeights, GateUpLayout


class PerExpertNaming(Naming):
    """Common to the namings that store experts apart; gate rows go before up rows."""

    gate: ClassVar[str]
    up: ClassVar[str]
    down: ClassVar[str]
    scale: ClassVar[str | None] = None  # suffix of the FP32 scale of each 128x128 block; None: BF16 weights

    def describe(self, reader: TensorReader, prefix: str, config: Mapping[str, Any]) -> StoredLayer:
        pattern = re.compile(rf"{re.escape(prefix)}\.experts\.(\d+)\.{re.escape(self.gate)}\.weight")
        found = {int(match[1]) for name in reader.where if (match := pattern.fullmatch(name))}
        gate = f"{prefix}.experts.{min(found)}.{self.gate}.weight"
        shape = reader.shape(gate)
        if len(shape) != 2:
            raise CheckpointError(
                f"tensor {gate} in {reader.where[gate]} is not a matrix", got=shape, expected="[intermediate, hidden]"
            )
        intermediate_size, hidden_size = shape
        if self.scale is not None and intermediate_size % FP8_BLOCK:
            raise CheckpointError(
                f"the 128x128 blocks of {gate} in {reader.where[gate]} would straddle gate and up",
                got=f"intermediate size {intermediate_size}",
                expected=f"a multiple of {FP8_BLOCK}",
                hint="load the BF16 form of this checkpoint",
            )
        return StoredLayer(
            naming=self.name,
            prefix=prefix,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_experts=expert_count(max(found) + 1, config),
            weights=Bf16Weights if self.scale is None else Fp8BlockWeights,
            layout=GateUpLayout.PACKED,
        )

    def read_expert(self, reader: TensorReader, layer: StoredLayer, expert: int) -> ExpertWeights:
        prefix, hidden, inter = f"{layer.prefix}.experts.{expert}", layer.hidden_size, layer.intermediate_size
        shapes = {self.gate: (inter, hidden), self.up: (inter, hidden), self.down: (hidden, inter)}

        def weight(part: str) -> Tensor:
            dtypes = FLOATS if self.scale is None else (torch.float8_e4m3fn,)
            return reader.read(f"{prefix}.{part}.weight", shape=shapes[part], dtypes=dtypes)

        def scale(part: str) -> Tensor:
            shape = tuple(ceil_div(size, FP8_BLOCK) for size in shapes[part])
            # Some publishers store BF16 scales; FP32 holds them exactly.
            dtypes = (torch.float32, torch.bfloat16)
            return reader.read(f"{prefix}.{part}.{self.scale}", shape=shape, dtypes=dtypes).float()

        if self.scale is None:
            return Bf16Weights(
                layout=layer.layout,
                w13_weight=as_bf16(torch.cat([weight(self.gate), weight(self.up)]))[None],
                w2_weight=as_bf16(weight(self.down))[None],
            )
        return Fp8BlockWeights(
            layout=layer.layout,
            w13_weight=torch.cat([weight(self.gate), weight(self.up)])[None],
            w13_weight_scale=torch.cat([scale(self.gate), scale(self.up)])[None],
            w2_weight=weight(self.down)[None],
            w2_weight_scale=scale(self.down)[None],
        )

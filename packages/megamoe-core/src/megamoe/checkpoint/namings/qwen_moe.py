"""Qwen2-MoE, Qwen3-MoE and, unquantised, DeepSeek: one BF16 matrix a tensor."""

from __future__ import annotations

from typing import ClassVar

from megamoe.checkpoint.namings._per_expert import PerExpertNaming


class QwenMoe(PerExpertNaming):
    """`model.layers.N.mlp.experts.E.{gate,up,down}_proj.weight`."""

    name: ClassVar[str] = "Qwen-MoE / DeepSeek BF16"
    block: ClassVar[str] = "mlp"
    marker: ClassVar[str] = r"experts\.\d+\.gate_proj\.weight"
    gate, up, down = "gate_proj", "up_proj", "down_proj"

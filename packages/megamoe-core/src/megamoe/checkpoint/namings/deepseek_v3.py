"""DeepSeek-V3 and relatives in FP8: e4m3fn matrices, an FP32 scale per 128x128 block in `weight_scale_inv`.

Despite its name the scale is multiplied with the payload (deepseek-ai/DeepSeek-V3, inference/fp8_cast_bf16.py).
"""

from __future__ import annotations

from typing import ClassVar

from megamoe.checkpoint.namings._per_expert import PerExpertNaming


class DeepseekV3Fp8(PerExpertNaming):
    """`model.layers.N.mlp.experts.E.{gate,up,down}_proj.weight` with `.weight_scale_inv`."""

    name: ClassVar[str] = "DeepSeek-V3 FP8 blocks"
    block: ClassVar[str] = "mlp"
    marker: ClassVar[str] = r"experts\.\d+\.gate_proj\.weight_scale_inv"
    gate, up, down = "gate_proj", "up_proj", "down_proj"
    scale: ClassVar[str | None] = "weight_scale_inv"

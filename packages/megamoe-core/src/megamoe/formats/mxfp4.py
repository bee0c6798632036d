"""MXFP4: e2m1 payload, two values to a byte, one E8M0 scale per 1x32 (OCP MX v1.0)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megamoe.formats import e2m1, e8m0
from megamoe.formats.base import ActivationFormat, split_blocks
from megamoe.formats.e8m0 import E8M0Rounding
from megamoe.formats.mxfp8 import MX_BLOCK


@dataclass(frozen=True, kw_only=True)
class Mxfp4(ActivationFormat):
    """uint8 `[..., K / 2]`, the even element in the low nibble, and uint8 E8M0 scales `[..., K / 32]`.

    The scale alone can say NaN: a block that holds NaN or Inf gets byte 255. Dequantising is exact wherever FP32 can
    hold the product; a block whose amax rounds up to 2^128 decodes to Inf there, as in any rounding to nearest.

    Args:
        rounding: how amax becomes the scale.
    """

    rounding: E8M0Rounding = E8M0Rounding.UP

    name: ClassVar[str] = "mxfp4"
    block: ClassVar[int] = MX_BLOCK
    payload_dtype: ClassVar[torch.dtype] = torch.uint8
    scale_dtype: ClassVar[torch.dtype | None] = torch.uint8
    values_per_item: ClassVar[int] = 2

    def _encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        blocks = split_blocks(x.float(), MX_BLOCK)
        scales = e8m0.encode(blocks.abs().amax(-1), element=e2m1.ELEMENT, rounding=self.rounding)
        scaled = blocks * e8m0.decode_reciprocal(scales).unsqueeze(-1)
        return e2m1.pack(e2m1.encode(scaled).view(x.shape)), scales

    def _decode(self, payload: Tensor, scales: Tensor | None) -> Tensor:
        assert scales is not None
        values = e2m1.decode_packed(payload)
        return (split_blocks(values, MX_BLOCK) * e8m0.decode(scales).unsqueeze(-1)).view(values.shape)


MXFP4 = Mxfp4()

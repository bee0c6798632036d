"""MXFP8: e4m3fn payload, one E8M0 scale per 1x32 (OCP MX v1.0)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megamoe.formats import e4m3, e8m0
from megamoe.formats.base import ActivationFormat, split_blocks
from megamoe.formats.e8m0 import E8M0Rounding

MX_BLOCK = 32  # OCP MX v1.0, section 5.1


@dataclass(frozen=True, kw_only=True)
class Mxfp8(ActivationFormat):
    """e4m3fn `[..., K]` and uint8 E8M0 scales `[..., K / 32]`.

    A block that holds NaN or Inf gets scale byte 255 and NaN codes. Dequantising is exact wherever FP32 can hold the
    product; a block whose amax rounds up to 2^128 decodes to Inf there, as in any rounding to nearest.

    Args:
        rounding: how amax becomes the scale.
    """

    rounding: E8M0Rounding = E8M0Rounding.UP

    name: ClassVar[str] = "mxfp8"
    block: ClassVar[int] = MX_BLOCK
    payload_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    scale_dtype: ClassVar[torch.dtype | None] = torch.uint8

    def _encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        blocks = split_blocks(x.float(), MX_BLOCK)
        scales = e8m0.encode(blocks.abs().amax(-1), element=e4m3.ELEMENT, rounding=self.rounding)
        scaled = blocks * e8m0.decode_reciprocal(scales).unsqueeze(-1)
        return e4m3.encode(scaled).view(x.shape), scales

    def _decode(self, payload: Tensor, scales: Tensor | None) -> Tensor:
        assert scales is not None
        blocks = split_blocks(e4m3.decode(payload), MX_BLOCK)
        return (blocks * e8m0.decode(scales).unsqueeze(-1)).view(payload.shape)


MXFP8 = Mxfp8()

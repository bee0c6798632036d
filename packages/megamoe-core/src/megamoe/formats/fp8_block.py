"""FP8 with FP32 block scales: 1x128 for activations, 128x128 for weights (DeepSeek-V3's recipe).

    s = max(amax, 1e-10) / 448      one IEEE division
    q = e4m3fn(x / s)               one IEEE division, round to nearest even, saturating at ±448

A row of 1x128 blocks may end with a shorter one, of a multiple of 32: gpt-oss has rows of 2880.

A block that holds NaN or Inf has a NaN or infinite scale and decodes to NaN. `weight_scale_inv` of a DeepSeek
checkpoint is this s: the payload is multiplied by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megamoe.formats import e4m3
from megamoe.formats.base import ActivationFormat, BlockFormat, split_blocks

FP8_BLOCK = 128  # DeepSeek-V3 technical report, section 3.3.2
GRANULE = 32  # of a row of 1x128 blocks
AMAX_FLOOR = 1e-10  # keeps the scale of a zero block away from 0


@dataclass(frozen=True, kw_only=True)
class Fp8Block1x128(ActivationFormat):
    """e4m3fn `[..., K]` and FP32 scales `[..., K / 128]`, rounded up."""

    name: ClassVar[str] = "fp8_1x128"
    block: ClassVar[int] = FP8_BLOCK
    payload_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    scale_dtype: ClassVar[torch.dtype | None] = torch.float32

    @property
    def granule(self) -> int:
        return GRANULE

    def _encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        blocks = split_blocks(_whole_blocks(x.float()), FP8_BLOCK)
        scales = _scale(blocks.abs().amax(-1))
        codes = e4m3.encode(blocks / scales.unsqueeze(-1)).flatten(-2)
        return codes[..., : x.shape[-1]].contiguous(), scales

    def _decode(self, payload: Tensor, scales: Tensor | None) -> Tensor:
        assert scales is not None
        values = split_blocks(_whole_blocks(e4m3.decode(payload)), FP8_BLOCK) * scales.unsqueeze(-1)
        return values.flatten(-2)[..., : payload.shape[-1]].contiguous()


@dataclass(frozen=True, kw_only=True)
class Fp8Block128x128(BlockFormat):
    """e4m3fn `[..., N, K]` and FP32 scales `[..., N / 128, K / 128]`."""

    name: ClassVar[str] = "fp8_128x128"
    block: ClassVar[int] = FP8_BLOCK
    block_rows: ClassVar[int] = FP8_BLOCK
    payload_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    scale_dtype: ClassVar[torch.dtype | None] = torch.float32

    def _encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        blocks = _split_squares(x.float())
        scales = _scale(blocks.abs().amax((-3, -1)))
        return e4m3.encode(blocks / scales[..., None, :, None]).view(x.shape), scales

    def _decode(self, payload: Tensor, scales: Tensor | None) -> Tensor:
        assert scales is not None
        return (_split_squares(e4m3.decode(payload)) * scales[..., None, :, None]).view(payload.shape)


def _whole_blocks(x: Tensor) -> Tensor:
    """`x` with zeros at the end of its rows, up to whole blocks."""
    missing = -x.shape[-1] % FP8_BLOCK
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _scale(amax: Tensor) -> Tensor:
    # A tensor, not a number: torch on CUDA divides by a host scalar by multiplying with its reciprocal, which is off by
    # one unit in the last place for some amax.
    return amax.clamp(min=AMAX_FLOOR) / torch.full_like(amax, e4m3.MAX)


def _split_squares(x: Tensor) -> Tensor:
    """`[..., N, K]` as `[..., N / 128, 128, K / 128, 128]`."""
    *lead, num_rows, num_columns = x.shape
    return x.reshape(*lead, num_rows // FP8_BLOCK, FP8_BLOCK, num_columns // FP8_BLOCK, FP8_BLOCK)


FP8_1X128 = Fp8Block1x128()
FP8_128X128 = Fp8Block128x128()

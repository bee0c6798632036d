"""E8M0 scales in the order of gfx950's MFMA operands: one dword of a lane feeds four operands by op_sel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.layouts.base import Layout

_ROWS = 32  # two operands of 16 rows
_BLOCKS = 8  # two operands of 128 columns, four blocks of 32 each


@dataclass(frozen=True)
class ScaleShuffle(Layout):
    """Of scales `[..., R, K / 32]`, the byte of row r and block k goes to offset

        (r // 32) · K  +  (k // 8) · 256  +  (k % 4) · 64  +  (r % 16) · 4  +  (r // 16 % 2) · 2  +  k // 4 % 2

    within its R · K / 32 bytes: lane 16 (k % 4) + r % 16 reads a dword whose bytes are its scales of rows r and r + 16
    and of blocks k and k + 4. Weights and activations alike.
    """

    @property
    def name(self) -> str:
        return "scale_shuffle"

    def why_not(self, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        if dtype.itemsize > 1 or len(shape) < 2 or shape[-2] % _ROWS or shape[-1] % _BLOCKS:
            return f"bytes [..., R, K / 32] with R a multiple of {_ROWS} and K of {32 * _BLOCKS}"
        return None

    def _apply(self, tensor: Tensor) -> Tensor:
        *lead, num_rows, num_blocks = tensor.shape
        # [lead, r // 32, r // 16 % 2, r % 16, k // 8, k // 4 % 2, k % 4]
        split = tensor.reshape(math.prod(lead), num_rows // _ROWS, 2, 16, num_blocks // _BLOCKS, 2, 4)
        return split.permute(0, 1, 4, 6, 3, 2, 5).reshape(tensor.shape)

    def _invert(self, tensor: Tensor) -> Tensor:
        *lead, num_rows, num_blocks = tensor.shape
        # [lead, r // 32, k // 8, k % 4, r % 16, r // 16 % 2, k // 4 % 2]
        split = tensor.reshape(math.prod(lead), num_rows // _ROWS, num_blocks // _BLOCKS, 4, 16, 2, 2)
        return split.permute(0, 1, 5, 4, 2, 6, 3).reshape(tensor.shape)


SCALE_SHUFFLE = ScaleShuffle()

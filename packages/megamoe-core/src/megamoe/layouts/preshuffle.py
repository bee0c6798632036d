"""16x16 preshuffle of weights: each MFMA operand becomes one contiguous run, so that gfx950 loads it without LDS."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.layouts.base import Layout

_SIDE = 16  # rows of an operand of v_mfma 16x16x128, and bytes of a 128-bit load


@dataclass(frozen=True)
class Preshuffle16x16(Layout):
    """Tiles of 16 rows x 16 bytes, each contiguous, in row-major order of tiles.

    Of `[..., N, Kb]` (Kb bytes a row: K for e4m3fn, K / 2 for e2m1), byte b of row n goes to offset

        (n // 16) · 16 · Kb  +  (b // 16) · 256  +  (n % 16) · 16  +  b % 16

    within its N · Kb bytes. The dtype is one byte wide.
    """

    @property
    def name(self) -> str:
        return "preshuffle_16x16"

    def why_not(self, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        if dtype.itemsize > 1 or len(shape) < 2 or shape[-2] % _SIDE or shape[-1] % _SIDE:
            return f"bytes [..., N, Kb] with N and Kb multiples of {_SIDE}"
        return None

    def _apply(self, tensor: Tensor) -> Tensor:
        *lead, num_rows, num_bytes = tensor.shape
        tiles = tensor.reshape(math.prod(lead), num_rows // _SIDE, _SIDE, num_bytes // _SIDE, _SIDE)
        return tiles.transpose(2, 3).reshape(tensor.shape)

    def _invert(self, tensor: Tensor) -> Tensor:
        *lead, num_rows, num_bytes = tensor.shape
        tiles = tensor.reshape(math.prod(lead), num_rows // _SIDE, num_bytes // _SIDE, _SIDE, _SIDE)
        return tiles.transpose(2, 3).reshape(tensor.shape)


PRESHUFFLE_16X16 = Preshuffle16x16()

"""Orders of w13's 2I rows: which row of `[E, 2I, ...]` holds gate channel c, and which holds up channel c.

    layout          gate channel c at row            up channel c   who reads it
    PACKED          c                                I rows later   checkpoints of DeepSeek, Qwen, Mixtral
    ALTERNATING     2c                               1 row later    checkpoints of gpt-oss
    INTERLEAVED_8   16 (c//8) + c%8                  8 rows later   the SM90 kernel: 256 columns of a tile are 128
                                                                    finished channels
    BLOCKS_16       64J + 32b + 4g + r, where        16 rows later  the gfx950 kernel: a lane owns 8 whole channels,
                    c = 32J + 8g + 4b + r                           so SwiGLU needs no shuffle

The same order goes for the rows of per-row scales `[E, 2I, K / block]` and for biases `[E, 2I]`. gpt-oss stores its
BF16 experts as `[E, H, 2I]`: transpose the last two dimensions first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.layouts.base import CheckpointOrder, Layout


@dataclass(frozen=True, kw_only=True)
class GateUpOrder(Layout):
    """An order of w13's rows that repeats every `period` channels.

    Args:
        tag: its name.
        period: channels after which the pattern repeats; it divides I.
        gate_row: int64 channels to the rows of their gates, elementwise.
        up_offset: rows from a channel's gate to its up.
    """

    tag: str
    period: int
    gate_row: Callable[[Tensor], Tensor]
    up_offset: int

    @property
    def name(self) -> str:
        return self.tag

    def why_not(self, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        if len(shape) < 2 or shape[1] % (2 * self.period):
            return f"[E, 2I, ...] with I a multiple of {self.period}"
        return None

    def rows(self, intermediate_size: int, device: torch.device | None = None) -> Tensor:
        """int64 `[2I]`: for each row of the packed order, its row in this one."""
        gate = self.gate_row(torch.arange(intermediate_size, device=device))
        return torch.cat((gate, gate + self.up_offset))

    def _apply(self, tensor: Tensor) -> Tensor:
        rows = self.rows(tensor.shape[1] // 2, tensor.device)
        return tensor.index_select(1, rows.argsort())

    def _invert(self, tensor: Tensor) -> Tensor:
        return tensor.index_select(1, self.rows(tensor.shape[1] // 2, tensor.device))


def _alternating(c: Tensor) -> Tensor:
    return 2 * c


def _interleaved_8(c: Tensor) -> Tensor:
    return c // 8 * 16 + c % 8


def _blocks_16(c: Tensor) -> Tensor:
    return c // 32 * 64 + c // 4 % 2 * 32 + c // 8 % 4 * 4 + c % 4


PACKED = CheckpointOrder(tag="packed")
ALTERNATING = GateUpOrder(tag="alternating", period=1, gate_row=_alternating, up_offset=1)
INTERLEAVED_8 = GateUpOrder(tag="interleaved_8", period=8, gate_row=_interleaved_8, up_offset=8)
BLOCKS_16 = GateUpOrder(tag="blocks_16", period=32, gate_row=_blocks_16, up_offset=16)

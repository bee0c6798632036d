"""Layouts of weights and scales: tagged, invertible, refused when the tag is wrong."""

from __future__ import annotations

from megamoe.layouts.base import ROW_MAJOR, CheckpointOrder, Composed, LaidOut, Layout
from megamoe.layouts.gate_up import ALTERNATING, BLOCKS_16, INTERLEAVED_8, PACKED, GateUpOrder
from megamoe.layouts.preshuffle import PRESHUFFLE_16X16
from megamoe.layouts.scale_shuffle import SCALE_SHUFFLE

__all__ = [
    "Layout",
    "LaidOut",
    "Composed",
    "CheckpointOrder",
    "GateUpOrder",
    "ROW_MAJOR",
    "PACKED",
    "ALTERNATING",
    "INTERLEAVED_8",
    "BLOCKS_16",
    "PRESHUFFLE_16X16",
    "SCALE_SHUFFLE",
]

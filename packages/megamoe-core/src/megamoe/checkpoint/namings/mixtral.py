"""Mixtral: w1 is gate, w3 is up, w2 is down."""

from __future__ import annotations

from typing import ClassVar

from megamoe.checkpoint.namings._per_expert import PerExpertNaming


class Mixtral(PerExpertNaming):
    """`model.layers.N.block_sparse_moe.experts.E.{w1,w2,w3}.weight`."""

    name: ClassVar[str] = "Mixtral BF16"
    block: ClassVar[str] = "block_sparse_moe"
    marker: ClassVar[str] = r"experts\.\d+\.w1\.weight"
    gate, up, down = "w1", "w3", "w2"

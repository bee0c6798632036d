"""Pull the rows that an owner computes from the ranks that hold their tokens.

    source rank's input [cap, row bytes]; picks [n] int32, token * K + slot
      -> rows [n, row bytes], in the order of the picks

Bytes are moved as they are: payload and scales were made by quantize_input on the home rank. A token that picked two
experts of one owner is pulled twice, once per row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pull_rows(source: Tensor, picks: Tensor, top_k: int, out: Tensor) -> None:
    """Copy the source rank's rows of `picks` into `out`.

    Args:
        source: `[cap, n]`, payload or scales of the source's tokens, as bytes.
        picks: `[rows]` int32, token * top_k + slot.
        top_k: K.
        out: `[rows, n]`, same dtype, contiguous.
    """
    torch.index_select(source, 0, torch.div(picks, top_k, rounding_mode="floor"), out=out)

"""Combine: sum each token's rows at home.

    combine [K, T, row bytes] uint8, valid [T, K] bool  ->  y [T, H] BF16

    y[t] = bf16( ((0 + row[0, t]) + row[1, t]) + ... + row[K-1, t] ),   FP32, slots in order

Slots without an expert contribute exactly 0: their bytes, left by an earlier call or never written, can't reach y, not
even as NaN. The order is that of the slots, whatever rank each row came from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.formats import TransportFormat


def combine_tokens(wire: Tensor, valid: Tensor, transport: TransportFormat, hidden_size: int) -> Tensor:
    """Sum T tokens over their slots.

    Args:
        wire: `[K, T, row bytes]` uint8.
        valid: `[T, K]` bool, which slots have an expert.
        transport: how rows are encoded.
        hidden_size: H.

    Returns:
        `[T, H]` BF16; a token without experts gets zeros.
    """
    y = torch.zeros(wire.shape[1], hidden_size, dtype=torch.float32, device=wire.device)
    for slot, rows in enumerate(wire):
        has_row = valid[:, slot].unsqueeze(1)
        if bool(has_row.all()):
            y += transport.decode(rows)
        else:
            y += torch.where(has_row, transport.decode(rows), 0.0)
    return y.to(torch.bfloat16)

"""Quantise a rank's tokens into the mode's activation format, before anything is sent.

    hidden_states [T, H] BF16  ->  payload [T, H] (packed two to a byte for e2m1), scales [T, H / fmt.block], rounded up

A token is quantised once, on its home rank, and its bytes travel to every expert that it picked: experts on different
ranks see the same operand. Callers that hold quantised activations already pass (payload, scales) and skip this stage.
"""

from __future__ import annotations

from torch import Tensor

from megamoe.formats import ActivationFormat, Quantized


def quantize_input(hidden_states: Tensor, fmt: ActivationFormat) -> Quantized:
    """Quantise `[T, H]` BF16 row by row in `fmt`; the identity in mode bf16.

    A row never sees another row, so the NaN of a row without experts stays there.
    """
    return fmt.quantize(hidden_states)

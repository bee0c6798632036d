"""e2m1: the 4-bit float of MXFP4 (OCP MX v1.0, section 5.3.3), two to a byte.

    code   0   1    2   3    4   5   6   7     8 to 15: the same, negative
    value  0   0.5  1   1.5  2   3   4   6

There is no NaN and no infinity. In a byte, the element with the even index is the low nibble.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.errors import FormatError
from megamoe.formats.e8m0 import Element

MAX = 6.0
ELEMENT = Element(name="e2m1", max_pos=MAX, mantissa_bits=1)

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = _MAGNITUDES + tuple(-magnitude for magnitude in _MAGNITUDES)
# A tie goes to the even code: a midpoint below an odd code rounds down, one below an even code rounds up.
_MIDPOINTS_DOWN = (0.25, 1.25, 2.5, 5.0)
_MIDPOINTS_UP = (0.75, 1.75, 3.5)


def encode(x: Tensor) -> Tensor:
    """FP32 to e2m1 codes 0 to 15, one per uint8, same shape.

    Rounds to nearest even and saturates at ±6. The sign of zero is kept. NaN becomes +6, as in PTX's
    `cvt.rn.satfinite.e2m1x2`; OCP leaves it open, and the block's scale byte says NaN anyway.
    """
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for midpoint in _MIDPOINTS_DOWN:
        code += magnitude > midpoint
    for midpoint in _MIDPOINTS_UP:
        code += magnitude >= midpoint
    code += x.signbit().to(torch.uint8) << 3
    return torch.where(x.isnan(), 7, code).to(torch.uint8)


def decode(codes: Tensor) -> Tensor:
    """e2m1 codes 0 to 15, one per uint8, to FP32, same shape."""
    table = torch.tensor(_VALUES, dtype=torch.float32, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def pack(codes: Tensor) -> Tensor:
    """Codes `[..., n]` to bytes `[..., n / 2]`; uint8 both.

    Raises:
        FormatError: n is odd.
    """
    if codes.shape[-1] % 2:
        raise FormatError("an odd number of e2m1 codes does not fill bytes", got=codes.shape[-1], expected="even")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(payload: Tensor) -> Tensor:
    """Bytes `[..., n / 2]` to codes `[..., n]`; uint8 both."""
    return torch.stack((payload & 0xF, payload >> 4), dim=-1).flatten(-2)


def decode_packed(payload: Tensor) -> Tensor:
    """Bytes `[..., n / 2]` to FP32 `[..., n]`, through a table of both values of each byte."""
    every_byte = torch.arange(256, dtype=torch.uint8, device=payload.device)
    table = decode(unpack(every_byte.unsqueeze(-1)))
    pairs = table.index_select(0, payload.flatten().int())
    return pairs.view(*payload.shape[:-1], 2 * payload.shape[-1])

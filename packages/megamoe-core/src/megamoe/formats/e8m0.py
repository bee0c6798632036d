"""E8M0 block scales: one unsigned byte b stands for 2^(b − 127), and 255 for NaN (OCP MX v1.0, section 5.4.1).

    byte   0        1        127   254     255
    value  2^-127   2^-126   1     2^127   NaN

There is no zero and no infinity. Byte 0 is a subnormal FP32 number. A byte is unsigned: one that is loaded as a signed
char and shifted corrupts its neighbours from 128 on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from megamoe.errors import FormatError

BIAS = 127
NAN_BYTE = 255
MAX_BYTE = 254


@dataclass(frozen=True, kw_only=True)
class Element:
    """The payload's number format, as far as its scale depends on it.

    Args:
        name: the format's name.
        max_pos: its largest finite value.
        mantissa_bits: its explicit mantissa bits.
    """

    name: str
    max_pos: float
    mantissa_bits: int

    @property
    def max_exponent(self) -> int:
        """floor(log2(max_pos)): 8 for e4m3, 2 for e2m1."""
        return math.frexp(self.max_pos)[1] - 1

    @property
    def max_significand(self) -> float:
        """max_pos / 2^max_exponent: 1.75 for e4m3, 1.5 for e2m1."""
        return 2 * math.frexp(self.max_pos)[0]


class E8M0Rounding(Enum):
    """How a block's amax becomes a power of two.

    Write amax = m · 2^e with 1 <= m < 2, and emax = floor(log2(max_pos)). Each rule gives 2^(e − emax), or twice that
    when m is large:

    ========  =====================================  ==========================================================
    rule      twice when                             who uses it
    ========  =====================================  ==========================================================
    UP        m > max_pos / 2^emax                   the default here; NVIDIA's MX recipe (torchao "RCEIL", AITER
                                                     "RoundUp"): the smallest power of two >= amax / max_pos
    FLOOR     never                                  OCP MX v1.0, section 6.3; torchao "FLOOR"
    CEIL      m > 1                                  torchao "CEIL"
    EVEN      m >= 2 − 2^-(mantissa_bits + 1)        AMD Quark "even", torchao "EVEN": amax is first rounded to the
                                                     element's mantissa, to nearest even
    RTN_1_5   m >= 1.5                               AITER's and FlyDSL's fused MXFP4 A2: amax is first rounded to
                                                     the nearest power of two, the tie 1.5 · 2^k upwards
    ========  =====================================  ==========================================================

    Under FLOOR, EVEN and RTN_1_5 the largest values of a block may saturate; under UP and CEIL none does. For e2m1,
    RTN_1_5 differs from UP only at m = 1.5 exactly, where UP keeps the smaller scale and the payload is exactly 6.
    """

    UP = "up"
    FLOOR = "floor"
    CEIL = "ceil"
    EVEN = "even"
    RTN_1_5 = "rtn_1_5"

    def doubles(self, significand: Tensor, element: Element) -> Tensor:
        """Which of `significand` (FP64, in [1, 2)) take the doubled scale; bool, same shape."""
        if self is E8M0Rounding.UP:
            return significand > element.max_significand
        if self is E8M0Rounding.CEIL:
            return significand > 1.0
        if self is E8M0Rounding.EVEN:
            return significand >= 2.0 - 2.0 ** -(element.mantissa_bits + 1)
        if self is E8M0Rounding.RTN_1_5:
            return significand >= 1.5
        return torch.zeros_like(significand, dtype=torch.bool)


def encode(amax: Tensor, *, element: Element, rounding: E8M0Rounding) -> Tensor:
    """Scale bytes of blocks whose largest magnitude is `amax`.

    Args:
        amax: FP32, any shape, >= 0, or NaN.
        element: the payload's number format.
        rounding: the rule.

    Returns:
        uint8, same shape. Exponents below −127 saturate; none above 126 can come, since max_pos is 6 or more. NaN and
        Inf give 255. Zero gives 0, as every amax up to 2^-127 · max_pos does under UP; the payload of a zero block is
        zero under any scale.

    Exact for every FP32 input: FP64 holds FP32's subnormals as normal numbers, and no logarithm is taken.
    """
    fraction, exponent = torch.frexp(amax.double())  # fraction in [0.5, 1)
    doubles = rounding.doubles(2 * fraction, element)
    byte = (exponent - 1 - element.max_exponent + doubles + BIAS).clamp(min=0)
    byte = torch.where(amax == 0, 0, byte)
    return torch.where(amax.isfinite(), byte, NAN_BYTE).to(torch.uint8)


def decode(scales: Tensor) -> Tensor:
    """2^(b − 127) in FP32, NaN for 255; `scales` is uint8 or float8_e8m0fnu, any shape."""
    byte = as_bytes(scales).to(torch.int32)
    bits = byte << 23  # already right for 1 to 254
    bits = torch.where(byte == 0, 0x00400000, bits)
    return torch.where(byte == NAN_BYTE, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def decode_reciprocal(scales: Tensor) -> Tensor:
    """2^(127 − b) in FP32, exact, NaN for 255. Multiplying by it divides by the scale without a division."""
    return decode(MAX_BYTE - as_bytes(scales))  # uint8 wraps 254 − 255 to 255: NaN stays NaN


def as_bytes(scales: Tensor) -> Tensor:
    """The same bytes as uint8; uint8 and float8_e8m0fnu mean the same.

    Raises:
        FormatError: any other dtype.
    """
    if scales.dtype == torch.uint8:
        return scales
    if scales.dtype == torch.float8_e8m0fnu:
        return scales.view(torch.uint8)
    raise FormatError(
        "E8M0 scales have the wrong dtype",
        got=scales.dtype,
        expected="torch.uint8 or torch.float8_e8m0fnu",
        hint="E8M0 scales are exponent bytes, 2^(b - 127), not numbers",
    )

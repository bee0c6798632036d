"""MXFP4 weights as FP8 operands: a8w4 on SM90, which has no block-scaled MMA.

The four E8M0 scales of 128 columns become one FP32 base scale, and what is left of each goes into the operand:

    e2m1 value · 2^own  =  (e2m1 value · 2^(own − base)) · 2^base,      base = max of the four own − 6

The operand is exact in e4m3fn while own − base lies in [−8, 6], since e4m3fn holds 0.5 · 2^-8 = 2^-9 (its smallest
subnormal) to 6 · 2^6 = 384. So the four scales may differ by a factor of at most 2^14.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.errors import FormatError
from megamoe.formats import e2m1, e4m3, e8m0
from megamoe.formats.base import Quantized, split_blocks
from megamoe.formats.fp8_block import FP8_1X128, FP8_BLOCK
from megamoe.formats.mxfp4 import Mxfp4
from megamoe.formats.mxfp8 import MX_BLOCK

HEADROOM = 6  # 6 · 2^6 = 384 <= 448 < 6 · 2^7
MAX_SPREAD = 14  # 2^6 down to 2^-8


def mxfp4_to_fp8_1x128(weights: Quantized) -> Quantized:
    """MXFP4 `[..., K]` to FP8_1X128 of the same values, bit for bit once dequantised.

    Args:
        weights: MXFP4, K a multiple of 128; usually `[E, N, K]`.

    Returns:
        e4m3fn operands `[..., K]`; FP32 base scales `[..., K / 128]`, powers of two >= 2^-126. Blocks of 32 zeros stay
        zero and constrain nothing, whatever their scale; blocks with scale byte 255 become NaN codes.

    Raises:
        FormatError: another format, K not a multiple of 128, or a block of 128 whose scales differ by more than 2^14;
            the message names its expert, row and block. Finding that out waits for the device.
    """
    if not isinstance(weights.fmt, Mxfp4) or weights.scales is None:
        raise FormatError("only MXFP4 weights can become FP8 operands", got=weights.fmt.name, expected="mxfp4")
    if weights.shape[-1] % FP8_BLOCK:
        raise FormatError(
            "MXFP4 weights need whole blocks of 128 to become FP8 operands",
            got=f"{weights.shape[-1]} columns",
            expected=f"a multiple of {FP8_BLOCK}",
        )
    own = split_blocks(weights.scales, FP8_BLOCK // MX_BLOCK).int()
    magnitudes = split_blocks(weights.payload & 0x77, MX_BLOCK // 2)  # both nibbles without their signs
    counts = (magnitudes != 0).any(-1).view(own.shape) & (own != e8m0.NAN_BYTE)
    base = _base_bytes(own, counts)

    is_nan = own == e8m0.NAN_BYTE
    # A block that does not count is all zeros or all NaN: any finite factor will do.
    factor = e8m0.decode(torch.where(counts, own - base + e8m0.BIAS, e8m0.BIAS).to(torch.uint8))
    factor = torch.where(is_nan, torch.nan, factor).view(weights.scales.shape).unsqueeze(-1)
    operands = split_blocks(e2m1.decode_packed(weights.payload), MX_BLOCK) * factor
    return Quantized(
        payload=e4m3.encode(operands).view(weights.shape),
        scales=e8m0.decode(base.squeeze(-1).to(torch.uint8)),
        fmt=FP8_1X128,
    )


def _base_bytes(own: Tensor, counts: Tensor) -> Tensor:
    """Base scale bytes, int32 `[..., K / 128, 1]`, of those scale bytes in `own`, `[..., K / 128, 4]`, that count."""
    highest = torch.where(counts, own, -1).amax(-1, keepdim=True)
    lowest = torch.where(counts, own, e8m0.NAN_BYTE).amin(-1, keepdim=True)
    _refuse_wide(highest - lowest)
    # Not below byte 1: 2^-127 is subnormal, and kernels may flush it. Scales this small leave room for that.
    return (highest - HEADROOM).clamp(min=1)


def _refuse_wide(spread: Tensor) -> None:
    too_wide = (spread.squeeze(-1) > MAX_SPREAD).nonzero()
    if not len(too_wide):
        return
    *lead, row, block = too_wide[0].tolist()
    expert = f"expert {', '.join(map(str, lead))}, " if lead else ""
    raise FormatError(
        f"the MXFP4 scales of {expert}row {row}, block {block} of 128 columns are too far apart for FP8 operands",
        got=f"a factor of 2^{int(spread[*lead, row, block, 0])} here, and {len(too_wide)} such blocks in all",
        expected=f"at most 2^{MAX_SPREAD}",
        hint="use the reference or rocm backend, whose a8w4 keeps a scale per 32",
    )

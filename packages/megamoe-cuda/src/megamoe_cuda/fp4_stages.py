"""MXFP4 weights as the SM90 kernel streams them: packed stages of 256 rows x 128 of K, and a base scale per 128 x 128.

The kernel turns each e2m1 code into an e4m3 operand, code * 2^(own - base): own is the E8M0 scale of the code's 32,
base that of its 128 x 128 block (the largest of the block, less 6). That is exact while own - base lies in [-8, 6], so
the scales of a 128 x 128 block may differ by 2^14 (megamoe.formats.mxfp4_as_fp8 says why). Blocks of 32 zeros constrain
nothing.

A stage is what include/megamoe/roles/convert.cuh reads, 17408 bytes:

    codes     [2 halves][4 blocks of 32 along K][128 rows][16 bytes]
    entries   [2 halves][128 rows][4 blocks]: 8 * (own - base + 8), where a block's operands lie in the kernel's table,
              whose last entry, 8 * 15, is NaN

A word of codes holds eight: nibble n the magnitude of code n; the sign of code i < 4 stands in nibble 2 i + 1, that of
code 4 + i in nibble 2 i. A row's word q < 4 holds elements 4 q to 4 q + 3 and 16 + 4 q to 16 + 4 q + 3 of its 32:
what a lane has of them in a WGMMA's register operand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.errors import FormatError
from megamoe.formats import e8m0
from megamoe.formats.mxfp4_as_fp8 import HEADROOM, MAX_SPREAD
from megamoe.formats.mxfp8 import MX_BLOCK
from megamoe_cuda.kernel_config import BLOCK_K, BLOCK_N

BLOCKS = BLOCK_K // MX_BLOCK  # MX blocks of a stage, along K
HALF_ROWS = 128  # a converter thread has one row of each half
CODE_BYTES = BLOCK_N * BLOCK_K // 2
STAGE_BYTES = CODE_BYTES + BLOCK_N * BLOCKS
LOWEST_SHIFT = HEADROOM - MAX_SPREAD  # -8: 0.5 * 2^-8 is e4m3fn's smallest
NAN_ENTRY = 15
ENTRY_BYTES = 8


def base_bytes(codes: Tensor, scales: Tensor, what: str) -> Tensor:
    """E8M0 bytes of the base scales, int32 `[N / 128, K / 128]`.

    Args:
        codes: `[N, K / 2]` uint8, two e2m1 codes a byte; N and K multiples of 128.
        scales: `[N, K / 32]` uint8.
        what: names the matrix in an error.

    Raises:
        FormatError: a 128 x 128 block whose scales differ by more than 2^14.
    """
    own = scales.int()
    counts = _count(codes, scales)
    highest = _squares(torch.where(counts, own, -1)).amax((1, 3))
    lowest = _squares(torch.where(counts, own, e8m0.NAN_BYTE)).amin((1, 3))
    too_wide = (highest - lowest > MAX_SPREAD).nonzero()
    if len(too_wide):
        row, column = too_wide[0].tolist()
        raise FormatError(
            f"the MXFP4 scales of {what}, 128 x 128 block ({row}, {column}), are too far apart for FP8 operands",
            got=f"a factor of 2^{int((highest - lowest)[row, column])} here, and {len(too_wide)} such blocks in all",
            expected=f"at most 2^{MAX_SPREAD}",
            hint="use the reference or rocm backend, whose a8w4 keeps a scale per 32",
        )
    return (highest - HEADROOM).clamp(min=1)  # not 2^-127, which is subnormal: scales this small leave room for that


def table_entries(codes: Tensor, scales: Tensor, base: Tensor) -> Tensor:
    """uint8 `[N, K / 32]`: for each block of 32, the byte of its entry in the kernel's table."""
    own = scales.int()
    shift = own - base.repeat_interleave(HALF_ROWS, 0).repeat_interleave(BLOCKS, 1)
    entry = torch.where(_count(codes, scales), shift - LOWEST_SHIFT, -LOWEST_SHIFT)
    entry = torch.where(own == e8m0.NAN_BYTE, NAN_ENTRY, entry)
    return (entry * ENTRY_BYTES).to(torch.uint8)


def pack_stages(codes: Tensor, entries: Tensor) -> Tensor:
    """uint8 `[N / 256, K / 128, 17408]` of codes `[N, K / 2]` and entries `[N, K / 32]`, rows in the kernel's order."""
    tiles, k_blocks = codes.shape[0] // BLOCK_N, entries.shape[1] // BLOCKS
    packed = _signs_apart(codes).view(tiles, 2, HALF_ROWS, k_blocks, BLOCKS, MX_BLOCK // 2)
    packed = packed.permute(0, 3, 1, 4, 2, 5).reshape(tiles, k_blocks, CODE_BYTES)
    words = entries.view(tiles, 2, HALF_ROWS, k_blocks, BLOCKS).permute(0, 3, 1, 2, 4).reshape(tiles, k_blocks, -1)
    return torch.cat((packed, words), dim=-1)


def unpack_stages(stages: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and entries: the inverse of `pack_stages`."""
    tiles, k_blocks, _ = stages.shape
    packed, words = stages[..., :CODE_BYTES], stages[..., CODE_BYTES:]
    packed = packed.view(tiles, k_blocks, 2, BLOCKS, HALF_ROWS, MX_BLOCK // 2).permute(0, 2, 4, 1, 3, 5)
    words = words.view(tiles, k_blocks, 2, HALF_ROWS, BLOCKS).permute(0, 2, 3, 1, 4)
    rows = tiles * BLOCK_N
    return _signs_together(packed.reshape(rows, -1)), words.reshape(rows, -1)


def own_bytes(entries: Tensor, base: Tensor) -> Tensor:
    """uint8 E8M0 scales `[N, K / 32]` of table entries and FP32 base scales; of a block of zeros, its base."""
    exponent = base.view(torch.int32) >> 23
    shift = entries.int() // ENTRY_BYTES + LOWEST_SHIFT
    own = exponent.repeat_interleave(HALF_ROWS, 0).repeat_interleave(BLOCKS, 1) + shift
    return torch.where(entries == NAN_ENTRY * ENTRY_BYTES, e8m0.NAN_BYTE, own).to(torch.uint8)


def _count(codes: Tensor, scales: Tensor) -> Tensor:
    """Which blocks of 32 hold a number other than 0."""
    magnitudes = (codes & 0x77).view(codes.shape[0], -1, MX_BLOCK // 2)
    return (magnitudes != 0).any(-1) & (scales != e8m0.NAN_BYTE)


def _squares(blocks: Tensor) -> Tensor:
    """`[N, K / 32]` as `[N / 128, 128, K / 128, 4]`."""
    rows, columns = blocks.shape
    return blocks.view(rows // HALF_ROWS, HALF_ROWS, columns // BLOCKS, BLOCKS)


_SIGN_OF = (4, 0, 5, 1, 6, 2, 7, 3)  # of which code nibble n holds the sign


def _signs_apart(codes: Tensor) -> Tensor:
    nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).view(codes.shape[0], -1, 2, 4, 4)
    nibbles = nibbles.transpose(-3, -2).reshape(codes.shape[0], -1, 8)
    nibbles = nibbles & 7 | nibbles[..., _SIGN_OF] & 8
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).view(codes.shape)


def _signs_together(codes: Tensor) -> Tensor:
    nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).view(codes.shape[0], -1, 8)
    inverse = [_SIGN_OF.index(code) for code in range(8)]
    nibbles = nibbles & 7 | nibbles[..., inverse] & 8
    nibbles = nibbles.view(codes.shape[0], -1, 4, 2, 4).transpose(-3, -2).reshape(codes.shape[0], -1, 8)
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).view(codes.shape)

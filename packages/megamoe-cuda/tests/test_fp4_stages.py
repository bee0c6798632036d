"""Packed MXFP4 stages: what the kernel's arithmetic makes of them, bit for bit, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamoe.errors import FormatError
from megamoe.formats import MXFP4, e8m0
from megamoe_cuda import fp4_stages
from megamoe_cuda.fp4_stages import base_bytes, pack_stages, table_entries, unpack_stages

ROWS, COLUMNS = 512, 384


def mxfp4(*, lowest: int = 120, highest: int = 134, seed: int = 0) -> tuple[Tensor, Tensor]:
    """All codes, scales up to 2^14 apart."""
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8, generator=rng)
    scales = torch.randint(lowest, highest + 1, (ROWS, COLUMNS // 32), dtype=torch.uint8, generator=rng)
    return codes, scales


def operand_table() -> Tensor:
    """The 16 x 8 bytes of numerics/fp4_as_fp8.cuh: for each shift from -8, the e4m3 codes of the eight magnitudes."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    shifts = torch.arange(16) + fp4_stages.LOWEST_SHIFT
    table = (magnitudes * torch.exp2(shifts.unsqueeze(1).float())).to(torch.float8_e4m3fn).view(torch.uint8)
    table[fp4_stages.NAN_ENTRY] = 0x7F
    return table


def convert(word: int, operands: list[int]) -> list[int]:
    """What OperandTable::operands makes of a packed word: eight bytes, magnitudes looked up, signs masked in."""
    magnitudes = word & 0x77777777
    first = [operands[magnitudes >> 4 * i & 7] | (word & 0x80808080) >> 8 * i & 0x80 for i in range(4)]
    second = [operands[magnitudes >> 16 + 4 * i & 7] | (word << 4 & 0x80808080) >> 8 * i & 0x80 for i in range(4)]
    return first + second


def operands_of_row(stage: Tensor, row: int) -> Tensor:
    """e4m3 operands `[128]` of one of a stage's 256 rows, as roles/convert.cuh addresses them.

    A word's first four belong to the first half of the block's 32 columns, the others to the second half.
    """
    half, its_row, table = row // 128, row % 128, operand_table().tolist()
    found: list[int] = []
    for block in range(4):
        first = half * 8192 + block * 2048 + its_row * 16
        words = stage[first : first + 16].view(torch.int32).tolist()
        entry = int(stage[16384 + 4 * row + block])
        assert entry % 8 == 0
        converted = [convert(word & 0xFFFFFFFF, table[entry // 8]) for word in words]
        for half_of_word in (slice(0, 4), slice(4, 8)):
            found += [operand for operands in converted for operand in operands[half_of_word]]
    return torch.tensor(found, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("row", [0, 1, 9, 127, 128, 255])
def test_the_kernels_arithmetic_gives_the_weights_back(row: int) -> None:
    codes, scales = mxfp4()
    base = base_bytes(codes, scales, "w")
    stages = pack_stages(codes, table_entries(codes, scales, base))
    assert stages.shape == (ROWS // 256, COLUMNS // 128, fp4_stages.STAGE_BYTES)
    values = MXFP4.dequantize(codes, scales)
    for tile in range(ROWS // 256):
        for k_block in range(COLUMNS // 128):
            scale = e8m0.decode(base[tile * 2 + row // 128, k_block].to(torch.uint8))
            got = operands_of_row(stages[tile, k_block], row).float() * scale
            assert torch.equal(got, values[tile * 256 + row, k_block * 128 : (k_block + 1) * 128])


def test_unpacking_is_the_inverse() -> None:
    codes, scales = mxfp4()
    base = base_bytes(codes, scales, "w")
    entries = table_entries(codes, scales, base)
    its_codes, its_entries = unpack_stages(pack_stages(codes, entries))
    assert torch.equal(its_codes, codes)
    assert torch.equal(its_entries, entries)
    assert torch.equal(fp4_stages.own_bytes(entries, e8m0.decode(base.to(torch.uint8))), scales)


def test_a_block_of_nan_stays_nan_and_constrains_nothing() -> None:
    codes, scales = mxfp4()
    scales[3, 1] = e8m0.NAN_BYTE
    base = base_bytes(codes, scales, "w")
    row = operands_of_row(pack_stages(codes, table_entries(codes, scales, base))[0, 0], 3).float()
    assert row[32:64].isnan().all()
    assert not row[:32].isnan().any()


def test_blocks_of_zeros_constrain_nothing() -> None:
    codes, scales = mxfp4()
    codes[5, :16], scales[5, 0] = 0, 0
    base = base_bytes(codes, scales, "w")
    row = operands_of_row(pack_stages(codes, table_entries(codes, scales, base))[0, 0], 5).float()
    assert (row[:32] == 0).all()


@pytest.mark.parametrize("lowest, highest", [(0, 14), (1, 8), (240, 254)])
def test_the_ends_of_the_scales_range_are_exact(lowest: int, highest: int) -> None:
    codes, scales = mxfp4(lowest=lowest, highest=highest)
    base = base_bytes(codes, scales, "w")
    stage = pack_stages(codes, table_entries(codes, scales, base))[0, 0]
    got = operands_of_row(stage, 7).double() * 2.0 ** (int(base[0, 0]) - 127)
    values = MXFP4.dequantize(codes[7, :64] & 0x77, torch.full((4,), 127, dtype=torch.uint8)).double()
    own = torch.exp2(scales[7, :4].double() - 127).repeat_interleave(32)
    assert torch.equal(got.abs(), values * own)


def test_scales_further_apart_than_e4m3_reaches_are_refused_with_their_place() -> None:
    codes, scales = mxfp4(lowest=127, highest=127)
    codes[200, 32:48] = 0x11
    scales[200, 5] = 127 - 15
    with pytest.raises(FormatError, match=r"of w, 128 x 128 block \(1, 1\)"):
        base_bytes(codes, scales, "w")
    scales[200, 5] = 127 - 14
    base_bytes(codes, scales, "w")

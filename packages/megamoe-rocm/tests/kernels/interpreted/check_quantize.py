"""Quantisation on the device has the bits of megamoe.formats, for every BF16 number."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.formats import FP8_BLOCKWISE_1X32, MXFP4, MXFP8, e2m1, e4m3
from megamoe_rocm.kernels.numerics import (
    bf16_bits,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    float_bits,
    quantize_blocks,
    scale_byte,
    scale_value,
)
from megamoe_rocm.kernels.quantize import copy_input, quantize_input

NO_LIMIT = torch.tensor([2**31 - 1], dtype=torch.int32)
FORMATS = {True: MXFP4, False: MXFP8}


@triton.jit
def map_values(x, out, KIND: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + at)
    if KIND == "e2m1":
        result = encode_e2m1(value)
    if KIND == "e4m3":
        result = encode_e4m3(value)
    if KIND == "bf16":
        result = bf16_bits(value).to(tl.int32)
    if KIND == "scale_fp4":
        result = scale_byte(float_bits(value), True)
    if KIND == "scale_fp8":
        result = scale_byte(float_bits(value), False)
    if KIND == "decode":
        result = float_bits(decode_e4m3(value.to(tl.int32)))
    if KIND == "scale_value":
        result = float_bits(scale_value(value.to(tl.int32)))
    tl.store(out + at, result)


def mapped(x: Tensor, kind: str) -> Tensor:
    size = 4096
    padded = torch.cat((x, x.new_zeros(-len(x) % size)))
    out = torch.empty(len(padded), dtype=torch.int32)
    map_values[(len(padded) // size,)](padded, out, KIND=kind, SIZE=size)
    return out[: len(x)]


def every_exponent() -> Tensor:
    """FP32 of all signs and exponents, with mantissas on, just below and just above every tie of both elements."""
    ties = torch.arange(0, 1 << 23, 1 << 18)
    mantissas = torch.cat((ties, ties + 1, (ties - 1) % (1 << 23)))
    bits = (torch.arange(512).unsqueeze(1) << 23) + mantissas
    return ((bits.flatten() + 2**31) % 2**32 - 2**31).int().view(torch.float32)


def test_elements_round_to_nearest_even_and_saturate() -> None:
    x = every_exponent()
    x = x[x.isfinite()]
    assert torch.equal(mapped(x, "e2m1"), e2m1.encode(x).int())
    assert torch.equal(mapped(x, "e4m3"), e4m3.encode(x).view(torch.uint8).int())


def test_bf16_rounds_to_nearest_even() -> None:
    x = every_exponent()
    x = torch.cat((x, x.view(torch.int32).bitwise_xor(0x8000).view(torch.float32)))
    finite = x[~x.isnan()]
    assert torch.equal(mapped(finite, "bf16"), finite.bfloat16().view(torch.int16).int() & 0xFFFF)
    quiet = (x[x.isnan()].view(torch.int32) | 0x400000).view(torch.float32)
    assert (mapped(quiet, "bf16") & 0x7FFF == 0x7FC0).all()


@pytest.mark.parametrize("fp4", [True, False], ids=["fp4", "fp8"])
def test_scales_are_rounded_up(fp4: bool) -> None:
    amax = every_exponent().abs()
    blocks = torch.zeros(len(amax), 32)
    blocks[:, 0] = amax
    assert torch.equal(
        mapped(amax, "scale_fp4" if fp4 else "scale_fp8"), FORMATS[fp4].quantize(blocks).scales[:, 0].int()
    )


def test_decoding() -> None:
    codes = torch.arange(256)
    values = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    got = mapped(codes.float(), "decode").view(torch.float32)
    assert torch.equal(got.nan_to_num(nan=1e9), values.nan_to_num(nan=1e9))
    scales = torch.exp2(codes.double() - 127).float()
    assert torch.equal(mapped(codes.float(), "scale_value").view(torch.float32)[:255], scales[:255])
    assert mapped(codes.float(), "scale_value").view(torch.float32)[255].isnan()


def staged_rows(x: Tensor, fp4: bool, limit: Tensor = NO_LIMIT) -> tuple[Tensor, Tensor]:
    """Payload and scale bytes, in rows with some space after them that must stay as it was."""
    num_rows, hidden = x.shape
    payload = torch.full((num_rows, FORMATS[fp4].payload_bytes(hidden) + 16), 0xAB, dtype=torch.uint8)
    scales = torch.full((num_rows, hidden // 32 + 5), 0xAB, dtype=torch.uint8)
    quantize_input[(-(-num_rows // 8), -(-hidden // 256))](
        x,
        payload,
        scales,
        limit,
        num_rows,
        hidden,
        x.stride(0),
        payload.stride(0),
        scales.stride(0),
        FP4=fp4,
        ROWS=8,
        COLUMNS=256,
    )
    assert (payload[:, -16:] == 0xAB).all()
    assert (scales[:, -5:] == 0xAB).all()
    return payload[:, :-16], scales[:, :-5]


@pytest.mark.parametrize("fp4", [True, False], ids=["fp4", "fp8"])
def test_every_bf16_number_in_a_row(fp4: bool) -> None:
    """All 65536 patterns, each in a block with neighbours of its own size, so that all roundings occur."""
    x = torch.arange(1 << 16).int().to(torch.int16).view(torch.bfloat16).view(-1, 512)
    payload, scales = staged_rows(x, fp4)
    expected = FORMATS[fp4].quantize(x)
    assert torch.equal(payload, expected.payload.view(torch.uint8))
    assert torch.equal(scales, expected.scales)


@pytest.mark.parametrize("fp4", [True, False], ids=["fp4", "fp8"])
def test_zero_nan_and_inf_blocks(fp4: bool) -> None:
    x = torch.randn(5, 352, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[0] = 0
    x[1, 40], x[2, 350], x[3, 0] = float("nan"), float("inf"), float("-inf")
    payload, scales = staged_rows(x, fp4)
    expected = FORMATS[fp4].quantize(x)
    assert torch.equal(payload, expected.payload.view(torch.uint8))
    assert torch.equal(scales, expected.scales)
    assert (scales[1:4] == 255).sum() == 3
    assert payload[0].sum() == 0


def test_padding_rows_are_not_staged() -> None:
    x = torch.randn(9, 256).bfloat16()
    payload, _ = staged_rows(x, True, torch.tensor([4], dtype=torch.int32))
    assert (payload[4:] == 0xAB).all()
    assert not (payload[:4] == 0xAB).all(1).any()


def test_copied_rows_keep_their_bytes() -> None:
    source = torch.randint(0, 256, (11, 296), dtype=torch.uint8)
    target = torch.full((11, 304), 0xAB, dtype=torch.uint8)
    copy_input[(2, 2)](source, target, torch.tensor([10], dtype=torch.int32), 11, 296, 296, 304, ROWS=8, CHUNKS=32)
    assert torch.equal(target[:10, :296], source[:10])
    assert (target[10] == 0xAB).all()
    assert (target[:, 296:] == 0xAB).all()


@triton.jit
def transport_row(x, out, H: tl.constexpr):
    row = tl.load(x + tl.arange(0, H))
    payload, scales = quantize_blocks(tl.reshape(row, [1, H]), 1, H, False)
    tl.store(out.to(tl.pointer_type(tl.int32)) + tl.arange(0, H // 4), tl.reshape(payload, [H // 4]))
    tl.store(out + H + tl.arange(0, H // 32), tl.reshape(scales, [H // 32]))


def test_fp8_transport_rows_are_the_formats_bytes() -> None:
    x = torch.randn(512, generator=torch.Generator().manual_seed(2)) * torch.exp2(torch.arange(512) / 16 - 16)
    x[70] = float("nan")
    out = torch.empty(512 + 16, dtype=torch.uint8)
    transport_row[(1,)](x, out, H=512)
    assert torch.equal(out, FP8_BLOCKWISE_1X32.encode(x))

"""The same bits on the GPU as on the CPU: torch there divides, casts and compares in its own kernels."""

import math

import pytest
import torch

from megamoe.errors import FormatError
from megamoe.formats import (
    BF16,
    BF16_TRANSPORT,
    FP8_1X128,
    FP8_128X128,
    FP8_BLOCKWISE_1X32,
    MXFP4,
    MXFP8,
    BlockFormat,
    E8M0Rounding,
    TransportFormat,
    e2m1,
    e4m3,
    e8m0,
    mxfp4_to_fp8_1x128,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


def rows() -> torch.Tensor:
    """Some twelve binades of magnitudes, then rows of zeros, subnormals, FLT_MAX, NaN and Inf."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 512, generator=generator) * torch.exp2(4 * torch.randn(256, 512, generator=generator))
    x[0] = 0
    x[1] *= 2.0**-130
    x[2, 3] = torch.finfo(torch.float32).max
    x[3, 200] = math.nan
    x[4, 300] = -math.inf
    x[5] = torch.linspace(-6, 6, 512)
    return x


def all_fp32_steps() -> torch.Tensor:
    """Every 4099th FP32 bit pattern."""
    return torch.arange(-(2**31), 2**31, 4099).to(torch.int32).view(torch.float32)


def same_bits(on_gpu: torch.Tensor | None, on_cpu: torch.Tensor | None) -> bool:
    if on_gpu is None or on_cpu is None:
        return on_gpu is on_cpu
    assert on_gpu.is_cuda
    return torch.equal(on_gpu.cpu().contiguous().view(torch.uint8), on_cpu.contiguous().view(torch.uint8))


@pytest.mark.parametrize("fmt", [BF16, FP8_1X128, FP8_128X128, MXFP8, MXFP4], ids=lambda fmt: fmt.name)
def test_formats(fmt: BlockFormat) -> None:
    x = rows()
    if fmt is BF16:
        x = x.nan_to_num(nan=0.0)  # which NaN a BF16 NaN is, is nobody's contract
    on_cpu, on_gpu = fmt.quantize(x), fmt.quantize(x.cuda())
    assert same_bits(on_gpu.payload, on_cpu.payload)
    if fmt.scale_dtype is torch.float32:
        # Which NaN a NaN scale is, is nobody's contract either.
        assert on_gpu.scales is not None
        assert on_cpu.scales is not None
        assert same_bits(on_gpu.scales.nan_to_num(nan=-1.0), on_cpu.scales.nan_to_num(nan=-1.0))
    else:
        assert same_bits(on_gpu.scales, on_cpu.scales)
    assert same_bits(on_gpu.dequantize().nan_to_num(nan=-1.0), on_cpu.dequantize().nan_to_num(nan=-1.0))


@pytest.mark.parametrize("transport", [BF16_TRANSPORT, FP8_BLOCKWISE_1X32], ids=lambda transport: transport.name)
def test_transports(transport: TransportFormat) -> None:
    x = rows()[5:]
    wire = transport.encode(x)
    assert same_bits(transport.encode(x.cuda()), wire)
    assert same_bits(transport.decode(wire.cuda()), transport.decode(wire))


def test_elements_over_all_of_fp32() -> None:
    x = all_fp32_steps()
    assert same_bits(e4m3.encode(x.cuda()), e4m3.encode(x))
    assert same_bits(e2m1.encode(x.cuda()), e2m1.encode(x))


@pytest.mark.parametrize("rounding", E8M0Rounding)
def test_scales_over_all_of_fp32(rounding: E8M0Rounding) -> None:
    amax = all_fp32_steps().abs()
    for element in (e4m3.ELEMENT, e2m1.ELEMENT):
        on_cpu = e8m0.encode(amax, element=element, rounding=rounding)
        assert same_bits(e8m0.encode(amax.cuda(), element=element, rounding=rounding), on_cpu)


def test_fp8_scale_is_a_division_on_the_gpu_too() -> None:
    """torch divides by a host scalar through its reciprocal there, which misses the last bit of some amax."""
    x = torch.zeros(4096, 128)
    x[:, 0] = torch.arange(1, 4097)
    assert same_bits(FP8_1X128.quantize(x.cuda()).scales, FP8_1X128.quantize(x).scales)


def test_mxfp4_as_fp8() -> None:
    weights = MXFP4.quantize(torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(1)))
    on_cpu = mxfp4_to_fp8_1x128(weights)
    on_gpu = mxfp4_to_fp8_1x128(MXFP4.quantize(weights.dequantize().cuda()))
    assert same_bits(on_gpu.payload, on_cpu.payload)
    assert same_bits(on_gpu.scales, on_cpu.scales)


def test_scales_on_the_other_device_are_refused() -> None:
    quantized = MXFP8.quantize(torch.zeros(1, 32))
    with pytest.raises(FormatError, match="different devices"):
        MXFP8.dequantize(quantized.payload.cuda(), quantized.scales)

"""MX quantisation against torchao's, in each rounding rule that both have; runs where torchao is installed."""

import dataclasses

import pytest
import torch

from megamoe.formats import MXFP4, MXFP8, ActivationFormat, E8M0Rounding

mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")


@pytest.mark.parametrize(
    "rounding, torchao_name",
    [
        (E8M0Rounding.UP, "RCEIL"),
        (E8M0Rounding.FLOOR, "FLOOR"),
        (E8M0Rounding.CEIL, "CEIL"),
        (E8M0Rounding.EVEN, "EVEN"),
    ],
)
@pytest.mark.parametrize("fmt", [MXFP8, MXFP4], ids=lambda fmt: fmt.name)
def test_same_bytes(fmt: ActivationFormat, rounding: E8M0Rounding, torchao_name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 256, generator=generator) * torch.exp2(6 * torch.randn(512, 256, generator=generator))
    x[0] = 0
    for row, amax in enumerate((448.0, 6.0, 7.0, 496.0, 384.0, 56.0), start=1):  # where some rule switches
        x[row] = torch.linspace(-amax, amax, 256)
    dtype = torch.float8_e4m3fn if fmt is MXFP8 else torch.float4_e2m1fn_x2
    scales, payload = mx.to_mx(x, dtype, 32, mx.ScaleCalculationMode[torchao_name])
    ours = dataclasses.replace(fmt, rounding=rounding).quantize(x)
    assert ours.scales is not None
    assert torch.equal(ours.scales, scales.view(torch.uint8).view(ours.scales.shape))
    assert torch.equal(ours.payload.view(torch.uint8), payload.view(torch.uint8).view(ours.payload.shape))

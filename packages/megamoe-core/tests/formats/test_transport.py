"""Transport rows: their bytes by hand, and what comes out at the other end."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from megamoe.errors import FormatError
from megamoe.formats import BF16_TRANSPORT, FP8_BLOCKWISE_1X32, MXFP8, TransportFormat, transport_format

TRANSPORTS = [BF16_TRANSPORT, FP8_BLOCKWISE_1X32]


def by_name(transport: object) -> str:
    assert isinstance(transport, TransportFormat)
    return transport.name


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "transport, hidden_size, num_bytes",
    [(BF16_TRANSPORT, 2880, 5760), (FP8_BLOCKWISE_1X32, 2880, 2880 + 90), (FP8_BLOCKWISE_1X32, 7168, 7168 + 224)],
)
def test_row_bytes(transport: TransportFormat, hidden_size: int, num_bytes: int) -> None:
    assert transport.row_bytes(hidden_size) == num_bytes
    assert transport.encode(torch.zeros(3, hidden_size)).shape == (3, num_bytes)


def test_fp8_row_by_hand() -> None:
    row = torch.zeros(1, 64)
    row[0, 0] = 448.0  # scale 1
    row[0, 1] = -1.0
    row[0, 63] = 0.25  # scale 2^-10, code 256
    wire = FP8_BLOCKWISE_1X32.encode(row)
    assert wire.shape == (1, 66)
    assert wire.dtype == torch.uint8
    expected = [0] * 66
    expected[0], expected[1], expected[63] = 0x7E, 0xB8, 0x78
    expected[64], expected[65] = 127, 117
    assert wire[0].tolist() == expected
    assert torch.equal(FP8_BLOCKWISE_1X32.decode(wire), row)


def test_fp8_scale_bytes_are_unsigned() -> None:
    row = torch.full((1, 32), 2.0**70)  # scale 2^62, byte 189
    wire = FP8_BLOCKWISE_1X32.encode(row)
    assert wire[0, 32] == 189
    assert torch.equal(FP8_BLOCKWISE_1X32.decode(wire), row)


def test_fp8_is_mxfp8_on_the_wire() -> None:
    rows = gaussian(5, 256)
    quantized = MXFP8.quantize(rows)
    wire = FP8_BLOCKWISE_1X32.encode(rows)
    assert quantized.scales is not None
    assert torch.equal(wire[:, :256], quantized.payload.view(torch.uint8))
    assert torch.equal(wire[:, 256:], quantized.scales)
    assert torch.equal(FP8_BLOCKWISE_1X32.decode(wire), quantized.dequantize())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_fp8_nan_or_inf_becomes_nan_in_its_block(poison: float) -> None:
    rows = gaussian(3, 128)
    rows[1, 40] = poison
    wire = FP8_BLOCKWISE_1X32.encode(rows)
    assert wire[1, 128 + 1] == 255
    nan = FP8_BLOCKWISE_1X32.decode(wire).isnan()
    assert nan[1, 32:64].all()
    assert nan.sum() == 32


def test_bf16_row_is_rounded_to_nearest_even() -> None:
    rows = gaussian(4, 64)
    expected = rows.numpy().astype(ml_dtypes.bfloat16)
    wire = BF16_TRANSPORT.encode(rows)
    np.testing.assert_array_equal(wire.numpy(), expected.view(np.uint8).reshape(4, 128))
    np.testing.assert_array_equal(BF16_TRANSPORT.decode(wire).numpy(), expected.astype(np.float32))


def test_bf16_keeps_infinities_and_nan_where_they_are() -> None:
    row = torch.tensor([[1.0, math.inf, math.nan, -math.inf]])
    decoded = BF16_TRANSPORT.decode(BF16_TRANSPORT.encode(row))
    torch.testing.assert_close(decoded, row, equal_nan=True)


@pytest.mark.parametrize("transport", TRANSPORTS, ids=by_name)
def test_rows_inside_a_wider_buffer(transport: TransportFormat) -> None:
    """Rows in symmetric memory have a pitch: what is decoded is a strided view."""
    rows = gaussian(6, 96)
    wire = transport.encode(rows)
    buffer = torch.full((6, wire.shape[1] + 30), 0xAA, dtype=torch.uint8)
    buffer[:, : wire.shape[1]] = wire
    assert torch.equal(transport.decode(buffer[:, : wire.shape[1]]), transport.decode(wire))
    assert torch.equal(transport.encode(rows.T.contiguous().T), wire)


@pytest.mark.parametrize("transport", TRANSPORTS, ids=by_name)
@pytest.mark.parametrize("lead", [(0,), (2, 0), (2, 3), ()])
def test_leading_dimensions(transport: TransportFormat, lead: tuple[int, ...]) -> None:
    rows = gaussian(*lead, 64)
    wire = transport.encode(rows)
    assert wire.shape == (*lead, transport.row_bytes(64))
    decoded = transport.decode(wire)
    assert decoded.shape == rows.shape
    assert decoded.dtype == torch.float32


@pytest.mark.parametrize("transport", TRANSPORTS, ids=by_name)
def test_wrong_wire_is_refused(transport: TransportFormat) -> None:
    with pytest.raises(FormatError, match="are bytes"):
        transport.decode(torch.zeros(2, 66, dtype=torch.int8))
    with pytest.raises(FormatError, match="no row of"):
        transport.decode(torch.zeros(2, 65, dtype=torch.uint8))
    with pytest.raises(FormatError, match="no row of"):
        transport.decode(torch.tensor(1, dtype=torch.uint8))


def test_ragged_hidden_size_is_refused() -> None:
    with pytest.raises(FormatError, match="whole blocks"):
        FP8_BLOCKWISE_1X32.row_bytes(100)
    with pytest.raises(FormatError, match="whole blocks"):
        FP8_BLOCKWISE_1X32.encode(torch.zeros(1, 100))


def test_lookup() -> None:
    assert transport_format("bf16") is BF16_TRANSPORT
    assert transport_format("fp8_blockwise_1x32") is FP8_BLOCKWISE_1X32
    with pytest.raises(FormatError, match="unknown transport; got 'fp16'; expected bf16 or fp8_blockwise_1x32"):
        transport_format("fp16")

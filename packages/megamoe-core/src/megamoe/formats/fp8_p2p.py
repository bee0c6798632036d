"""Transport formats: how a finished row of GEMM2 travels to the token's home rank, as plain bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megamoe.errors import FormatError
from megamoe.formats.mxfp8 import MX_BLOCK, MXFP8


class TransportFormat(ABC):
    """A codec of rows: FP32 `[..., H]` to bytes `[..., row_bytes(H)]` and back. Frozen and hashable."""

    name: ClassVar[str]

    @abstractmethod
    def row_bytes(self, hidden_size: int) -> int:
        """Bytes of one row on the wire.

        Raises:
            FormatError: a hidden size that the format's block does not divide.
        """

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Bytes, uint8 `[..., row_bytes(H)]`, of `rows` `[..., H]` (FP32; the router weight already applied)."""

    @abstractmethod
    def decode(self, wire: Tensor) -> Tensor:
        """FP32 `[..., H]` of bytes, uint8 `[..., row_bytes(H)]`.

        Raises:
            FormatError: another dtype, or a number of bytes that no hidden size has.
        """


@dataclass(frozen=True, kw_only=True)
class Bf16Transport(TransportFormat):
    """BF16, rounded to nearest even, little-endian: 2H bytes."""

    name: ClassVar[str] = "bf16"

    def row_bytes(self, hidden_size: int) -> int:
        return 2 * hidden_size

    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(torch.bfloat16).contiguous().view(torch.uint8)

    def decode(self, wire: Tensor) -> Tensor:
        _check_wire(self, wire, granule=2)
        return wire.contiguous().view(torch.bfloat16).float()


@dataclass(frozen=True, kw_only=True)
class Fp8Blockwise1x32Transport(TransportFormat):
    """MXFP8 with scales rounded up: H payload bytes (e4m3fn), then H / 32 scale bytes (E8M0).

    A block that holds NaN or Inf has scale byte 255 and decodes to NaN.
    """

    name: ClassVar[str] = "fp8_blockwise_1x32"

    def row_bytes(self, hidden_size: int) -> int:
        return MXFP8.payload_bytes(hidden_size) + MXFP8.scale_bytes(hidden_size)

    def encode(self, rows: Tensor) -> Tensor:
        quantized = MXFP8.quantize(rows)
        assert quantized.scales is not None
        return torch.cat((quantized.payload.view(torch.uint8), quantized.scales), dim=-1)

    def decode(self, wire: Tensor) -> Tensor:
        _check_wire(self, wire, granule=MX_BLOCK + 1)
        hidden_size = wire.shape[-1] // (MX_BLOCK + 1) * MX_BLOCK
        payload, scales = wire[..., :hidden_size], wire[..., hidden_size:]
        return MXFP8.dequantize(payload.contiguous().view(torch.float8_e4m3fn), scales)


def _check_wire(transport: TransportFormat, wire: Tensor, *, granule: int) -> None:
    if wire.dtype != torch.uint8:
        raise FormatError(f"rows of {transport.name} are bytes", got=wire.dtype, expected=torch.uint8)
    if wire.ndim == 0 or wire.shape[-1] % granule:
        raise FormatError(
            f"no row of {transport.name} has this size",
            got=tuple(wire.shape),
            expected=f"[..., n] with n a multiple of {granule} bytes",
        )


BF16_TRANSPORT = Bf16Transport()
FP8_BLOCKWISE_1X32 = Fp8Blockwise1x32Transport()

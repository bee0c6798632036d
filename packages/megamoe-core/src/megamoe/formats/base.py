"""What every format has in common: a payload, scales of blocks of it, and their checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megamoe.errors import FormatError
from megamoe.formats import e8m0

_SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class BlockFormat(ABC):
    """A tensor `[..., N, K]` as payload and one scale per `block_rows` x `block` of its last two dimensions.

    Instances are stateless, frozen and hashable. All operations take CPU and GPU tensors, do not synchronise with the
    host, and give the same bits on both.
    """

    name: ClassVar[str]
    block: ClassVar[int]  # channels (along K) per scale
    block_rows: ClassVar[int] = 1  # rows (along N) per scale
    payload_dtype: ClassVar[torch.dtype]
    scale_dtype: ClassVar[torch.dtype | None]
    values_per_item: ClassVar[int] = 1  # values in one item of `payload_dtype`

    @property
    def granule(self) -> int:
        """What divides K: `block`, or less in a format whose last block of a row may be shorter."""
        return self.block

    def quantize(self, x: Tensor) -> Quantized:
        """Quantise `x`, `[..., K]` (`[..., N, K]` for two-dimensional blocks).

        Args:
            x: FP32, BF16 or FP16, any strides; the latter two are converted to FP32 first, exactly.

        Returns:
            payload and scales of their own; only BF16 input to the BF16 format is handed through, not copied.

        Raises:
            FormatError: another dtype, or a dimension that the granule (of rows, `block_rows`) does not divide.
        """
        if x.dtype not in _SOURCE_DTYPES:
            raise FormatError(f"{self.name} can't quantise this dtype", got=x.dtype, expected=_names(_SOURCE_DTYPES))
        self._check_blocks(tuple(x.shape))
        payload, scales = self._encode(x)
        return Quantized(payload=payload, scales=scales, fmt=self)

    def dequantize(self, payload: Tensor, scales: Tensor | None) -> Tensor:
        """FP32 values `[..., K]`: each payload value times its block's scale, one FP32 multiplication.

        Raises:
            FormatError: payload or scales that are not of this format.
        """
        return Quantized(payload=payload, scales=scales, fmt=self).dequantize()

    def value_shape(self, payload: Tensor) -> tuple[int, ...]:
        """Shape of the values that `payload` holds."""
        if payload.ndim == 0:
            return ()
        return (*payload.shape[:-1], payload.shape[-1] * self.values_per_item)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of values of `shape`."""
        rows = (shape[-2] // self.block_rows,) if len(shape) > 1 else ()
        return (*shape[:-2], *rows, -(-shape[-1] // self.block))

    def check(self, payload: Tensor, scales: Tensor | None) -> None:
        """Raise FormatError unless `payload` and `scales` are of this format and belong together."""
        if payload.dtype != self.payload_dtype:
            fnuz = payload.dtype == torch.float8_e4m3fnuz
            raise FormatError(
                f"the payload is not {self.name}",
                got=payload.dtype,
                expected=self.payload_dtype,
                hint="e4m3fnuz is gfx942's; its bytes mean other values, so convert, don't view" if fnuz else None,
            )
        shape = self.value_shape(payload)
        self._check_blocks(shape)
        self._check_scales(shape, payload.device, scales)

    def _check_blocks(self, shape: tuple[int, ...]) -> None:
        blocks = (self.granule,) if self.block_rows == 1 else (self.block_rows, self.granule)
        if len(shape) < len(blocks):
            raise FormatError(f"too few dimensions for {self.name}", got=shape, expected=f"{len(blocks)} or more")
        if any(size % block for size, block in zip(shape[-len(blocks) :], blocks)):
            raise FormatError(
                f"{self.name} needs whole blocks", got=shape, expected=f"multiples of {blocks} at the end of the shape"
            )

    def _check_scales(self, shape: tuple[int, ...], device: torch.device, scales: Tensor | None) -> None:
        if self.scale_dtype is None:
            if scales is not None:
                raise FormatError(f"{self.name} has no scales", got=scales.dtype, expected="None")
            return
        if scales is None:
            raise FormatError(f"{self.name} needs scales", got="None", expected=self.scale_dtype)
        if scales.dtype != self.scale_dtype:
            raise FormatError(f"the scales are not {self.name}'s", got=scales.dtype, expected=self.scale_dtype)
        expected = self.scale_shape(shape)
        if tuple(scales.shape) != expected:
            raise FormatError(
                f"the scales do not match the {self.name} payload",
                got=tuple(scales.shape),
                expected=f"{expected} for values of shape {shape}",
            )
        if scales.device != device:
            raise FormatError("payload and scales are on different devices", got=scales.device, expected=device)

    @abstractmethod
    def _encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Payload and scales of `x`, whose dtype and shape have been checked."""

    @abstractmethod
    def _decode(self, payload: Tensor, scales: Tensor | None) -> Tensor:
        """FP32 values of a payload and scales that have been checked."""


class ActivationFormat(BlockFormat):
    """A format whose blocks lie within one row, so that a row can be quantised, sent and read alone.

    Weights can be held in it as well.
    """

    def payload_bytes(self, num_channels: int) -> int:
        """Bytes of one row's payload.

        Raises:
            FormatError: the granule does not divide `num_channels`.
        """
        self._check_blocks((num_channels,))
        return num_channels // self.values_per_item * self.payload_dtype.itemsize

    def scale_bytes(self, num_channels: int) -> int:
        """Bytes of one row's scales; 0 if the format has none.

        Raises:
            FormatError: the granule does not divide `num_channels`.
        """
        self._check_blocks((num_channels,))
        return 0 if self.scale_dtype is None else -(-num_channels // self.block) * self.scale_dtype.itemsize


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantized:
    """Values in a format.

    Args:
        payload: `[..., K / fmt.values_per_item]`, `fmt.payload_dtype`.
        scales: `[..., N / fmt.block_rows, K / fmt.block]`, the last rounded up, `fmt.scale_dtype`, or None if the
            format has none. E8M0 scales may come as float8_e8m0fnu and are held as uint8.
        fmt: the format.

    Raises:
        FormatError: payload or scales that are not of the format, or do not belong together.
    """

    payload: Tensor
    scales: Tensor | None
    fmt: BlockFormat

    def __post_init__(self) -> None:
        if self.scales is not None and self.scales.dtype == torch.float8_e8m0fnu:
            object.__setattr__(self, "scales", e8m0.as_bytes(self.scales))
        self.fmt.check(self.payload, self.scales)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values, `[..., K]`."""
        return self.fmt.value_shape(self.payload)

    def dequantize(self) -> Tensor:
        """FP32 values, `self.shape`."""
        return self.fmt._decode(self.payload, self.scales)


def split_blocks(x: Tensor, block: int) -> Tensor:
    """View `[..., K]` as `[..., K / block, block]`, also when a dimension is empty."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)

"""Number formats: bit-exact encoding and decoding with named rounding, in torch, on CPU and GPU alike.

    mode    activations                            weights
    bf16    BF16                                   BF16
    a8w8    FP8_1X128                              FP8_128X128
    a8w4    MXFP8, or FP8_1X128 (SM90)             MXFP4, or mxfp4_to_fp8_1x128 of it (SM90)
    a4w4    MXFP4                                  MXFP4

A backend is right when it matches these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from megamoe.errors import FormatError
from megamoe.formats.base import ActivationFormat, BlockFormat, Quantized
from megamoe.formats.bf16 import BF16
from megamoe.formats.e8m0 import E8M0Rounding
from megamoe.formats.fp8_block import FP8_1X128, FP8_128X128
from megamoe.formats.fp8_p2p import BF16_TRANSPORT, FP8_BLOCKWISE_1X32, TransportFormat
from megamoe.formats.mxfp4 import MXFP4
from megamoe.formats.mxfp4_as_fp8 import mxfp4_to_fp8_1x128
from megamoe.formats.mxfp8 import MXFP8

__all__ = [
    "ActivationFormat",
    "BlockFormat",
    "Quantized",
    "TransportFormat",
    "E8M0Rounding",
    "BF16",
    "FP8_1X128",
    "FP8_128X128",
    "MXFP8",
    "MXFP4",
    "BF16_TRANSPORT",
    "FP8_BLOCKWISE_1X32",
    "activation_format",
    "weight_format",
    "transport_format",
    "mxfp4_to_fp8_1x128",
]

# The first is the mode's default.
_ACTIVATION_FORMATS: dict[str, tuple[ActivationFormat, ...]] = {
    "bf16": (BF16,),
    "a8w8": (FP8_1X128,),
    "a8w4": (MXFP8, FP8_1X128),
    "a4w4": (MXFP4,),
}
_WEIGHT_FORMATS: dict[str, BlockFormat] = {"bf16": BF16, "a8w8": FP8_128X128, "a8w4": MXFP4, "a4w4": MXFP4}
_TRANSPORT_FORMATS: dict[str, TransportFormat] = {fmt.name: fmt for fmt in (BF16_TRANSPORT, FP8_BLOCKWISE_1X32)}

_T = TypeVar("_T")


def activation_format(mode: str, act_format: str | None = None) -> ActivationFormat:
    """Activation format of a quant mode; `act_format` names one where the mode has several (a8w4).

    Raises:
        FormatError: an unknown mode, or a format that is not the mode's.
    """
    by_name = {fmt.name: fmt for fmt in _lookup("quant mode", _ACTIVATION_FORMATS, mode)}
    if act_format is None:
        return next(iter(by_name.values()))
    return _lookup(f"activation format of {mode}", by_name, act_format)


def weight_format(mode: str) -> BlockFormat:
    """Weight format of a quant mode, as checkpoints hold it.

    Raises:
        FormatError: an unknown mode.
    """
    return _lookup("quant mode", _WEIGHT_FORMATS, mode)


def transport_format(name: str) -> TransportFormat:
    """Transport format by name.

    Raises:
        FormatError: an unknown name.
    """
    return _lookup("transport", _TRANSPORT_FORMATS, name)


def _lookup(what: str, table: Mapping[str, _T], name: str) -> _T:
    if name not in table:
        raise FormatError(f"unknown {what}", got=repr(str(name)), expected=" or ".join(table))
    return table[name]

"""The bytes of a kernel's arguments, as CUDA and HIP take them: each at a multiple of its own size, in order."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

_FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}  # Triton's spelling -> struct's


class ArgumentLayout:
    """How the arguments of one kernel lie in memory.

    Args:
        parameters: name and Triton type (`*u8`, `i32`, `i64`, `fp32`) of each run-time parameter, in order.
        scratch_pointers: pointers after them that Triton adds for scratch memory, which these kernels do not use.
    """

    def __init__(self, parameters: Sequence[tuple[str, str]], *, scratch_pointers: int) -> None:
        self._names = tuple(name for name, _ in parameters)
        formats = [_format(kind) for _, kind in parameters] + ["Q"] * scratch_pointers
        self._struct = struct.Struct("@" + "".join(formats))
        self._nulls = (0,) * scratch_pointers

    @property
    def num_bytes(self) -> int:
        """Size of the block."""
        return self._struct.size

    def pack(self, arguments: Mapping[str, Any]) -> bytes:
        """The block of these arguments: tensors as addresses, an empty one as null."""
        values = (_value(arguments[name]) for name in self._names)
        return self._struct.pack(*values, *self._nulls)


def offsets(parameters: Sequence[tuple[str, str]]) -> tuple[int, ...]:
    """Where each parameter begins."""
    formats = [_format(kind) for _, kind in parameters]
    return tuple(
        struct.calcsize("@" + "".join(formats[: index + 1])) - struct.calcsize(own) for index, own in enumerate(formats)
    )


def _format(kind: str) -> str:
    return "Q" if kind.startswith("*") else _FORMATS[kind]


def _value(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value

"""Calls of the CUDA driver, checked."""

from __future__ import annotations

from typing import Any

from megamoe.errors import LaunchError


class CudaDriverError(LaunchError):
    """A call of the CUDA driver failed."""


def check(result: tuple[Any, ...]) -> Any:
    """The values of a cuda.bindings call, without its status: None, one value, or a tuple.

    Raises:
        CudaDriverError: the status is not success.
    """
    status, *values = result
    if int(status) != 0:
        raise CudaDriverError("a CUDA driver call failed", got=status)
    if len(values) <= 1:
        return values[0] if values else None
    return tuple(values)

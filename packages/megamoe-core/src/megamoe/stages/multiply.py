"""The product that both GEMMs share: FP32, on one thread, in zero-padded row tiles, so that a row's bits are its own.

    rows [m, K] FP32, weight [N, K] FP32  ->  [m, N] FP32

Floating-point addition is not associative, and a BLAS chooses its loop order by shape and thread count. So rows are
multiplied in tiles of a multiple of `ROW_TILE` rows, at most `MAX_ROWS`, on one thread. Where the BLAS still gives a
row different bits in tiles of different height, every tile is padded to `MAX_ROWS`; `heights_agree` finds that out once
per shape. MKL 2024.2 (torch 2.13, x86-64) agrees from 16 rows on, whatever the shape; for fewer rows it does not.

Quantised modes multiply dequantised operands: payload times scale, in FP32, exact where the scale is a power of two.
FP32 addition stands for what hardware does: a8w8 kernels multiply payloads, promote the sum to FP32 registers every 128
of K and apply the two block scales there; MX kernels scale every 32 of K. The order of additions and of scaling
differs, so bits do; the bounds of docs/numerics.md cover it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

ROW_TILE = 16
MAX_ROWS = 128  # 85 to 90% of the speed of large products; the last tile of an expert pads 8 rows on average


class _Fp32Products:
    """Keeps FP32 products FP32 while any thread is inside, whatever `set_float32_matmul_precision` says.

    That setting ("medium" lets oneDNN multiply in BF16) is the process's, so the last thread to leave restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._callers = "none"

    def __enter__(self) -> None:
        matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        with self._lock:
            if not self._num_inside:
                self._callers = matmul.fp32_precision
                matmul.fp32_precision = "ieee"
            self._num_inside += 1

    def __exit__(self, *exc: object) -> None:
        matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                matmul.fp32_precision = self._callers


_fp32_products = _Fp32Products()


@contextmanager
def fixed_arithmetic() -> Iterator[None]:
    """Compute in FP32 on one thread in this block, whatever the caller's settings.

    One thread means torch and its BLAS, and this Python thread only. Autocast, which a thread has for itself too, is
    off.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _fp32_products, torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_num_threads(num_threads)


def pad_rows(rows: Tensor, height: int = ROW_TILE) -> Tensor:
    """`rows` `[m, ...]` followed by zero rows, up to the next multiple of `height`."""
    missing = -rows.shape[0] % height
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows


def multiply(rows: Tensor, weight: Tensor) -> Tensor:
    """`rows` times `weight` transposed. Call it inside `fixed_arithmetic()`.

    Args:
        rows: `[m, K]` FP32, m a multiple of `ROW_TILE` (`pad_rows`), 0 included.
        weight: `[N, K]` FP32.
    """
    assert rows.shape[0] % ROW_TILE == 0, "pad_rows first"
    height = MAX_ROWS if not heights_agree(*weight.shape) else ROW_TILE
    num_rows = rows.shape[0]
    padded = pad_rows(rows, height)
    products = [padded[first : first + MAX_ROWS] @ weight.t() for first in range(0, max(num_rows, 1), MAX_ROWS)]
    return products[0][:num_rows] if len(products) == 1 else torch.cat(products)[:num_rows]


@lru_cache(maxsize=64)
def heights_agree(num_columns: int, depth: int) -> bool:
    """Whether this machine's BLAS gives a row the same bits in tiles of every height up to `MAX_ROWS`.

    Takes about as long as multiplying 512 rows; the answer is kept.
    """
    generator = torch.Generator().manual_seed(0)
    options: Any = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    weight = torch.randn(num_columns, depth, **options)
    rows = torch.randn(MAX_ROWS, depth, **options)
    with fixed_arithmetic():
        full = rows @ weight.t()
        for height in range(ROW_TILE, MAX_ROWS, ROW_TILE):
            if not torch.equal(rows[-height:] @ weight.t(), full[-height:]):
                return False
    return True

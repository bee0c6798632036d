"""Tensor maps: how TMA addresses a byte matrix."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

TENSOR_MAP_BYTES = 128
BOX_COLUMNS = 128  # bytes; the span of the 128-byte swizzle


@lru_cache(maxsize=4096)
def byte_matrix_map(address: int, *, num_rows: int, num_columns: int, box_rows: int) -> bytes:
    """The 128 bytes of a CUtensorMap for a row-major byte matrix, in boxes of `box_rows` x 128, swizzled by 128 B.

    Args:
        address: device address, a multiple of 16.
        num_rows, num_columns: the matrix; columns a multiple of 16. Boxes that reach past it read zeros.
        box_rows: 1 to 256.

    A map depends on its arguments alone, so it is encoded once.

    Raises:
        CudaDriverError: the driver refused the arguments.
    """
    from cuda.bindings import driver

    from megamoe_cuda.driver import check

    tensor_map: Any = check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            2,
            address,
            [driver.cuuint64_t(num_columns), driver.cuuint64_t(num_rows)],
            [driver.cuuint64_t(num_columns)],
            [driver.cuuint32_t(BOX_COLUMNS), driver.cuuint32_t(box_rows)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(int(tensor_map.getPtr()), TENSOR_MAP_BYTES)

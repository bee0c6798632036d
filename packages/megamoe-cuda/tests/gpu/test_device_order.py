"""The device numbers its units as schedule/persistent.py does: a debug kernel dumps the order, the host compares."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cuda.bindings import driver
from cuda.core import Program, ProgramOptions

from megamoe.problem import MoEProblem
from megamoe.schedule.persistent import block_order, unit_at
from megamoe.schedule.protocol import Phase
from megamoe_cuda.driver import check
from megamoe_cuda.heuristics import session_config
from megamoe_cuda.jit.codegen import INCLUDE_DIR, KERNEL_NAME, kernel_source
from megamoe_cuda.kernel_config import KernelConfig

pytestmark = pytest.mark.gpu

DUMP = """
#include "megamoe/schedule/units.cuh"
extern "C" __global__ void dump(unsigned int num_blocks, unsigned int* out) {
    for (unsigned int i = threadIdx.x; i < megamoe::num_units(num_blocks); i += blockDim.x) {
        const megamoe::Unit unit = megamoe::unit_at(i, num_blocks);
        out[3 * i] = unit.is_gemm2;
        out[3 * i + 1] = unit.block;
        out[3 * i + 2] = unit.n_tile;
    }
}
"""


def kernel_config(hidden_size: int, intermediate_size: int, lag_blocks: int, group_blocks: int) -> KernelConfig:
    problem = MoEProblem(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=8,
        top_k=4,
        num_max_tokens_per_rank=1024,
    )
    config = session_config(problem, "m128")
    rings = tuple(replace(ring, lag_blocks=lag_blocks, group_blocks=group_blocks) for ring in config.rings)
    return replace(config, rings=rings).kernel(problem, config.tiles[0], num_virtual_ranks=1, ctas_per_rank=132)


def dump_order(config: KernelConfig, num_blocks: int) -> list[tuple[bool, int, int]]:
    source = kernel_source(config).replace(f'#include "megamoe/{KERNEL_NAME}.cuh"', DUMP)
    options = ProgramOptions(arch="sm_90a", std="c++17", include_path=str(Path(INCLUDE_DIR)))
    code = bytes(Program(source, "c++", options).compile("cubin").code)
    function = check(driver.cuModuleGetFunction(check(driver.cuModuleLoadData(code)), b"dump"))
    num_units = num_blocks * (config.gemm1_n_tiles + config.gemm2_n_tiles)
    out = torch.full((num_units + 1, 3), -1, dtype=torch.int32, device="cuda")
    values = (ctypes.c_uint32(num_blocks), ctypes.c_void_p(out.data_ptr()))
    pointers = (ctypes.c_void_p * 2)(*[ctypes.addressof(value) for value in values])
    check(driver.cuLaunchKernel(function, 1, 1, 1, 128, 1, 1, 0, 0, ctypes.addressof(pointers), 0))
    torch.cuda.synchronize()
    assert out[-1].eq(-1).all()
    return [(bool(gemm2), block, n_tile) for gemm2, block, n_tile in out[:-1].tolist()]


@pytest.mark.parametrize(("lag_blocks", "group_blocks"), [(1, 1), (3, 1), (12, 1), (2, 2), (8, 4)])
@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(640, 384), (1024, 512)])
@pytest.mark.parametrize("num_blocks", [0, 1, 3, 12, 40])
def test_device_order_is_the_schedules(
    hidden_size: int, intermediate_size: int, lag_blocks: int, group_blocks: int, num_blocks: int
) -> None:
    torch.zeros(1, device="cuda")  # a context
    config = kernel_config(hidden_size, intermediate_size, lag_blocks, group_blocks)
    sizes = {
        "num_blocks": num_blocks,
        "num_gemm1_tiles": config.gemm1_n_tiles,
        "num_gemm2_tiles": config.gemm2_n_tiles,
        "lag_blocks": lag_blocks,
        "group_blocks": group_blocks,
    }
    expected = [(unit.phase is Phase.GEMM2, unit.block, unit.n_tile) for unit in block_order(**sizes)]
    assert dump_order(config, num_blocks) == expected
    assert unit_at(len(expected), **sizes) is None

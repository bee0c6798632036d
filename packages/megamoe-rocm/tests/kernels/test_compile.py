"""Every kernel compiles for gfx950 in every tile of the table, and holds what does not depend on the tile.

What a configuration is meant to reach (registers, occupancy, instruction counts) is stated with the tuning table.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from megamoe.problem import MoEProblem
from megamoe_rocm.aot import CodeObject, compile_kernel, find_fences, peer_stores
from megamoe_rocm.aot.inspection import is_scaled_mfma, main_loop
from megamoe_rocm.heuristics import TileConfig, buckets, config_of
from megamoe_rocm.kernels.launch import GFX950, CallTensors, Launch, RankCall, stage1_parameters
from megamoe_rocm.kernels.signature import options, parameters
from megamoe_rocm.kernels.workspace import RankMemory, kernel_workspace

pytestmark = pytest.mark.usefixtures("toolchain")

TILES = {bucket.tile.name: bucket.tile for bucket in buckets()}
MODES = [("a4w4", "bf16"), ("a8w4", "fp8_blockwise_1x32")]
LDS_BYTES = 160 * 1024
VGPRS_FOR_TWO_WORKGROUPS = 256  # of 512; both persistent stages are meant to share a compute unit with another program


def launches(tile: TileConfig, quant: str, transport: str) -> dict[str, Launch]:
    """One call's launches by kernel; sizes don't matter."""
    problem = MoEProblem(
        hidden_size=512,
        intermediate_size=256,
        num_experts=8,
        top_k=2,
        num_max_tokens_per_rank=8,
        ep_size=2,
        quant=quant,
        transport=transport,
    )
    config = config_of(problem, tile.name, (tile,))
    layout = kernel_workspace(problem, config.rings)
    memory = RankMemory(layout, torch.zeros(layout.num_bytes, dtype=torch.uint8))
    call = RankCall(
        problem=problem,
        rank=0,
        tile=tile,
        ring=config.rings[0],
        rings=config.rings,
        memory=memory,
        peers=torch.zeros(2, dtype=torch.int64),
        stage1_parameters=stage1_parameters(problem, 0, memory),
        num_programs=1,
        patience=1,
        target=GFX950,
    )
    byte = torch.zeros(1, dtype=torch.uint8)
    tensors = CallTensors(
        hidden_states=torch.zeros(4, 512, dtype=torch.bfloat16),
        hidden_scales=None,
        topk_ids=torch.zeros(4, 2, dtype=torch.int32),
        topk_weights=torch.zeros(4, 2),
        weights=dict.fromkeys(("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"), byte),
        out=torch.zeros(4, 512, dtype=torch.bfloat16),
        num_tokens=torch.zeros(1, dtype=torch.int32),
        report=torch.zeros(8, dtype=torch.int32),
    )
    return {launch.kernel.__name__: launch for phase in call.phases(tensors) for launch in phase}


@cache
def compiled(tile: str, quant: str, transport: str, kernel: str) -> CodeObject:
    launch = launches(TILES[tile], quant, transport)[kernel]
    return compile_kernel(
        launch.kernel, parameters=parameters(launch), constants=launch.constants, options=options(launch)
    )


@pytest.mark.parametrize("quant, transport", MODES)
@pytest.mark.parametrize("kernel", ["quantize_input", "count_picks", "push_entries", "plan_blocks", "combine_rows"])
def test_the_small_kernels_spill_nothing(kernel: str, quant: str, transport: str) -> None:
    used = compiled("m32", quant, transport, kernel).resources
    assert (used.vgpr_spills, used.sgpr_spills, used.scratch_bytes) == (0, 0, 0)
    assert used.lds_bytes <= LDS_BYTES


@pytest.mark.parametrize("quant, transport", MODES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("kernel", ["dispatch_gemm1", "gemm2_p2p"])
def test_persistent_stages(kernel: str, tile: str, quant: str, transport: str) -> None:
    """No vector spill, no scratch, room for a second program on the compute unit, and every multiplication once."""
    code = compiled(tile, quant, transport, kernel)
    used = code.resources
    assert (used.vgpr_spills, used.scratch_bytes) == (0, 0)
    assert used.num_vgprs <= VGPRS_FOR_TWO_WORKGROUPS
    assert used.lds_bytes <= LDS_BYTES
    config = TILES[tile]
    rows = config.block_m if kernel == "dispatch_gemm1" else config.gemm2_block_m
    columns = config.gemm1_block_n if kernel == "dispatch_gemm1" else config.gemm2_block_n
    per_step = rows * columns * 256 // (16 * 16 * 128) // config.num_warps
    loop = main_loop(code.instructions)
    assert sum(map(is_scaled_mfma, loop)) == per_step
    assert {item.mnemonic for item in loop if is_scaled_mfma(item)} == {"v_mfma_scale_f32_16x16x128_f8f6f4"}


def test_stage_2_sends_rows_through_to_system_scope_and_releases_them() -> None:
    code = compiled("m32", "a8w4", "fp8_blockwise_1x32", "gemm2_p2p")
    assert num_spills(code) == 0
    assert len(peer_stores(code.instructions)) > 0
    fences = find_fences(code.instructions)
    assert len(fences.releases) >= 2  # each wave's arrival, and rank_finished
    assert len(fences.acquires) >= 1  # the last program's


@pytest.mark.parametrize("kernel", ["plan_blocks", "dispatch_gemm1", "combine_rows"])
def test_what_waits_for_peers_acquires_at_system_scope(kernel: str) -> None:
    assert find_fences(compiled("m32", "a4w4", "bf16", kernel).instructions).acquires


def test_entries_and_counts_are_pushed_through_and_published_after_a_release() -> None:
    code = compiled("m32", "a4w4", "bf16", "push_entries")
    assert len(peer_stores(code.instructions)) >= 2
    assert len(find_fences(code.instructions).releases) >= 2


def num_spills(code: CodeObject) -> int:
    return code.resources.vgpr_spills + code.resources.sgpr_spills

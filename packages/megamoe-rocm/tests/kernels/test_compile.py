"""Rung 3: every kernel compiles for gfx950 in every tile of the table, and its code object is what was designed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from megamoe.problem import MoEProblem
from megamoe_rocm.aot import (
    CodeObject,
    Expectation,
    InspectionError,
    Instruction,
    check,
    compile_kernel,
    main_loop,
    peer_stores,
)
from megamoe_rocm.aot.inspection import is_cache_operation, is_scaled_mfma, waits_for_vector_memory
from megamoe_rocm.code_store import compile_launch
from megamoe_rocm.heuristics import SCALE_BLOCK_COLUMNS, TileConfig, buckets, config_of
from megamoe_rocm.kernels.launch import GFX950, CallTensors, Launch, MainLoop, RankCall, Target, stage1_parameters
from megamoe_rocm.kernels.signature import options, parameters
from megamoe_rocm.kernels.workspace import RankMemory, kernel_workspace
from megamoe_rocm.standard import standard_launches

pytestmark = pytest.mark.usefixtures("toolchain")

TILES = {bucket.tile.name: bucket.tile for bucket in buckets()}
MODES = [("a4w4", "bf16"), ("a8w4", "fp8_blockwise_1x32")]
STEPS = 4  # of a trip of the main loop
VGPRS_FOR_TWO_WORKGROUPS = 256  # of 512; both persistent stages are meant to share a compute unit with another program


def launches(tile: TileConfig, quant: str, transport: str, target: Target = GFX950) -> dict[str, Launch]:
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
        target=target,
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
    rows = torch.zeros(4, 256, dtype=torch.uint8)
    quantized = replace(tensors, hidden_states=rows, hidden_scales=rows[:, :16])
    phases = (*call.phases(tensors), *call.phases(quantized))
    return {launch.kernel.__name__: launch for phase in phases for launch in phase}


@cache
def compiled(tile: str, quant: str, transport: str, kernel: str) -> CodeObject:
    launch = launches(TILES[tile], quant, transport)[kernel]
    return compile_kernel(
        launch.kernel, parameters=parameters(launch), constants=launch.constants, options=options(launch)
    )


# Fences of the small kernels, as the protocol wants them.
SMALL_KERNELS = {
    "quantize_input": Expectation(peer_stores=0, releases=0, acquires=0),
    "copy_input": Expectation(peer_stores=0, releases=0, acquires=0),
    # Arrivals: each is a release and an acquire.
    "count_picks": Expectation(peer_stores=0, releases=0, acquires=0, agent_releases=1, agent_acquires=1),
    # Entries, then counts; arrivals before the counts, then the flags.
    "push_entries": Expectation(peer_stores=4, releases=2, acquires=1),
    # The flags of all ranks, before the loop and in it, and there those of ranks that have given up.
    "plan_blocks": Expectation(peer_stores=0, releases=0, acquires=2, polls=1),
    # The same, and the flag that says that this rank has given up; `status` is read twice.
    "combine_rows": Expectation(peer_stores=0, releases=1, acquires=2, polls=3, agent_releases=1, agent_acquires=1),
}


def stated(kernel: str, config: TileConfig, transport: str) -> Expectation:
    """What a kernel promises."""
    if kernel in SMALL_KERNELS:
        return replace(SMALL_KERNELS[kernel], scaled_mfmas=0)
    if kernel == "dispatch_gemm1":
        # At system scope counts_published is acquired. At agent scope a chunk's arrival is a release and an acquire,
        # and what a tile waits for is acquired before the loop of the wait and in it.
        tile = of_tile(config.gemm1_block_m, config.gemm1_block_n, config)
        return replace(tile, peer_stores=0, releases=0, acquires=1, agent_releases=1, agent_acquires=3)
    # Of a row's 4 neighbouring values that a lane has, bf16 is one store of 8 bytes, FP8 one of 4; and FP8 has two
    # scales for each 64 columns, of which a lane has 16. Arrivals and rank_finished are releases; `status` is read.
    values = config.gemm2_block_m * config.gemm2_block_n // (64 * config.num_warps)
    num_stores = values // 4 + (values // 16 if transport != "bf16" else 0)
    tile = of_tile(config.gemm2_block_m, config.gemm2_block_n, config)
    return replace(tile, peer_stores=num_stores, releases=2, acquires=1, polls=1)


@pytest.mark.parametrize("quant, transport", MODES)
@pytest.mark.parametrize("kernel", SMALL_KERNELS)
def test_the_small_kernels(kernel: str, quant: str, transport: str) -> None:
    """No spills and no scratch, and the fences that the protocol wants."""
    check(compiled("m32", quant, transport, kernel), stated(kernel, TILES["m32"], transport))


@pytest.mark.parametrize("quant, transport", MODES)
@pytest.mark.parametrize("tile", TILES)
def test_stage_1(tile: str, quant: str, transport: str) -> None:
    """No spills, two programs on a compute unit, every multiplication once, the loop as designed, and fences."""
    config = TILES[tile]
    code = compiled(tile, quant, transport, "dispatch_gemm1")
    check(code, stated("dispatch_gemm1", config, transport))
    require_main_loop(code, config.gemm1_block_m, config.gemm1_block_n, config, fp4=quant == "a4w4")


@pytest.mark.parametrize("quant, transport", MODES)
@pytest.mark.parametrize("tile", TILES)
def test_stage_2(tile: str, quant: str, transport: str) -> None:
    """As stage 1. Rows go past the caches to their home rank, and their stores do not wait for each other."""
    config = TILES[tile]
    code = compiled(tile, quant, transport, "gemm2_p2p")
    check(code, stated("gemm2_p2p", config, transport))
    require_main_loop(code, config.gemm2_block_m, config.gemm2_block_n, config, fp4=quant == "a4w4")
    stores = [at for at, item in enumerate(code.instructions) if item in peer_stores(code.instructions)]
    assert not any(item.mnemonic == "s_waitcnt" for item in code.instructions[stores[0] : stores[-1]])


def test_every_code_object_that_ships() -> None:
    """With each activation and transport, with biases and without: what a kernel promises does not depend on them."""
    for name, launch in standard_launches():
        transport = "fp8_blockwise_1x32" if launch.constants.get("FP8_TRANSPORT") else "bf16"
        tile = TILES[f"m{launch.constants.get('BLOCK_M', 32)}"]
        found = check(compile_launch(launch), stated(launch.kernel.__name__, tile, transport))
        assert found.workgroups_per_cu >= 2, name


@pytest.mark.parametrize("kernel", [*SMALL_KERNELS, "dispatch_gemm1", "gemm2_p2p"])
def test_a_dropped_scope_fence_or_wait_is_refused(kernel: str) -> None:
    """Of each access with a scope, each cache operation, and each wait that belongs to one, in turn."""
    quant, transport = MODES[1]
    code, promises = compiled("m32", quant, transport, kernel), stated(kernel, TILES["m32"], transport)
    items, broken = code.instructions, 0
    for at, item in enumerate(items):
        without = item
        if is_cache_operation(item) or (waits_for_vector_memory(item) and guards(items, at)):
            without = replace(item, mnemonic="s_nop", modifiers={}, text="s_nop 0")
        elif item.has("sc1"):  # of a store the scope; an atomic's `sc0` says that it returns something
            without = replace(item, modifiers={key: value for key, value in item.modifiers.items() if key != "sc1"})
        if without is not item:
            mutant = replace(code)
            mutant.__dict__["instructions"] = (*items[:at], without, *items[at + 1 :])
            with pytest.raises(InspectionError, match="stores|releases|acquires|polls"):
                check(mutant, promises)
            broken += 1
    assert broken > 0 or kernel in ("quantize_input", "copy_input")


def guards(items: Sequence[Instruction], at: int) -> bool:
    """Whether a wait is the one of a release or an acquire, next to the cache operation."""
    return items[at - 1].mnemonic == "buffer_wbl2" or items[at + 1].mnemonic == "buffer_inv"


@pytest.mark.parametrize("kernel", ["dispatch_gemm1", "gemm2_p2p"])
def test_registers_that_do_not_suffice_are_refused(kernel: str) -> None:
    """With half of them a tile's accumulators spill, and the check says so."""
    launch = launches(TILES["m64"], *MODES[1])[kernel]
    code = compile_kernel(
        launch.kernel,
        parameters=parameters(launch),
        constants=launch.constants,
        options=replace(options(launch), waves_per_eu=4),
    )
    with pytest.raises(InspectionError, match="vector register spills: [1-9]"):
        check(code, stated(kernel, TILES["m64"], MODES[1][1]))


def of_tile(rows: int, columns: int, config: TileConfig) -> Expectation:
    """Scaled MFMAs of a wave: a trip of the loop, the last trip by itself, and a step of the remainder."""
    step = rows * columns * SCALE_BLOCK_COLUMNS // (16 * 16 * 128) // config.num_warps
    return Expectation(
        scaled_mfmas=(2 * STEPS + 1) * step,
        loop_scaled_mfmas=STEPS * step,
        max_vgprs=VGPRS_FOR_TWO_WORKGROUPS,
        min_workgroups_per_cu=2,
    )


def require_main_loop(code: CodeObject, rows: int, columns: int, config: TileConfig, *, fp4: bool) -> None:
    """The loop of `main_loop_cdna4.py`: loads, LDS reads, MFMAs and scalar instructions, and next to nothing else.

    In a step a wave loads its share of the weights to registers, its share of the rows to LDS, and a dword of scales
    for each 32 rows and each 32 of its columns. It reads all rows from LDS; nothing is written there but by DMA.
    """
    loop = main_loop(code.instructions)
    count = Counter(map(family, loop))
    own_columns = columns // config.num_warps
    row_bytes = SCALE_BLOCK_COLUMNS // (2 if fp4 else 1)
    assert count["weights"] == STEPS * own_columns * SCALE_BLOCK_COLUMNS // 2 // (64 * 16)
    assert count["dma"] == STEPS * rows * row_bytes // (64 * 16) // config.num_warps
    assert count["scales"] == STEPS * (rows + own_columns) // 32
    assert count["lds reads"] == STEPS * rows * row_bytes // (64 * 16)
    assert count["other LDS"] == 0
    assert count["other vector"] <= STEPS  # an address in LDS
    assert {item.mnemonic for item in loop if is_scaled_mfma(item)} == {"v_mfma_scale_f32_16x16x128_f8f6f4"}
    assert code.resources.lds_bytes == STEPS * rows * row_bytes


def family(item: Instruction) -> str:
    """What an instruction of the main loop is for."""
    if item.mnemonic.startswith("buffer_load_dword"):
        if "lds" in item.modifiers:
            return "dma"
        return "scales" if item.mnemonic == "buffer_load_dword" else "weights"
    if item.mnemonic.startswith("ds_"):
        return "lds reads" if item.mnemonic == "ds_read_b128" else "other LDS"
    if item.mnemonic.startswith("v_"):
        return "mfma" if is_scaled_mfma(item) else "other vector"
    return "scalar"


def test_the_portable_loop_compiles_too() -> None:
    """It runs on other targets; here it is the same source with the other loop, and what it lacks shows."""
    launch = launches(TILES["m64"], "a4w4", "bf16", replace(GFX950, main_loop=MainLoop.PORTABLE))["gemm2_p2p"]
    code = compile_kernel(
        launch.kernel, parameters=parameters(launch), constants=launch.constants, options=options(launch)
    )
    assert code.build["constants"]["MAIN_LOOP"] == "portable"
    assert any("ds_write" in item.mnemonic for item in main_loop(code.instructions))

"""Which tiles a session has and which a call uses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megamoe.errors import ConfigError
from megamoe.problem import MoEProblem, QuantMode
from megamoe.schedule.simulate import Tiled
from megamoe_cuda.heuristics import LEAST_PULLED_ROWS, M256, TILES, config_names, session_config
from megamoe_cuda.kernel_config import NUM_DISPATCH_WARPS
from megamoe_cuda.smem_budget import MAX_DYNAMIC_BYTES, PACKED_STAGE_BYTES, shared_memory
from megamoe_cuda.workspace_layout import kernel_workspace

SEED = MoEProblem(
    hidden_size=4096, intermediate_size=2048, num_experts=256, top_k=8, num_max_tokens_per_rank=8192, ep_size=8
)


def test_a_small_capacity_does_not_pay_for_tiles_that_no_call_uses() -> None:
    small = session_config(replace(SEED, num_max_tokens_per_rank=128), None)
    large = session_config(SEED, None)
    assert len(small.tiles) < len(large.tiles)
    assert [tile.block_m for tile in large.tiles] == sorted(tile.block_m for tile in large.tiles)
    assert large.tiles == tuple(TILES.values())


def test_the_tile_grows_with_the_call() -> None:
    config = session_config(SEED, None)
    heights = [config.tile_for(SEED, num_tokens).block_m for num_tokens in (0, 1, 8, 128, 256, 512, 8192)]
    assert heights == sorted(heights)
    assert heights[0] == 32
    assert heights[-1] == 128
    names = [config.tile_for(SEED, num_tokens).name for num_tokens in (8, 128, 256, 512, 1024, 8192)]
    assert names == ["n32", "m64", "m128", "m128", "m128n64", "m128n64"]


def test_several_ranks_leave_small_tiles_earlier_for_skewed_routing() -> None:
    alone = replace(SEED, ep_size=1, num_experts=32)
    picks = (
        (8, "n32", "n32"),
        (64, "n32", "m128n64"),
        (112, "m64", "m64"),
        (192, "m64", "m128"),
        (8192, *["m128n64"] * 2),
    )
    for num_tokens, one_rank, several in picks:
        assert session_config(alone, None).tile_for(alone, num_tokens).name == one_rank
        assert session_config(SEED, None).tile_for(SEED, num_tokens).name == several


def test_a_tile_for_few_rows_and_many_is_compiled_once() -> None:
    few = session_config(replace(SEED, num_max_tokens_per_rank=64), None)
    assert [tile.name for tile in few.tiles] == ["n32", "m128n64"]
    assert [ring.block_m for ring in few.rings] == [32, 128]


@pytest.mark.parametrize(
    "change", [{"quant": "a8w4", "act_format": "fp8_1x128"}, {"hidden_size": 7168}, {"expert_bias": True}], ids=str
)
def test_ranks_use_tall_blocks_for_few_rows_where_that_was_measured(change: dict[str, Any]) -> None:
    problem = replace(SEED, **change)
    assert session_config(problem, None).tile_for(problem, 64).name == "m64"


@pytest.mark.parametrize("name", TILES)
def test_a_pinned_tile_is_used_for_every_call(name: str) -> None:
    config = session_config(SEED, name)
    assert {config.tile_for(SEED, num_tokens).name for num_tokens in (0, 64, 8192)} == {name}


MODES: tuple[dict[str, Any], ...] = ({"quant": "a8w8"}, {"quant": "bf16"}, {"quant": "a8w4", "act_format": "fp8_1x128"})


A8W4 = replace(SEED, **MODES[2])


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["quant"])
@pytest.mark.parametrize("ep_size, hidden_size", [(1, 8192), (2, 4096), (8, 4096), (8, 7168), (32, 4096)])
def test_every_kernel_of_a_session_fits_and_shares_one_workspace(
    ep_size: int, mode: dict[str, Any], hidden_size: int
) -> None:
    problem = replace(SEED, ep_size=ep_size, num_experts=32 * ep_size, hidden_size=hidden_size, **mode)
    for name in config_names(problem):
        config = session_config(problem, name)
        kernels = [config.kernel(problem, tile, num_virtual_ranks=1, ctas_per_rank=132) for tile in config.tiles]
        assert all(shared_memory(kernel).num_bytes <= MAX_DYNAMIC_BYTES for kernel in kernels)
        assert len({kernel_workspace(kernel) for kernel in kernels}) == 1


@pytest.mark.parametrize(
    "ep_size, num_local_experts, hidden_size, stages_of_m128",
    [
        (8, 32, 4096, 4),
        (8, 32, 7168, 4),
        (8, 48, 7168, 4),
        (8, 64, 8192, 4),
        (1, 384, 7168, 4),
        (32, 32, 7168, 4),
        (32, 64, 8192, 3),
        (8, 384, 8192, 3),
    ],
)
def test_many_experts_cost_a_stage_before_they_are_refused(
    ep_size: int, num_local_experts: int, hidden_size: int, stages_of_m128: int
) -> None:
    problem = replace(SEED, ep_size=ep_size, num_experts=num_local_experts * ep_size, hidden_size=hidden_size)
    config = session_config(problem, "m128")
    assert config.tiles[0].num_stages == stages_of_m128
    memory = shared_memory(config.kernel(problem, config.tiles[0], num_virtual_ranks=1, ctas_per_rank=132))
    assert memory.num_bytes <= MAX_DYNAMIC_BYTES
    assert NUM_DISPATCH_WARPS * memory.pull_slots >= LEAST_PULLED_ROWS[QuantMode.A8W8]


@pytest.mark.parametrize("num_tokens", [1, 64, 8192])
def test_blocks_of_experts_that_overflow_the_cache_share_weights_in_groups(num_tokens: int) -> None:
    large = replace(SEED, hidden_size=7168, num_max_tokens_per_rank=num_tokens)
    for problem, group_blocks in ((SEED, 1), (large, 4), (replace(large, quant="bf16"), 1)):
        config = session_config(problem, "m128n64" if problem.quant is QuantMode.A8W8 else "m128")
        (ring,) = config.rings
        assert ring.group_blocks == group_blocks
        assert ring.lag_blocks % group_blocks == 0
        assert ring.ring_blocks <= max(ring.max_blocks, 1)
    assert {ring.group_blocks for ring in session_config(large, "m128").rings} == {1}


@pytest.mark.parametrize("change", [{"quant": "bf16"}, {"expert_bias": True}], ids=str)
def test_swapped_operands_are_offered_where_they_were_measured(change: dict[str, Any]) -> None:
    problem = replace(SEED, **change)
    assert not any(tile.swapped_rows for tile in session_config(problem, None).tiles)
    for name in ("n32", "m128n64"):
        assert name in config_names(SEED)
        with pytest.raises(ConfigError, match="no such configuration"):
            session_config(problem, name)


def test_a_kernel_is_refused_a_tile_of_another_mode() -> None:
    swapped = session_config(SEED, "n32")
    for quant, message in (
        ("bf16", "operands are swapped in modes a8w8 and a8w4"),
        ("a8w4", "weights are packed"),
    ):
        problem = replace(SEED, quant=quant, act_format="fp8_1x128" if quant == "a8w4" else None)
        with pytest.raises(ConfigError, match=message):
            swapped.kernel(problem, swapped.tiles[0], num_virtual_ranks=1, ctas_per_rank=132)
    converting = session_config(A8W4, "n32")
    with pytest.raises(ConfigError, match="weights are packed in mode a8w4"):
        converting.kernel(SEED, converting.tiles[0], num_virtual_ranks=1, ctas_per_rank=132)


@pytest.mark.parametrize("bias", [False, True])
def test_packed_weights_have_warps_for_their_conversion(bias: bool) -> None:
    problem = replace(A8W4, expert_bias=bias)
    config = session_config(problem, None)
    assert [tile.name for tile in config.tiles] == ["n32", "m64", "m128n64", "ahead"]
    for tile in config.tiles:
        assert tile.num_threads == 128 + 32 * (tile.math_warps + tile.converter_warps) > 384
        assert bool(tile.converter_warps) != tile.registers_hold_weights
        assert tile.registers_at_entry * tile.num_threads <= 65536
        assert tile.packed_stages % max(tile.converter_groups, 1) == 0


@pytest.mark.parametrize(
    "ep_size, num_local_experts, hidden_size, packed_stages_of_m128n64",
    [(8, 32, 4096, 3), (1, 32, 8192, 3), (8, 32, 7168, 3), (32, 64, 8192, 3), (8, 384, 8192, 2)],
)
def test_room_for_rows_is_taken_from_packed_stages_first(
    ep_size: int, num_local_experts: int, hidden_size: int, packed_stages_of_m128n64: int
) -> None:
    problem = replace(A8W4, ep_size=ep_size, num_experts=num_local_experts * ep_size, hidden_size=hidden_size)
    config = session_config(problem, "m128n64")
    (tile,) = config.tiles
    assert (tile.num_stages, tile.packed_stages) == (4, packed_stages_of_m128n64)
    memory = shared_memory(config.kernel(problem, tile, num_virtual_ranks=1, ctas_per_rank=132))
    assert memory.num_weight_buffers == tile.operand_buffers == 2
    assert memory.packed == memory.weights + 2 * memory.weight_stage_bytes
    assert memory.scales == memory.packed + tile.packed_stages * PACKED_STAGE_BYTES
    assert memory.num_bytes <= MAX_DYNAMIC_BYTES


def test_clusters_are_offered_where_their_ctas_share_out_all_columns() -> None:
    bf16 = replace(SEED, quant="bf16")
    assert M256.name in config_names(bf16)
    assert M256.name not in config_names(SEED)
    small, large = (session_config(bf16, None).tile_for(bf16, num_tokens).name for num_tokens in (256, 512))
    assert (small, large) == ("m128", M256.name)  # 64 and 128 rows an expert
    for change in ({"intermediate_size": 1408}, {"hidden_size": 2816}):  # 11 tiles of 256 columns
        odd = replace(bf16, **change)
        assert M256.name not in config_names(odd)
        config = session_config(bf16, M256.name)
        with pytest.raises(ConfigError, match="do not share out these column tiles"):
            config.kernel(odd, config.tiles[0], num_virtual_ranks=1, ctas_per_rank=132)


@pytest.mark.parametrize("num_ctas, used", [(132, 132), (33, 32), (2, 2)])
def test_clusters_leave_an_odd_cta_out(num_ctas: int, used: int) -> None:
    problem = replace(SEED, quant="bf16")
    config = session_config(problem, M256.name)
    kernel = config.kernel(problem, config.tiles[0], num_virtual_ranks=1, ctas_per_rank=num_ctas)
    assert kernel.ctas_per_rank == used
    with pytest.raises(ConfigError, match="do not share out these CTAs"):
        replace(kernel, ctas_per_rank=33)
    with pytest.raises(ConfigError, match="do not share out these CTAs; got 0"):  # a share of one SM
        config.kernel(problem, config.tiles[0], num_virtual_ranks=1, ctas_per_rank=1)


def test_clusters_are_for_plans_that_have_the_gpu_to_themselves() -> None:
    bf16 = replace(SEED, quant="bf16")
    whole, share = session_config(bf16, None), session_config(bf16, None, num_sms=131)
    assert [tile.name for tile in whole.tiles] == ["m64", "m128", M256.name]
    assert (share.tiles, share.rings) == (whole.tiles[:-1], whole.rings[:-1])
    assert share.tile_for(bf16, 8192).name == "m128"
    assert session_config(bf16, M256.name, num_sms=131) == session_config(bf16, M256.name)
    assert session_config(SEED, None, num_sms=66) == session_config(SEED, None)


def test_a_lag_is_whole_groups() -> None:
    ring = session_config(SEED, "m128").rings[0]
    with pytest.raises(ConfigError, match="no whole groups"):
        replace(ring, group_blocks=5)
    with pytest.raises(ConfigError, match="smaller than the live set"):
        replace(ring, group_blocks=4, ring_blocks=ring.lag_blocks + 3)


@pytest.mark.parametrize(
    "change",
    [
        {"block_m": 32},  # without swapped operands
        {"swapped_rows": 24},
        {"swapped_rows": 64, "block_m": 32},
        {"box_rows": 48},
        {"box_rows": 4},
        {"math_registers": 232},
        {"converter_warps": 4, "converter_registers": 56, "packed_stages": 2, "operand_buffers": 3},
        {"converter_warps": 8, "converter_registers": 24, "packed_stages": 3, "operand_buffers": 2},
        {"converter_warps": 2, "converter_registers": 24, "packed_stages": 2, "operand_buffers": 2},
        {"registers_hold_weights": True},  # of operands that are not swapped
        {"block_m": 256},  # without a cluster
        {"cluster_size": 4, "block_m": 256},
    ],
    ids=str,
)
def test_a_tile_that_the_kernel_does_not_have_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(TILES["m128"], **change)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["quant"])
def test_a_session_s_cut_is_simulated_as_its_kernels_are_compiled(mode: dict[str, Any]) -> None:
    problem = replace(SEED, **mode)
    config = session_config(problem, None)
    for num_tokens in (8, 8192):
        tile = config.tile_for(problem, num_tokens)
        kernel = config.kernel(problem, tile, num_virtual_ranks=1, ctas_per_rank=132)
        cut = config.tiling(problem, num_tokens, 132)
        assert (cut.block_m, cut.num_stages, cut.num_ctas) == (tile.block_m, tile.weight_stages, kernel.ctas_per_rank)
        assert cut.box_rows == tile.box_rows
        assert (cut.lag_blocks, cut.ring_blocks) == (kernel.ring.lag_blocks, kernel.ring.ring_blocks)
        assert kernel.gemm1_k_blocks * cut.block_k == SEED.hidden_size
        assert kernel.gemm1_n_tiles * cut.block_n == 2 * SEED.intermediate_size
    assert isinstance(config, Tiled)

"""The ring's geometry and the workspace's bytes."""

import pytest

from megamoe.errors import ConfigError, WorkspaceError
from megamoe.schedule.device_spec import DEVICES, H200
from megamoe.schedule.protocol import REGIONS, ROUTE_TOTALS, Join
from megamoe.schedule.waves import Ring, default_lag, default_ring
from megamoe.schedule.workspace import (
    ACTIVATION_ROWS,
    ARRAY_ALIGNMENT,
    ROW_ALIGNMENT,
    Section,
    WorkspaceLayout,
    combine_row_bytes,
    plan_workspace,
)

MIB = 1 << 20
TRANSPORTS = ["bf16", "fp8_blockwise_1x32"]


def seed_layout(tokens: int, transport: str = "bf16", block_m: int = 128, mode: str = "a8w8") -> WorkspaceLayout:
    """H=4096, I=2048, 32 local experts, top-8, EP8."""
    ring = default_ring(ep_size=8, num_max_tokens_per_rank=tokens, top_k=8, num_local_experts=32, block_m=block_m)
    return plan_workspace(
        hidden_size=4096,
        intermediate_size=2048,
        num_local_experts=32,
        ep_size=8,
        num_max_tokens_per_rank=tokens,
        top_k=8,
        activation=ACTIVATION_ROWS[mode],
        transport=transport,
        rings=(ring,),
    )


@pytest.mark.parametrize(
    "tokens, transport, limit_mib",
    [
        (8192, "bf16", 1100),
        (8192, "fp8_blockwise_1x32", 800),
        (128, "bf16", 64),
        (128, "fp8_blockwise_1x32", 64),
    ],
)
@pytest.mark.parametrize("block_m", [64, 128])
def test_dropless_workspace_stays_small(tokens: int, transport: str, limit_mib: int, block_m: int) -> None:
    """The worst case of routing costs counters only: the ring turns more often. The seed's layout took 3.95 GiB."""
    assert seed_layout(tokens, transport, block_m).num_bytes <= limit_mib * MIB


@pytest.mark.parametrize("mode", ACTIVATION_ROWS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_arrays_are_aligned_and_disjoint(mode: str, transport: str) -> None:
    layout = seed_layout(100, transport, mode=mode)
    end = 0
    for array in layout.arrays:
        assert array.offset % ARRAY_ALIGNMENT == 0
        assert array.offset >= end
        end = array.offset + array.num_bytes
    assert layout.num_bytes >= end
    assert layout.num_bytes == layout.symmetric_bytes + layout.local_bytes
    sections = [array.section for array in layout.arrays]
    assert sections == sorted(sections, reverse=True), "the symmetric section comes first"
    assert layout.arrays[sections.index(Section.LOCAL)].offset == layout.symmetric_bytes
    tiles = [array for array in layout.arrays if array.name.endswith(("payload", "scales")) or array.name == "combine"]
    assert all(array.row_bytes % ROW_ALIGNMENT == 0 for array in tiles)


def test_every_region_has_an_array() -> None:
    held = {array.region for array in seed_layout(64).arrays}
    assert held == {*REGIONS, None} - {ROUTE_TOTALS}  # a backend's own, if it has them at all


def test_formats_without_scales_have_no_array_for_them() -> None:
    layout = seed_layout(64, mode="bf16")
    assert "input_scales" not in layout
    assert layout["input_payload"].row_bytes == 2 * 4096
    with pytest.raises(WorkspaceError, match="input_scales"):
        layout.offset("input_scales")


@pytest.mark.parametrize(
    "mode, payload, scales",
    [
        ("bf16", 5760, 0),
        ("a8w8", 2880, 96),
        ("a8w4", 2880, 96),
        ("a4w4", 1440, 96),
    ],
)
def test_row_strides_of_a_width_that_no_block_divides(mode: str, payload: int, scales: int) -> None:
    """H = 2880 (gpt-oss): 22.5 blocks of 128 are 23 scales of 4 bytes, rounded up to 16; 90 of 32 are 90 bytes."""
    assert ACTIVATION_ROWS[mode].payload_bytes(2880) == payload
    assert ACTIVATION_ROWS[mode].scales_bytes(2880) == scales


def test_combine_rows() -> None:
    assert combine_row_bytes("bf16", 4096) == 8192
    assert combine_row_bytes("fp8_blockwise_1x32", 4096) == 4096 + 128
    assert combine_row_bytes("fp8_blockwise_1x32", 2880) == 2976
    with pytest.raises(ConfigError, match="transport"):
        combine_row_bytes("fp16", 4096)


def test_breakdown_adds_up() -> None:
    layout = seed_layout(128)
    rows = layout.breakdown()
    assert [row[0] for row in rows] == [array.name for array in layout.arrays]
    assert sum(row[3] for row in rows) == layout.num_bytes
    assert ("combine", "symmetric", "8 x 128 x 8192 B", 8 * MIB) in rows


def test_layout_is_a_key() -> None:
    assert hash(seed_layout(64)) == hash(seed_layout(64))
    assert seed_layout(64) == seed_layout(64)
    assert seed_layout(64) != seed_layout(65)


def test_a_backends_own_array_comes_last_and_moves_nothing() -> None:
    layout = seed_layout(60)
    more = layout.with_local("bytes", (3, 5), 7).with_local("words", (2,), 4)
    assert more.arrays[:-2] == layout.arrays
    assert more.symmetric_bytes == layout.symmetric_bytes
    for name, after, num_bytes in (("bytes", layout.num_bytes, 105), ("words", more.offset("bytes") + 105, 8)):
        array = more[name]
        assert (array.section, array.num_bytes) == (Section.LOCAL, num_bytes)
        assert array.offset % ARRAY_ALIGNMENT == 0
        assert 0 <= array.offset - after < ARRAY_ALIGNMENT
    assert more.num_bytes >= more.offset("words") + 8


def test_rings_of_several_tile_heights_share_the_memory() -> None:
    tall, flat = (
        default_ring(ep_size=2, num_max_tokens_per_rank=256, top_k=2, num_local_experts=4, block_m=m) for m in (128, 16)
    )
    layout = plan_workspace(
        hidden_size=256,
        intermediate_size=128,
        num_local_experts=4,
        ep_size=2,
        num_max_tokens_per_rank=256,
        top_k=2,
        activation=ACTIVATION_ROWS["bf16"],
        transport="bf16",
        rings=(tall, flat),
        num_ctas=3,
    )
    assert layout["pool_payload"].num_rows == max(tall.num_rows, flat.num_rows)
    assert layout["counters"].dims == (2, 3 * flat.max_blocks + len(Join) + 3)
    with pytest.raises(ConfigError, match="ring"):
        plan_workspace(
            hidden_size=256,
            intermediate_size=128,
            num_local_experts=4,
            ep_size=2,
            num_max_tokens_per_rank=256,
            top_k=2,
            activation=ACTIVATION_ROWS["bf16"],
            transport="bf16",
            rings=(),
        )


def test_a_workspace_that_was_handed_in_must_be_large_enough() -> None:
    layout = seed_layout(64)
    layout.check_size(layout.num_bytes)
    with pytest.raises(WorkspaceError, match="too small"):
        layout.check_size(layout.num_bytes - 1)


def test_default_lag() -> None:
    assert [default_lag(blocks) for blocks in (1, 17, 20, 100, 142, 143, 5000)] == [8, 8, 9, 45, 63, 64, 64]


def test_ring_smaller_than_the_live_set_is_refused() -> None:
    Ring(block_m=64, lag_blocks=8, ring_blocks=9, max_blocks=100)
    Ring(block_m=64, lag_blocks=8, ring_blocks=4, max_blocks=4)
    with pytest.raises(ConfigError, match="live set"):
        Ring(block_m=64, lag_blocks=8, ring_blocks=8, max_blocks=100)
    with pytest.raises(ConfigError, match="live set"):
        Ring(block_m=64, lag_blocks=8, ring_blocks=3, max_blocks=4)


def test_device_specs_are_keys_with_unique_names() -> None:
    assert len({hash(spec) for spec in DEVICES.values()}) == len(DEVICES)
    assert DEVICES["NVIDIA H200"] is H200

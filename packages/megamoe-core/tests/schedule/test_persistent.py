"""The order of units, and what it promises to the ring."""

import pytest

from megamoe.schedule.persistent import block_order, unit_at
from megamoe.schedule.protocol import Phase
from megamoe.schedule.waves import live_blocks

ORDERS = [
    pytest.param(blocks, n1, n2, lag, id=f"{blocks}blocks-{n1}x{n2}tiles-lag{lag}")
    for blocks in (0, 1, 2, 5, 9)
    for n1, n2 in ((1, 1), (3, 2), (2, 5))
    for lag in (0, 1, 4, 20)
]


@pytest.mark.parametrize("blocks, n1, n2, lag", ORDERS)
def test_closed_form_is_the_order(blocks: int, n1: int, n2: int, lag: int) -> None:
    sizes = {"num_blocks": blocks, "num_gemm1_tiles": n1, "num_gemm2_tiles": n2, "lag_blocks": lag}
    units = list(block_order(**sizes))
    assert [unit_at(index, **sizes) for index in range(len(units))] == units
    assert unit_at(len(units), **sizes) is None


@pytest.mark.parametrize("blocks, n1, n2, lag", ORDERS)
def test_every_unit_once_and_after_what_it_needs(blocks: int, n1: int, n2: int, lag: int) -> None:
    units = list(block_order(num_blocks=blocks, num_gemm1_tiles=n1, num_gemm2_tiles=n2, lag_blocks=lag))
    place = {(unit.phase, unit.block, unit.n_tile): index for index, unit in enumerate(units)}
    wanted = {(Phase.GEMM1, b, n) for b in range(blocks) for n in range(n1)}
    wanted |= {(Phase.GEMM2, b, n) for b in range(blocks) for n in range(n2)}
    assert place.keys() == wanted
    assert len(units) == len(wanted)
    for block in range(blocks):
        last_gemm1 = max(place[Phase.GEMM1, block, n] for n in range(n1))
        assert last_gemm1 < min(place[Phase.GEMM2, block, n] for n in range(n2))


@pytest.mark.parametrize("blocks, n1, n2, lag", ORDERS)
def test_live_blocks_is_what_the_order_keeps(blocks: int, n1: int, n2: int, lag: int) -> None:
    """Run the units one by one: a block is live from its first GEMM1 tile to its last GEMM2 tile."""
    left = dict.fromkeys(range(blocks), n1 + n2)
    live: set[int] = set()
    most = 0
    for unit in block_order(num_blocks=blocks, num_gemm1_tiles=n1, num_gemm2_tiles=n2, lag_blocks=lag):
        live.add(unit.block)
        most = max(most, len(live))
        left[unit.block] -= 1
        if not left[unit.block]:
            live.remove(unit.block)
    assert most == live_blocks(lag, blocks)

"""The order of units, and what it promises to the ring."""

from typing import NamedTuple

import pytest

from megamoe.schedule.persistent import block_order, unit_at
from megamoe.schedule.protocol import Phase
from megamoe.schedule.waves import live_blocks


class Order(NamedTuple):
    """Arguments of `block_order`."""

    num_blocks: int
    num_gemm1_tiles: int
    num_gemm2_tiles: int
    lag_blocks: int
    group_blocks: int


ORDERS = [
    pytest.param(Order(blocks, n1, n2, lag * group, group), id=f"{blocks}blocks-{n1}x{n2}tiles-lag{lag}x{group}")
    for blocks in (0, 1, 2, 5, 9)
    for n1, n2 in ((1, 1), (3, 2), (2, 5))
    for lag, group in ((0, 1), (1, 1), (4, 1), (20, 1), (0, 2), (1, 2), (1, 4), (2, 4), (9, 4))
]


@pytest.mark.parametrize("order", ORDERS)
def test_closed_form_is_the_order(order: Order) -> None:
    sizes = order._asdict()
    units = list(block_order(**sizes))
    assert [unit_at(index, **sizes) for index in range(len(units))] == units
    assert unit_at(len(units), **sizes) is None


@pytest.mark.parametrize("order", ORDERS)
def test_every_unit_once_and_after_what_it_needs(order: Order) -> None:
    blocks, n1, n2, _, _ = order
    units = list(block_order(**order._asdict()))
    place = {(unit.phase, unit.block, unit.n_tile): index for index, unit in enumerate(units)}
    wanted = {(Phase.GEMM1, b, n) for b in range(blocks) for n in range(n1)}
    wanted |= {(Phase.GEMM2, b, n) for b in range(blocks) for n in range(n2)}
    assert place.keys() == wanted
    assert len(units) == len(wanted)
    for block in range(blocks):
        last_gemm1 = max(place[Phase.GEMM1, block, n] for n in range(n1))
        assert last_gemm1 < min(place[Phase.GEMM2, block, n] for n in range(n2))


@pytest.mark.parametrize("order", ORDERS)
def test_live_blocks_is_what_the_order_keeps(order: Order) -> None:
    """Run the units one by one: a block is live from its first GEMM1 tile to its last GEMM2 tile."""
    left = dict.fromkeys(range(order.num_blocks), order.num_gemm1_tiles + order.num_gemm2_tiles)
    live: set[int] = set()
    most = 0
    for unit in block_order(**order._asdict()):
        live.add(unit.block)
        most = max(most, len(live))
        left[unit.block] -= 1
        if not left[unit.block]:
            live.remove(unit.block)
    assert most == live_blocks(order.lag_blocks, order.num_blocks, order.group_blocks)

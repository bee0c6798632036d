"""Mode a8w4: loaders, converters, math warps, publisher in any order of events: no wait passes early, none is for ever.

A model of pipeline/ring.cuh, pipeline/tile_queue.cuh, roles/convert.cuh and roles/publish.cuh: mbarriers that know a
phase by its parity, and copies that land late and out of order.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from megamoe.errors import ConfigError
from megamoe_cuda.heuristics import TILES_A8W4, session_config, with_one_group
from megamoe_cuda.kernel_config import TileConfig

sys.path.insert(0, str(Path(__file__).parent))
from any_order import A8W4, Crew, Wait

NUM_TILES = 20
QUEUE_SLOTS = 4
MATH_WARPGROUPS = 2
IN_PIPELINE = [tile for tile in TILES_A8W4.values() if tile.packed_stages]


@dataclass(kw_only=True)
class Barrier:
    arrivals: int  # of a phase
    pending: int = 0
    phase: int = 0

    def arrive(self) -> None:
        self.pending += 1
        if self.pending == self.arrivals:
            self.pending, self.phase = 0, self.phase + 1

    def completed(self, parity: int) -> Wait:
        return lambda: self.phase % 2 != parity


@dataclass(kw_only=True)
class Stages:
    num_stages: int
    num_buffers: int
    num_packed: int
    num_groups: int
    k_blocks: int  # of a tile
    waits_for_publisher: bool = True  # before a slot of the queue is written again
    contents: dict[tuple[str, int], int] = field(default_factory=dict)
    landing: list[tuple[tuple[str, int], int, Barrier]] = field(default_factory=list)
    read: list[int] = field(default_factory=lambda: [0] * MATH_WARPGROUPS)  # K blocks that each warpgroup is done with

    def __post_init__(self) -> None:
        self.full = [Barrier(arrivals=2) for _ in range(self.num_stages)]
        self.empty = [Barrier(arrivals=MATH_WARPGROUPS) for _ in range(self.num_stages)]
        self.packed_full = [Barrier(arrivals=1) for _ in range(self.num_packed)]
        self.packed_empty = [Barrier(arrivals=1) for _ in range(self.num_packed)]
        self.published = [Barrier(arrivals=1) for _ in range(QUEUE_SLOTS)]
        self.done = [Barrier(arrivals=MATH_WARPGROUPS + self.waits_for_publisher) for _ in range(QUEUE_SLOTS)]

    def read_tile(self, turn: int) -> Iterator[Wait]:
        trip, slot = divmod(turn, QUEUE_SLOTS)
        yield self.published[slot].completed(trip % 2)
        assert self.contents["tile", slot] == turn, "read another tile"

    def load_weights(self) -> Iterator[Wait]:
        for turn in range(NUM_TILES):
            trip, slot = divmod(turn, QUEUE_SLOTS)
            yield self.done[slot].completed(trip % 2 ^ 1)
            self.contents["tile", slot] = turn
            self.published[slot].arrive()
            yield from self.load("packed", turn, self.packed_full, self.packed_empty)

    def load_activations(self) -> Iterator[Wait]:
        for turn in range(NUM_TILES):
            yield from self.read_tile(turn)
            yield from self.load("activations", turn, self.full, self.empty)

    def load(self, what: str, turn: int, full: list[Barrier], empty: list[Barrier]) -> Iterator[Wait]:
        for k in self.blocks(turn):
            trip, stage = divmod(k, len(full))
            yield empty[stage].completed(trip % 2 ^ 1)
            self.contents.pop((what, stage), None)
            self.landing.append(((what, stage), k, full[stage]))

    def blocks(self, turn: int) -> range:
        return range(turn * self.k_blocks, (turn + 1) * self.k_blocks)

    def convert(self, group: int) -> Iterator[Wait]:
        for turn in range(NUM_TILES):
            yield from self.read_tile(turn)
            for k in self.blocks(turn):
                if k % self.num_groups == group:
                    yield from self.convert_block(k)

    def convert_block(self, k: int) -> Iterator[Wait]:
        trip, packed = divmod(k, self.num_packed)
        yield self.packed_full[packed].completed(trip % 2)
        block = k + 2 * self.num_stages - self.num_buffers
        yield self.empty[block % self.num_stages].completed(block // self.num_stages % 2)
        assert self.contents.get(("packed", packed)) == k, "converted what had not landed"
        assert min(self.read) >= k - self.num_buffers + 1, "overwrote operands that are read"
        self.contents["operands", k % self.num_buffers] = k
        self.packed_empty[packed].arrive()
        self.full[k % self.num_stages].arrive()

    def multiply(self, warpgroup: int) -> Iterator[Wait]:
        for turn in range(NUM_TILES):
            yield from self.read_tile(turn)
            for k in self.blocks(turn):
                trip, stage = divmod(k, self.num_stages)
                yield self.full[stage].completed(trip % 2)
                for _ in range(2):  # the operands stay while they are read
                    assert self.contents.get(("activations", stage)) == k
                    assert self.contents.get(("operands", k % self.num_buffers)) == k
                    yield lambda: True
                self.read[warpgroup] = k + 1
                self.empty[stage].arrive()
            self.done[turn % QUEUE_SLOTS].arrive()

    def publish(self) -> Iterator[Wait]:
        for turn in range(NUM_TILES):
            yield from self.read_tile(turn)
            trip, slot = divmod(turn, QUEUE_SLOTS)
            if self.waits_for_publisher:
                self.done[slot].arrive()
            yield self.done[slot].completed(trip % 2)
            assert min(self.read) >= self.blocks(turn).stop, "published what is not multiplied"
            yield lambda: True  # the release takes its time


def run(stages: Stages, seed: int) -> None:
    rng = random.Random(seed)
    roles = (
        stages.load_weights(),
        stages.load_activations(),
        *map(stages.convert, range(stages.num_groups)),
        *map(stages.multiply, range(MATH_WARPGROUPS)),
        stages.publish(),
    )
    crew = Crew(roles, rng)
    while crew.waiting:
        ready = crew.ready()
        assert ready or stages.landing, "all wait for each other"
        if stages.landing and (not ready or rng.random() < 0.3):
            place, k, barrier = stages.landing.pop(rng.randrange(len(stages.landing)))
            stages.contents[place] = k
            barrier.arrive()
            continue
        crew.let_one_go_on(ready)


def stages_of(tile: TileConfig, k_blocks: int) -> Stages:
    return Stages(
        num_stages=tile.num_stages,
        num_buffers=tile.operand_buffers,
        num_packed=tile.packed_stages,
        num_groups=tile.converter_groups,
        k_blocks=k_blocks,
    )


@pytest.mark.parametrize("k_blocks", [1, 2, 3, 8])
@pytest.mark.parametrize("tile", IN_PIPELINE, ids=lambda tile: tile.name)
def test_every_order_of_events_multiplies_what_was_loaded(tile: TileConfig, k_blocks: int) -> None:
    tile = tile if k_blocks > 1 else with_one_group(tile)
    fewest = replace(tile, num_stages=tile.operand_buffers, packed_stages=2)
    for stages in (tile, fewest):
        for seed in range(25):
            run(stages_of(stages, k_blocks), seed)


def run_many(stages: Callable[[], Stages]) -> None:
    for seed in range(2000):
        run(stages(), seed)


def test_groups_that_do_not_share_out_packed_stages_go_wrong() -> None:
    """And such a tile is refused."""
    with pytest.raises(AssertionError, match="had not landed"):
        run_many(lambda: Stages(num_stages=6, num_buffers=6, num_packed=3, num_groups=2, k_blocks=3))
    with pytest.raises(ConfigError, match="share out"):
        replace(TILES_A8W4["m64"], packed_stages=5)


def test_a_publisher_that_nobody_waits_for_loses_its_place() -> None:
    with pytest.raises(AssertionError, match="another tile|wait for each other"):
        run_many(lambda: replace(stages_of(TILES_A8W4["m64"], k_blocks=2), waits_for_publisher=False))


def test_a_group_without_a_block_of_each_tile_misses_one() -> None:
    """Nothing holds its slot of the queue for it. So layers of one K block have one group."""
    with pytest.raises(AssertionError, match="another tile|wait for each other"):
        run_many(lambda: stages_of(TILES_A8W4["m64"], k_blocks=1))
    for small in (replace(A8W4, hidden_size=128), replace(A8W4, intermediate_size=96)):
        assert max(tile.converter_groups for tile in session_config(small, None).tiles) == 1
        config = session_config(A8W4, "m64")
        with pytest.raises(ConfigError, match="more groups of converter warps than K blocks"):
            config.kernel(small, config.tiles[0], num_virtual_ranks=1, ctas_per_rank=132)

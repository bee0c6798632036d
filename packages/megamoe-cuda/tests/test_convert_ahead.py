"""Mode a8w4, weights converted ahead: converter warps, tiles and publishers of several CTAs in any order of events.

A model of roles/convert_ahead.cuh and of who waits for it: no tile reads a slot of the workspace that holds another
expert, nothing is overwritten that is still read, and nobody waits for ever. Flags rise late, in roles/publish.cuh.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megamoe.errors import ConfigError
from megamoe.schedule.persistent import Unit, block_order
from megamoe.schedule.protocol import Phase
from megamoe_cuda.heuristics import AHEAD, CONVERTED_EXPERTS, session_config
from megamoe_cuda.kernel_config import TileConfig

sys.path.insert(0, str(Path(__file__).parent))
from any_order import A8W4, Crew, Wait

N_TILES = 3  # of each GEMM
STAGES = 7  # of a matrix
NUM_CTAS = 5
QUEUE_SLOTS = 4  # of pipeline/tile_queue.cuh: tiles that a publisher may lag behind by


@dataclass(kw_only=True)
class Call:
    blocks: list[int]  # by expert
    slots: int
    lag: int
    waits_for_slots: bool = True
    publishes_early: bool = False
    slot_holds: dict[tuple[Phase, int], int] = field(default_factory=dict)
    parts: Counter[tuple[Phase, int]] = field(default_factory=Counter)  # CTAs that have stored theirs of a matrix
    ended: Counter[tuple[Phase, int]] = field(default_factory=Counter)  # tiles of a block
    flags: Counter[tuple[Phase, int]] = field(default_factory=Counter)  # what is published of them
    queues: list[list[tuple[Phase, int] | None]] = field(init=False)  # by CTA: tiles to publish, then None
    units: Iterator[Unit] = field(init=False)

    def __post_init__(self) -> None:
        self.queues = [[] for _ in range(NUM_CTAS)]
        self.units = block_order(
            num_blocks=sum(self.blocks), num_gemm1_tiles=N_TILES, num_gemm2_tiles=N_TILES, lag_blocks=self.lag
        )

    def blocks_of(self, expert: int) -> range:
        begin = sum(self.blocks[:expert])
        return range(begin, begin + self.blocks[expert])

    def matrices(self) -> Iterator[tuple[Phase, int]]:
        """As ahead_converter_role() orders them."""
        w13 = [expert for expert, blocks in enumerate(self.blocks) if blocks]
        w2 = list(w13)
        while w2:
            first = bool(w13) and self.blocks_of(w2[0])[0] + self.lag >= self.blocks_of(w13[0])[0]
            yield (Phase.GEMM1, w13.pop(0)) if first else (Phase.GEMM2, w2.pop(0))

    def has_all(self, tiles: Counter[tuple[Phase, int]], phase: Phase, expert: int) -> bool:
        return all(tiles[phase, block] == N_TILES for block in self.blocks_of(expert))

    def convert(self, cta: int) -> Iterator[Wait]:
        for phase, expert in self.matrices():
            before = expert - self.slots
            while before >= 0 and not self.blocks[before]:
                before -= self.slots
            if before >= 0 and self.waits_for_slots:
                yield lambda phase=phase, before=before: self.has_all(self.flags, phase, before)  # type: ignore[misc]
            for _ in range(cta, STAGES, NUM_CTAS):
                held = self.slot_holds.get((phase, expert % self.slots), expert)
                assert held == expert or self.has_all(self.ended, phase, held), "overwrote weights that are read"
                self.slot_holds[phase, expert % self.slots] = expert
                yield lambda: True
            self.parts[phase, expert] += cta < STAGES

    def multiply(self, cta: int) -> Iterator[Wait]:
        queue = self.queues[cta]
        for unit in self.units:  # claimed one by one, by all CTAs
            yield lambda: len(queue) < QUEUE_SLOTS
            expert = next(e for e in range(len(self.blocks)) if unit.block in self.blocks_of(e))
            if unit.phase is Phase.GEMM2:
                yield lambda block=unit.block: self.flags[Phase.GEMM1, block] == N_TILES  # type: ignore[misc]
            yield lambda key=(unit.phase, expert): self.parts[key] == min(STAGES, NUM_CTAS)  # type: ignore[misc]
            if self.publishes_early:
                queue.append((unit.phase, unit.block))
            for _ in range(2):  # while it is multiplied
                assert self.slot_holds[unit.phase, expert % self.slots] == expert, "multiplied by another expert"
                yield lambda: True
            self.ended[unit.phase, unit.block] += 1
            if not self.publishes_early:
                queue.append((unit.phase, unit.block))
        queue.append(None)

    def publish(self, cta: int) -> Iterator[Wait]:
        queue = self.queues[cta]
        while True:
            yield lambda: bool(queue)
            tile = queue[0]
            if tile is None:
                return
            yield lambda: True  # the release takes its time
            self.flags[tile] += 1
            queue.pop(0)


def run(call: Call, seed: int) -> None:
    rng = random.Random(seed)
    roles = (role(cta) for role in (call.convert, call.multiply, call.publish) for cta in range(NUM_CTAS))
    crew = Crew(roles, rng)
    while crew.waiting:
        ready = crew.ready()
        assert ready, "all wait for each other"
        crew.let_one_go_on(ready)
    assert all(
        call.has_all(call.flags, phase, e) for phase in (Phase.GEMM1, Phase.GEMM2) for e in range(len(call.blocks))
    )


def call_of(seed: int, **options: bool) -> Call:
    rng = random.Random(seed)
    blocks = [rng.choice((0, 1, 1, 2, 5)) for _ in range(rng.randint(1, 10))]
    return Call(blocks=blocks, slots=rng.randint(1, CONVERTED_EXPERTS), lag=rng.randint(1, 6), **options)


@pytest.mark.parametrize("seed", range(60))
def test_every_order_of_events_multiplies_by_the_right_weights(seed: int) -> None:
    run(call_of(seed), seed)


def run_many(**options: bool) -> None:
    for seed in range(200):
        run(call_of(seed, **options), seed)


def test_converters_that_do_not_wait_for_their_slot_overwrite_weights() -> None:
    with pytest.raises(AssertionError, match="overwrote|another expert"):
        run_many(waits_for_slots=False)


def test_tiles_published_before_their_end_lose_their_weights() -> None:
    with pytest.raises(AssertionError, match="overwrote|another expert"):
        run_many(publishes_early=True)


def test_only_sessions_for_many_rows_have_room_for_converted_weights() -> None:
    many, few = session_config(A8W4, None), session_config(A8W4, "m128n64")
    kernels = [many.kernel(A8W4, tile, num_virtual_ranks=1, ctas_per_rank=132) for tile in many.tiles]
    assert many.tiles[-1].name == AHEAD.name
    assert {kernel.converted_experts for kernel in kernels} == {CONVERTED_EXPERTS}  # one layout for all of them
    kernel = few.kernel(A8W4, few.tiles[0], num_virtual_ranks=1, ctas_per_rank=132)
    assert kernel.converted_experts == 0


def test_a_tile_that_converts_ahead_has_no_packed_stages() -> None:
    with pytest.raises(ConfigError, match="one group of warps converts ahead"):
        TileConfig(
            name="wrong",
            block_m=128,
            num_stages=4,
            producer_registers=40,
            math_registers=216,
            box_rows=32,
            converter_warps=4,
            converter_registers=40,
            packed_stages=3,
            operand_buffers=2,
            converts_ahead=True,
        )

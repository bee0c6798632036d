"""The protocol holds; every seeded fault is found; the reduced search misses nothing that the full one sees."""

import random
from dataclasses import dataclass, replace

import pytest

from megamoe.schedule.model_check import Fault, Problem, Result, Routing, Scenario, Search, WorkerId, explore, walk
from megamoe.schedule.model_check.faults import FAULT_SCENARIO, FAULT_SHAPE, SEEDED_FAULTS, SeededFault
from megamoe.schedule.protocol import A2_WRITTEN, Call, Op, ProtocolShape, Raise
from megamoe.schedule.tiles import max_pool_blocks


def make_shape(
    *,
    ep_size: int,
    num_ctas: int,
    experts: int = 2,
    top_k: int = 2,
    tokens: int = 3,
    block_m: int = 2,
    ring: int = 2,
    lag: int = 1,
    tiles: tuple[int, int] = (2, 2),
    rows_per_pull: int = 1,
    group: int = 1,
) -> ProtocolShape:
    return ProtocolShape(
        ep_size=ep_size,
        num_ctas=num_ctas,
        num_local_experts=experts,
        top_k=top_k,
        num_max_tokens_per_rank=tokens,
        block_m=block_m,
        ring_blocks=ring,
        lag_blocks=lag,
        group_blocks=group,
        num_gemm1_tiles=tiles[0],
        num_gemm2_tiles=tiles[1],
        rows_per_pull=rows_per_pull,
        max_blocks=max_pool_blocks(
            ep_size=ep_size, num_max_tokens_per_rank=tokens, top_k=top_k, num_local_experts=experts, block_m=block_m
        ),
    )


def random_routing(shape: ProtocolShape, seed: int) -> Routing:
    """Uneven ranks, now and then an empty one; -1, duplicates and ids that are no expert."""
    chooser = random.Random(seed)
    num_experts = shape.ep_size * shape.num_local_experts
    ids = [*range(num_experts), *range(num_experts), -1, num_experts, num_experts + 63, -2]

    def tokens() -> tuple[tuple[int, ...], ...]:
        num_tokens = chooser.choice([0, *range(shape.num_max_tokens_per_rank + 1)])
        return tuple(tuple(chooser.choice(ids) for _ in range(shape.top_k)) for _ in range(num_tokens))

    return tuple(tokens() for _ in range(shape.ep_size))


PAIR = make_shape(ep_size=2, num_ctas=2)
FULL: Routing = (((0, 1), (2, 3), (0, 0)), ((3, 2), (1, 0), (1, 1)))
NOBODY: Routing = ((), ())
MASKED: Routing = (((-1, -1), (-1, -1)), ((-1, -1),))
ALL_TO_0: Routing = (((0, 1), (0, 0), (1, 0)), ((0, 1), (1, 1), (0, 1)))
ALL_TO_1: Routing = (((2, 3), (2, 2), (3, 2)), ((2, 3), (3, 3), (2, 3)))
ONE_EXPERT: Routing = (((1, 1), (1, 1), (1, 1)), ((1, 1), (1, 1), (1, 1)))
ONLY_SENDS: Routing = ((), ((0, 1), (1, 0)))
STRANGE_IDS: Routing = (((4, 0), (67, -2), (-1, 3)), ((3, 99), (-1, -1), (0, 4)))


@dataclass(frozen=True)
class Case:
    id: str
    shape: ProtocolShape
    calls: tuple[Routing, ...]
    first_epoch: int = 1


CASES = [
    Case("full", PAIR, (FULL, FULL, FULL)),
    Case("one-rank", make_shape(ep_size=1, num_ctas=2), ((((0, 1), (1, 1)),), ((),), (((0, 0), (1, -1)),))),
    Case("nobody-has-tokens", PAIR, (NOBODY, NOBODY, NOBODY)),
    Case("between-empty-calls", PAIR, (NOBODY, FULL, NOBODY)),
    Case("all-masked", PAIR, (MASKED, FULL, MASKED)),
    Case("all-to-rank-0-then-1", PAIR, (ALL_TO_0, ALL_TO_1, ALL_TO_0)),
    Case("one-expert", PAIR, (ONE_EXPERT, ONE_EXPERT, ONE_EXPERT)),
    Case("sends-and-receives-nothing", PAIR, (ONLY_SENDS, ALL_TO_1, ONLY_SENDS)),
    Case("ids-that-are-no-expert", PAIR, (STRANGE_IDS, STRANGE_IDS, FULL)),
    Case("ring-of-one", make_shape(ep_size=2, num_ctas=2, ring=1, lag=0), (ALL_TO_0, FULL, ALL_TO_0)),
    Case("smallest-ring-for-its-lag", make_shape(ep_size=2, num_ctas=2, block_m=1, ring=4, lag=3), (ALL_TO_0,) * 3),
    Case("ring-that-does-not-turn", make_shape(ep_size=2, num_ctas=2, ring=8, lag=1), (ALL_TO_0, FULL, ALL_TO_0)),
    Case("lag-beyond-all-blocks", make_shape(ep_size=2, num_ctas=2, ring=8, lag=20), (ALL_TO_0, FULL, ALL_TO_0)),
    Case("as-the-reference-runs", make_shape(ep_size=2, num_ctas=1, tiles=(1, 1), rows_per_pull=2), (FULL,) * 3),
    Case("uneven-pulls", make_shape(ep_size=2, num_ctas=3, block_m=4, rows_per_pull=3), (FULL, ALL_TO_0, FULL)),
    Case("more-ctas-than-work", make_shape(ep_size=2, num_ctas=5), (FULL, NOBODY, FULL)),
    Case("epochs-across-2^31", PAIR, (FULL, ALL_TO_0, FULL), first_epoch=2**31 - 1),
    Case("epochs-across-2^32", PAIR, (FULL, ALL_TO_0, FULL), first_epoch=2**32 - 2),
]


def require_proved(result: Result) -> None:
    assert result.violation is None, str(result.violation)
    assert result.is_complete


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_protocol_holds(case: Case) -> None:
    require_proved(explore(Scenario(shape=case.shape, calls=case.calls, first_epoch=case.first_epoch)))


@pytest.mark.parametrize("seed", range(40))
def test_protocol_holds_for_random_routing(seed: int) -> None:
    chooser = random.Random(1000 + seed)
    lag = chooser.randint(0, 3)
    group = chooser.choice([size for size in (1, 2, 3) if lag % size == 0])
    shape = make_shape(
        ep_size=chooser.randint(1, 4),
        num_ctas=chooser.randint(1, 3),
        experts=chooser.randint(1, 3),
        top_k=chooser.randint(1, 3),
        tokens=4,
        block_m=chooser.randint(1, 3),
        ring=lag + group + chooser.randint(0, 1),
        lag=lag,
        group=group,
        tiles=(chooser.randint(1, 3), chooser.randint(1, 2)),
        rows_per_pull=chooser.randint(1, 3),
    )
    calls = tuple(random_routing(shape, 3 * seed + call) for call in range(3))
    require_proved(explore(Scenario(shape=shape, calls=calls, first_epoch=chooser.choice([1, 2**31 - 1, 2**32 - 1]))))


def test_random_walks_of_a_larger_group() -> None:
    shape = make_shape(ep_size=4, num_ctas=4, experts=2, top_k=3, tokens=6, ring=3, lag=2)
    calls = tuple(random_routing(shape, seed) for seed in range(3))
    result = walk(Scenario(shape=shape, calls=calls, first_epoch=2**31 - 2), seeds=range(8))
    assert result.violation is None, str(result.violation)
    assert result.num_schedules == 8


TWO_RANKS = make_shape(ep_size=2, num_ctas=1, experts=1, top_k=1, tokens=1, block_m=1, ring=2, lag=1, tiles=(1, 1))
ONE_WORKER_PAIR = make_shape(ep_size=1, num_ctas=1, experts=1, top_k=1, tokens=4, block_m=1, ring=2, tiles=(2, 1))
TWO_CTAS = make_shape(ep_size=1, num_ctas=2, experts=1, top_k=1, tokens=2, block_m=2, ring=2, tiles=(2, 1))
ALL_INTERLEAVINGS = [
    pytest.param(Scenario(shape=TWO_RANKS, calls=((((0,),), ((0,),)),)), id="two-ranks"),
    pytest.param(Scenario(shape=ONE_WORKER_PAIR, calls=((((0,),) * 4,),) * 3, first_epoch=2**32 - 1), id="three-calls"),
    pytest.param(Scenario(shape=TWO_CTAS, calls=((((0,), (0,)),),)), id="two-ctas"),
]


@pytest.mark.parametrize("scenario", ALL_INTERLEAVINGS)
def test_protocol_holds_in_every_interleaving(scenario: Scenario) -> None:
    """Without the argument that a few schedules are enough."""
    result = explore(scenario, search=Search.ALL)
    require_proved(result)
    assert result.num_schedules > 100


@pytest.mark.parametrize("seeded", SEEDED_FAULTS, ids=lambda seeded: seeded.fault.name.replace(" ", "-"))
def test_seeded_fault_is_found(seeded: SeededFault) -> None:
    violation = explore(seeded.scenario, fault=seeded.fault, max_steps=100_000).violation
    assert violation is not None
    assert violation.problem in seeded.problems, str(violation)


def test_faults_have_names_of_their_own() -> None:
    assert len({seeded.fault.name for seeded in SEEDED_FAULTS}) == len(SEEDED_FAULTS)


@pytest.mark.parametrize("seeded", SEEDED_FAULTS, ids=lambda seeded: seeded.fault.name.replace(" ", "-"))
@pytest.mark.parametrize("scenario", ALL_INTERLEAVINGS[:2])
def test_reduced_search_finds_what_the_full_one_finds(scenario: Scenario, seeded: SeededFault) -> None:
    """A tiny scenario does not show every fault; the two searches must agree on whether it does."""
    full = explore(scenario, fault=seeded.fault, search=Search.ALL)
    reduced = explore(scenario, fault=seeded.fault)
    assert (full.violation is None) == (reduced.violation is None)
    if full.violation is None:
        assert full.is_complete
        assert reduced.is_complete


@pytest.mark.parametrize("heavy_tile", [0, 1])
def test_order_of_raises_is_tried_where_it_matters(heavy_tile: int) -> None:
    """One tile counts double, so its raise alone satisfies the wait, but only if it comes first."""

    def program(ops: list[Op], _worker: WorkerId, _call: Call) -> list[Op]:
        tiles = [getattr(op, "n_tile", None) for op in ops]
        return [
            replace(op, amount=2)
            if isinstance(op, Raise) and op.flag is A2_WRITTEN and tiles[index - 1] == heavy_tile
            else op
            for index, op in enumerate(ops)
        ]

    scenario = Scenario(shape=FAULT_SHAPE, calls=FAULT_SCENARIO.calls[:1])
    violation = explore(scenario, fault=Fault(name="a tile counts double", program=program)).violation
    assert violation is not None
    assert violation.problem in {Problem.DATA_RACE, Problem.UNWRITTEN}


@pytest.mark.parametrize("lag, group", [(0, 1), (1, 1), (2, 1), (0, 2), (2, 2)])
def test_smallest_ring_is_lag_plus_group(lag: int, group: int) -> None:
    """What `waves.live_blocks` says, shown by running it."""
    for ring, is_enough in ((lag + group - 1, False), (lag + group, True)):
        if ring:
            shape = make_shape(ep_size=2, num_ctas=3, block_m=1, ring=ring, lag=lag, group=group)
            result = explore(Scenario(shape=shape, calls=(ALL_TO_0,)))
            assert (result.violation is None) == is_enough
            assert is_enough or (result.violation and result.violation.problem is Problem.DEADLOCK)


def test_report_names_rank_cta_phase_and_op() -> None:
    seeded = next(seeded for seeded in SEEDED_FAULTS if seeded.fault.name == "rows_arrived is not waited for")
    violation = explore(seeded.scenario, fault=seeded.fault).violation
    assert violation is not None
    report = str(violation)
    assert report.startswith("data race: pool[0, 0] of rank 0: nothing orders")
    assert "rank 0 cta 0 dispatch  epoch 4294967295 dispatch pull rows 0..0 of block 0 into slot 0" in report
    assert "rank 0 cta 0 math      epoch 4294967295 gemm1    gemm1 tile 0 of block 0 in slot 0" in report
    assert len(violation.trace) <= 20


def test_deadlock_report_names_what_each_worker_waits_for() -> None:
    seeded = next(seeded for seeded in SEEDED_FAULTS if seeded.fault.name == "the ring is one slot too small")
    report = str(explore(seeded.scenario, fault=seeded.fault).violation)
    assert "wait block_retired[0] >= 2 from rank 0, is 0" in report
    assert "wait rows_arrived[1] >= 2 from rank 0, is 0" in report


def test_search_that_stops_early_says_so() -> None:
    result = explore(FAULT_SCENARIO, max_steps=50)
    assert result.violation is None
    assert not result.is_complete

"""Redundant experts: the copy that is taken, what is counted, and that the output does not change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megamoe import MoEProblem, VirtualRanks, expert_tensors
from megamoe.errors import ConfigError, InputError
from megamoe.expert_map import ExpertMap
from megamoe.reference.backend import ReferenceBackend

BACKEND = ReferenceBackend()
LOGICAL, PHYSICAL, RANKS = 6, 10, 2
# Expert 0 is on both ranks, 1 twice on rank 1, 5 on rank 0 twice and on rank 1; a slot of rank 1 is empty.
MOVED = torch.tensor([5, 0, 2, 3, 5, 1, 1, 0, 5, 4])


def expert_map(physical_to_logical: Tensor = MOVED, ep_rank: int = 0) -> ExpertMap:
    return ExpertMap(physical_to_logical, num_logical_experts=LOGICAL, ep_rank=ep_rank, ep_size=RANKS)


@st.composite
def maps(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """A map of every logical expert, with copies and empty slots, over some ranks."""
    num_logical, ep_size = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    spare = draw(st.integers(0, 5))
    num_physical = -(-(num_logical + spare) // ep_size) * ep_size
    rest = draw(st.lists(st.integers(-1, num_logical - 1), min_size=num_physical, max_size=num_physical))
    slots = draw(st.permutations([*range(num_logical), *rest[num_logical:]]))
    return torch.tensor(slots), num_logical, ep_size


@given(maps(), st.integers(0, 2**31))
def test_every_pick_goes_to_a_copy_of_its_expert_and_to_a_local_one_if_there_is_one(
    case: tuple[Tensor, int, int], seed: int
) -> None:
    physical_to_logical, num_logical, ep_size = case
    ids = torch.randint(-1, num_logical, (23, 3), generator=torch.Generator().manual_seed(seed))
    per_rank = len(physical_to_logical) // ep_size
    for ep_rank in range(ep_size):
        copies = ExpertMap(physical_to_logical, num_logical_experts=num_logical, ep_rank=ep_rank, ep_size=ep_size)
        physical = copies.to_physical(ids)
        assert physical.shape == ids.shape
        for logical, slot in zip(ids.flatten().tolist(), physical.flatten().tolist()):
            if logical == -1:
                assert slot == -1
                continue
            assert physical_to_logical[slot] == logical
            own = physical_to_logical[ep_rank * per_rank : (ep_rank + 1) * per_rank]
            assert slot // per_rank == ep_rank or logical not in own.tolist()


def test_copies_are_taken_in_turn() -> None:
    ids = torch.full((6, 1), 1)
    assert expert_map(ep_rank=0).to_physical(ids).flatten().tolist() == [5, 6, 5, 6, 5, 6]
    assert expert_map(ep_rank=1).to_physical(ids).flatten().tolist() == [6, 5, 6, 5, 6, 5]
    ids = torch.full((4, 1), 5)  # three copies, of which each rank uses its own
    assert expert_map(ep_rank=0).to_physical(ids).flatten().tolist() == [0, 4, 0, 4]
    assert expert_map(ep_rank=1).to_physical(ids).flatten().tolist() == [8, 8, 8, 8]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_that_are_no_experts(dtype: torch.dtype) -> None:
    """-1 stays; what is out of range must not become some expert: the session skips and counts it."""
    ids = torch.tensor([[-1, LOGICAL], [LOGICAL + 63, -2]], dtype=dtype)
    physical = expert_map().to_physical(ids)
    assert physical.dtype == dtype
    assert physical.tolist() == [[-1, PHYSICAL], [PHYSICAL, PHYSICAL]]


def test_counts_per_logical_expert() -> None:
    counts = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], dtype=torch.int32)
    whole = expert_map().logical_counts(counts)
    assert whole.tolist() == [10, 13, 3, 4, 10, 15]
    parts = [expert_map(ep_rank=rank) for rank in range(RANKS)]
    halves = [part.logical_counts(half) for part, half in zip(parts, counts.chunk(RANKS))]
    assert torch.equal(halves[0] + halves[1], whole)
    placed = [part.physical_counts(half) for part, half in zip(parts, counts.chunk(RANKS))]
    assert torch.equal(placed[0] + placed[1], counts.long())
    empty = expert_map(torch.tensor([5, 0, 2, 3, -1, 1, 1, 0, 5, 4])).logical_counts(counts)
    assert empty.tolist() == [10, 13, 3, 4, 10, 10]  # what an empty slot counts, nobody gets


def test_it_compiles_into_one_graph_that_follows_updates() -> None:
    """No data-dependent shape, and tables that stay in place: what a captured graph needs too."""
    copies = expert_map()
    ids = torch.randint(-1, LOGICAL, (9, 2), generator=torch.Generator().manual_seed(0))
    counts = torch.arange(PHYSICAL, dtype=torch.int32)

    def step(ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return copies.to_physical(ids), copies.logical_counts(counts)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    tables = [table.data_ptr() for table in (copies._copies, copies._num_copies, copies._logical)]
    for new in (MOVED, MOVED.flip(0), torch.tensor([0, 0, 0, 0, 0, 1, 2, 3, 4, 5])):
        copies.update(new)
        for got, expected in zip(compiled(ids, counts), step(ids, counts)):
            assert torch.equal(got, expected)
        assert torch.equal(copies.to_physical(ids), expert_map(new).to_physical(ids))
    assert tables == [table.data_ptr() for table in (copies._copies, copies._num_copies, copies._logical)]


@pytest.mark.parametrize(
    ("new", "complaint"),
    [
        (torch.tensor([5, 0, 2, 3, 5, 1, 1, 0, 5, 5]), "logical expert 4 has no physical slot"),
        (torch.tensor([5, 0, 2, 3, 6, 1, 1, 0, 5, 4]), "physical_to_logical.4. is not a logical expert; got 6"),
        (torch.tensor([5, 0, -2, 3, 5, 1, 1, 0, 2, 4]), "got -2"),
        (torch.arange(6), "a map of other sizes"),
    ],
)
def test_a_refused_map_changes_nothing(new: Tensor, complaint: str) -> None:
    copies = expert_map()
    ids = torch.arange(LOGICAL).unsqueeze(1)
    before = copies.to_physical(ids)
    with pytest.raises(InputError, match=complaint):
        copies.update(new)
    assert torch.equal(copies.to_physical(ids), before)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"ep_size": 3}, "evenly"),
        ({"ep_rank": 2}, "evenly"),
        ({"num_logical_experts": 11}, "not one layer's map"),
        ({"physical_to_logical": MOVED.view(2, 5)}, "pass the row of this layer"),
    ],
)
def test_sizes_that_contradict_each_other(changes: dict[str, object], complaint: str) -> None:
    arguments = {"physical_to_logical": MOVED, "num_logical_experts": LOGICAL, "ep_rank": 0, "ep_size": RANKS}
    with pytest.raises(ConfigError, match=complaint):
        ExpertMap(**(arguments | changes))
    with pytest.raises(InputError, match="not one rank's counts"):
        expert_map().logical_counts(torch.zeros(3))


@pytest.mark.parametrize("transport", ["bf16", "fp8_blockwise_1x32"])
def test_redundant_experts_give_the_same_bits_as_none(transport: str) -> None:
    """The reference, two ranks: 6 experts once each, against the same 6 in 10 slots."""
    g = torch.Generator().manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "top_k": 3, "num_max_tokens_per_rank": 16, "ep_size": RANKS}
    w13 = torch.randn(LOGICAL, 64, 64, generator=g).bfloat16() / 8
    w2 = torch.randn(LOGICAL, 64, 32, generator=g).bfloat16() / 8
    x = [torch.randn(16, 64, generator=g).bfloat16() for _ in range(RANKS)]
    ids = [torch.randint(-1, LOGICAL, (16, 3), generator=g) for _ in range(RANKS)]
    weights = [torch.rand(16, 3, generator=g) for _ in range(RANKS)]

    def run(physical_to_logical: Tensor) -> tuple[list[Tensor], Tensor]:
        """Outputs, and rows per logical expert over both ranks."""
        num_physical = len(physical_to_logical)
        problem = MoEProblem(**sizes, num_experts=num_physical, quant="bf16", transport=transport)
        maps = [expert_map(physical_to_logical, rank) for rank in range(RANKS)]
        with BACKEND.open(BACKEND.plan(problem), VirtualRanks()) as session:
            prepared = [
                session.prepare_weights(w13[slots], w2[slots], layout="packed")
                for slots in physical_to_logical.chunk(RANKS)
            ]
            y = session.forward(x, [m.to_physical(i) for m, i in zip(maps, ids)], weights, prepared)
            counts = [m.logical_counts(c) for m, c in zip(maps, session.receive_counts())]
        return y, torch.stack(counts).sum(0)

    expected, expected_counts = run(torch.arange(LOGICAL))
    got, counts = run(MOVED)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    assert torch.equal(counts, expected_counts)
    assert torch.equal(counts, torch.bincount(torch.cat(ids)[torch.cat(ids) >= 0], minlength=LOGICAL))


def test_experts_move_between_two_calls() -> None:
    """In place, by copying slots of `expert_tensors`, after which the map follows: nobody sees the difference."""
    g = torch.Generator().manual_seed(1)
    problem = MoEProblem(
        hidden_size=64, intermediate_size=32, num_experts=PHYSICAL, top_k=2, num_max_tokens_per_rank=16, quant="bf16"
    )
    w13 = torch.randn(LOGICAL, 64, 64, generator=g).bfloat16() / 8
    w2 = torch.randn(LOGICAL, 64, 32, generator=g).bfloat16() / 8
    x, ids = torch.randn(16, 64, generator=g).bfloat16(), torch.randint(0, LOGICAL, (16, 2), generator=g)
    weights = torch.rand(16, 2, generator=g)
    before, after = MOVED, MOVED.roll(3)
    copies = ExpertMap(before, num_logical_experts=LOGICAL, ep_rank=0, ep_size=1)
    with BACKEND.open(BACKEND.plan(problem)) as session:
        prepared = session.prepare_weights(w13[before], w2[before], layout="packed")
        expected = session.forward(x, copies.to_physical(ids), weights, prepared)
        source = copies.to_physical(after.unsqueeze(1)).squeeze(1)  # where each slot's new expert is now
        for tensor in expert_tensors(prepared).values():
            tensor.copy_(tensor[source])
        stale = session.forward(x, copies.to_physical(ids), weights, prepared)
        copies.update(after)
        assert torch.equal(session.forward(x, copies.to_physical(ids), weights, prepared), expected)
        assert not torch.equal(stale, expected)

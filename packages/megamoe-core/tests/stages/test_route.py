"""Routing: order, counts, and ids that name no expert."""

from __future__ import annotations

import pytest
import torch

from megamoe.stages.route import is_expert, out_of_range, route

E = 4


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_entries_are_sorted_by_expert_then_by_pick(dtype: torch.dtype) -> None:
    ids = torch.tensor([[3, 0], [0, 3], [1, 0]], dtype=dtype)
    weights = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    routing = route(ids, weights, E)
    assert routing.picks.tolist() == [1, 2, 5, 4, 0, 3]
    assert routing.picks.dtype == routing.counts.dtype == torch.int32
    torch.testing.assert_close(routing.weights, torch.tensor([0.2, 0.3, 0.6, 0.5, 0.1, 0.4]))
    assert routing.counts.tolist() == [3, 1, 0, 2]


def test_masked_and_foreign_ids_make_no_entry() -> None:
    ids = torch.tensor([[-1, 2], [E, E + 63], [-2, 2]])
    routing = route(ids, torch.ones(3, 2), E)
    assert routing.picks.tolist() == [1, 5]
    assert routing.counts.tolist() == [0, 0, 2, 0]
    assert is_expert(ids, E).tolist() == [[False, True], [False, False], [False, True]]
    assert out_of_range(ids, E).tolist() == [[False, False], [True, True], [True, False]]


def test_duplicates_are_two_entries() -> None:
    routing = route(torch.tensor([[2, 1, 1, 3]]), torch.ones(1, 4), E)
    assert routing.picks.tolist() == [1, 2, 0, 3]
    assert routing.counts.tolist() == [0, 2, 1, 1]


def test_no_tokens() -> None:
    routing = route(torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2), E)
    assert routing.picks.numel() == 0
    assert routing.counts.tolist() == [0] * E

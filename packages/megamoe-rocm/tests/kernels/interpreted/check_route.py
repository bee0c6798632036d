"""Counting, pushing and planning against stages.route and schedule.tiles.plan_blocks."""

from __future__ import annotations

import pytest
import torch
from harness import Layer, problem, random_inputs, run_in_turn

from megamoe.schedule.tiles import plan_blocks
from megamoe.stages.route import route

WIDE = {"hidden_size": 256, "intermediate_size": 256}


def routed(layer: Layer, inputs, num_tokens=None) -> None:
    _, lists = layer.launches(inputs, num_tokens)
    run_in_turn(lists, until="plan_blocks")


@pytest.mark.parametrize(
    "num_experts, ep_size, top_k, tokens",
    [
        (4, 2, 2, (24, 17)),
        (2, 2, 16, (24, 24)),  # one expert each, many blocks
        (130, 2, 5, (300, 7)),  # 65 local experts: two turns of 64
        (12, 4, 3, (0, 24, 1, 0)),  # zero tokens on some ranks
        (8, 1, 8, (24,)),
    ],
)
def test_counts_entries_and_blocks(num_experts: int, ep_size: int, top_k: int, tokens: tuple[int, ...]) -> None:
    layer = Layer(
        problem=problem(
            **WIDE, num_experts=num_experts, ep_size=ep_size, top_k=top_k, num_max_tokens_per_rank=max(tokens)
        )
    )
    inputs = random_inputs(layer.problem, tokens, low=-1)
    routed(layer, inputs)

    experts = layer.problem.num_local_experts
    routings = [route(ids, w, num_experts) for ids, w in zip(inputs.topk_ids, inputs.topk_weights, strict=True)]
    for owner, memory in enumerate(layer.memory):
        mine = slice(owner * experts, (owner + 1) * experts)
        counts = torch.stack([routing.counts[mine] for routing in routings])
        assert torch.equal(memory.words("route_counts").view(ep_size, experts), counts)
        assert torch.equal(memory.words("receive_counts"), counts.sum(0).int())
        assert memory.words("counts_published").tolist() == [-1] * ep_size  # epoch 2^32 - 1

        blocks = plan_blocks(tuple(map(tuple, counts.tolist())), owner, layer.tile.block_m, layer.ring.ring_blocks)
        assert memory.words("num_blocks").item() == len(blocks)
        table = memory.words("block_table").view(-1, 4)[: len(blocks), :3].tolist()
        first_rows, seen = [], {}
        for block in blocks:
            first_rows.append(seen.get(block.local_expert_idx, 0))
            seen[block.local_expert_idx] = first_rows[-1] + block.num_rows
        expected = [[b.local_expert_idx, first, b.num_rows] for b, first in zip(blocks, first_rows, strict=True)]
        assert table == expected

        entries = memory.words("route_entries").view(ep_size, -1, 2)
        for src, routing in enumerate(routings):
            first = int(routing.counts[: owner * experts].sum())
            for expert in range(experts):
                count = int(counts[src, expert])
                begin = int(counts[src, :expert].sum())
                got = entries[src, begin : begin + count]
                picks = routing.picks[first : first + count]
                order = got[:, 0].argsort()  # the order within an expert is free
                assert torch.equal(got[order, 0], picks)
                assert torch.equal(got[order, 1].view(torch.float32), routing.weights[first : first + count])
                first += count


def test_ids_that_are_no_expert_are_skipped_and_counted() -> None:
    layer = Layer(problem=problem(**WIDE))
    inputs = random_inputs(layer.problem, (24, 3))
    ids = inputs.topk_ids[0].long()  # int64 as well
    ids[0], ids[1, 0], ids[2, 1], ids[3, 0], ids[4, 0] = -1, 4, 67, -2, 2**40
    inputs.topk_ids[0] = ids
    routed(layer, inputs)
    assert layer.memory[0].words("dropped_ids").item() == 4
    received = sum(int(memory.words("receive_counts").sum()) for memory in layer.memory)
    assert received == 2 * (24 + 3) - 2 - 4


def test_padding_tokens_send_nothing() -> None:
    layer = Layer(problem=problem(**WIDE))
    routed(layer, random_inputs(layer.problem, (24, 20)), num_tokens=(5, 0))
    assert sum(int(memory.words("receive_counts").sum()) for memory in layer.memory) == 2 * 5


def test_a_call_clears_what_the_next_one_counts() -> None:
    layer = Layer(problem=problem(**WIDE))
    words = layer.memory[0].words("route_totals").view(2, -1)
    counters, launches = (layer.memory[0].words(name) for name in ("counters", "launch_counters"))
    for copy in (words[0], counters.view(2, -1)[0], launches.view(2, -1)[0]):
        copy.fill_(99)  # epoch 2^32 - 1 is odd: the even copies are the next call's
    routed(layer, random_inputs(layer.problem, (24, 3)))
    assert words[0].sum() == counters.view(2, -1)[0].sum() == launches.view(2, -1)[0].sum() == 0
    assert words[1].sum() == 48

"""Ranks side by side in processes of their own, over shared memory: real waiting, in any order of arrival."""

from __future__ import annotations

import time

import torch
import torch.multiprocessing as mp
from harness import NO_LIMIT, Layer, problem, random_inputs, rel_l2
from torch import Tensor

from megamoe_rocm.kernels.launch import CallTensors
from megamoe_rocm.kernels.workspace import RankMemory

CALLS = 3
MANY_POLLS = 2_000_000  # minutes
TOKENS = [(6, 3), (0, 5), (4, 0)]


def run_rank(rank: int, workspaces: list[Tensor], outs: list[list[Tensor]]) -> None:
    """All calls of one rank; the ranks meet in their flags only."""
    layer = Layer(problem=problem(transport="fp8_blockwise_1x32"), patience=MANY_POLLS)
    layer.memory = [RankMemory(layer.memory[0].layout, workspace) for workspace in workspaces]
    for call in range(CALLS):
        if call % 2 == rank:
            time.sleep(0.5)  # now one is late, now the other
        inputs = random_inputs(layer.problem, TOKENS[call], seed=call, low=-1)
        tensors = CallTensors(
            hidden_states=inputs.hidden_states[rank],
            hidden_scales=None,
            topk_ids=inputs.topk_ids[rank],
            topk_weights=inputs.topk_weights[rank],
            weights=layer.prepared[rank],
            out=outs[call][rank],
            num_tokens=torch.tensor([NO_LIMIT], dtype=torch.int32),
            report=layer.reports[rank],
        )
        for phase in layer.rank_call(rank).phases(tensors):
            for launch in phase:
                launch.run()


def test_two_processes() -> None:
    layer = Layer(problem=problem(transport="fp8_blockwise_1x32"))
    workspaces = [memory.workspace.share_memory_() for memory in layer.memory]
    outs = [
        [torch.empty(count, layer.problem.hidden_size, dtype=torch.bfloat16).share_memory_() for count in tokens]
        for tokens in TOKENS
    ]
    mp.spawn(run_rank, args=(workspaces, outs), nprocs=2)
    for call, tokens in enumerate(TOKENS):
        inputs = random_inputs(layer.problem, tokens, seed=call, low=-1)
        for out, expected in zip(outs[call], layer.reference(inputs).outputs, strict=True):
            assert len(expected) == 0 or rel_l2(out, expected) < 1e-2
    assert [RankMemory(memory.layout, memory.workspace).words("epoch").item() for memory in layer.memory] == [1, 1]

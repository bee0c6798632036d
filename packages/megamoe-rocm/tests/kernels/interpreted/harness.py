"""A small layer, its ranks' memory, and the launches of its calls, for checks in Triton's interpreter.

All ranks are in one process and take turns, launch by launch: a wait finds its flag raised, or times out after a few
polls. check_processes.py runs ranks side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megamoe.formats import MXFP4, activation_format
from megamoe.problem import MoEProblem
from megamoe.reference.staged import Staged, staged
from megamoe.schedule.waves import Ring
from megamoe.tensors import ExpertWeights, make_weights
from megamoe_rocm import weights as kernel_weights
from megamoe_rocm.heuristics import TileConfig
from megamoe_rocm.kernels.launch import INTERPRETER, CallTensors, Launch, RankCall, Target, stage1_parameters
from megamoe_rocm.kernels.workspace import RankMemory, kernel_workspace, ring_of

torch.set_num_threads(1)

NO_LIMIT = 2**31 - 1
SMALL = TileConfig(
    name="small",
    block_m=32,
    gemm1_block_m=32,
    gemm1_block_n=128,
    gemm2_block_m=32,
    gemm2_block_n=128,
    num_warps=2,
    pull_rows=16,
    lead_blocks=1,
    provenance="small enough for the interpreter",
)
FILL = 0xAB  # memory that nobody has written


def problem(**changes: Any) -> MoEProblem:
    """Two ranks, four experts, two steps along K in GEMM1."""
    fields: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 256,
        "num_experts": 4,
        "top_k": 2,
        "num_max_tokens_per_rank": 24,
        "ep_size": 2,
        "quant": "a4w4",
    }
    return MoEProblem(**{**fields, **changes})


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One call's arguments, a list entry a rank."""

    hidden_states: list[Any]
    topk_ids: list[Tensor]
    topk_weights: list[Tensor]


@dataclass(kw_only=True)
class Layer:
    """All ranks of one layer.

    Args:
        problem: the layer.
        tile: the tile.
        pool_blocks: blocks that the pool holds; None for all.
        last_epoch: number of the call before the first.
        num_programs: of the persistent launches.
        patience: of a wait, in the target's units.
        target: what runs the launches.
    """

    problem: MoEProblem
    tile: TileConfig = SMALL
    pool_blocks: int | None = None
    last_epoch: int = 2**32 - 2
    num_programs: int = 2
    patience: int = 3
    target: Target = INTERPRETER
    weights: list[ExpertWeights] = field(init=False)
    prepared: list[Mapping[str, Tensor]] = field(init=False)
    memory: list[RankMemory] = field(init=False)
    ring: Ring = field(init=False)
    reports: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.weights = [random_weights(self.problem, rank) for rank in range(self.problem.ep_size)]
        self.prepared = [kernel_weights.prepare(weights, self.problem).tensors for weights in self.weights]
        self.reports = torch.zeros(self.problem.ep_size, 8, dtype=torch.int32)
        self.ring = ring_of(self.problem, self.tile.block_m, self.pool_blocks)
        layout = kernel_workspace(self.problem, (self.ring,))
        self.memory = [
            RankMemory(layout, torch.full((layout.num_bytes,), FILL, dtype=torch.uint8)) for _ in self.weights
        ]
        for memory in self.memory:
            memory.words("dropped_ids").zero_()
            memory.start(self.last_epoch)

    def rank_call(self, rank: int) -> RankCall:
        """The launches' common arguments."""
        return RankCall(
            problem=self.problem,
            rank=rank,
            tile=self.tile,
            ring=self.ring,
            rings=(self.ring,),
            memory=self.memory[rank],
            peers=torch.tensor([memory.workspace.data_ptr() for memory in self.memory]),
            stage1_parameters=stage1_parameters(self.problem, rank, self.memory[rank]),
            num_programs=self.num_programs,
            patience=self.patience,
            target=self.target,
        )

    def launches(
        self, inputs: Inputs, num_tokens: Sequence[int] | None = None
    ) -> tuple[list[Tensor], list[list[Launch]]]:
        """Outputs of all ranks, and each rank's launches."""
        outs, lists = [], []
        for rank, ids in enumerate(inputs.topk_ids):
            payload, scales = _split(inputs.hidden_states[rank])
            outs.append(torch.full((len(ids), self.problem.hidden_size), 7.0, dtype=torch.bfloat16))
            limit = NO_LIMIT if num_tokens is None else num_tokens[rank]
            tensors = CallTensors(
                hidden_states=payload,
                hidden_scales=scales,
                topk_ids=ids,
                topk_weights=inputs.topk_weights[rank],
                weights=self.prepared[rank],
                out=outs[rank],
                num_tokens=torch.tensor([limit], dtype=torch.int32),
                report=self.reports[rank],
            )
            lists.append([launch for phase in self.rank_call(rank).phases(tensors) for launch in phase])
        return outs, lists

    def forward(self, inputs: Inputs, num_tokens: Sequence[int] | None = None) -> list[Tensor]:
        """One call: every rank's first launch, then every rank's second, and so on."""
        outs, lists = self.launches(inputs, num_tokens)
        run_in_turn(lists)
        for memory in self.memory:
            assert memory.words("status").tolist() == [0] * 8, "a wait timed out"
        return outs

    def reference(self, inputs: Inputs) -> Staged:
        """The staged reference of the same call."""
        return staged(self.problem, inputs.hidden_states, inputs.topk_ids, inputs.topk_weights, self.weights)


def run_in_turn(lists: list[list[Launch]], until: str | None = None) -> None:
    """Run the ranks' launches phase by phase, up to and including kernel `until`."""
    queues = [list(launches) for launches in lists]
    for name in ("quantize_input", "copy_input", "count_picks", "push_entries", "plan_blocks"):
        _run_named(queues, name)
        if name == until:
            return
    while any(queue[0].kernel.__name__ == "dispatch_gemm1" for queue in queues):
        for name in ("dispatch_gemm1", "gemm2_p2p"):
            _run_named(queues, name, at_most=1)
            if name == until:
                return
    _run_named(queues, "combine_rows")
    assert not any(queues)


def _run_named(queues: list[list[Launch]], name: str, at_most: int = 10) -> None:
    for queue in queues:
        for _ in range(at_most):
            if queue and queue[0].kernel.__name__ == name:
                queue.pop(0).run()


def random_weights(problem: MoEProblem, rank: int) -> ExpertWeights:
    """MXFP4 experts whose activations are of order 1."""
    generator = torch.Generator().manual_seed(rank)
    experts, hidden, inter = problem.num_local_experts, problem.hidden_size, problem.intermediate_size

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    w13 = MXFP4.quantize(randn(experts, 2 * inter, hidden) * hidden**-0.5 * 2)
    w2 = MXFP4.quantize(randn(experts, hidden, inter) * inter**-0.5)
    assert w13.scales is not None
    assert w2.scales is not None
    return make_weights(
        problem,
        (w13.payload, w13.scales),
        (w2.payload, w2.scales),
        layout="packed",
        w13_bias=randn(experts, 2 * inter) if problem.expert_bias else None,
        w2_bias=randn(experts, hidden) if problem.expert_bias else None,
    )


def random_inputs(problem: MoEProblem, num_tokens: Sequence[int], seed: int = 0, *, low: int = 0) -> Inputs:
    """Random tokens; ids from `low` to the last expert, -1 among them if `low` is -1."""
    generator = torch.Generator().manual_seed(seed)
    ids = [
        torch.randint(low, problem.num_experts, (count, problem.top_k), generator=generator, dtype=torch.int32)
        for count in num_tokens
    ]
    return Inputs(
        hidden_states=[torch.randn(count, problem.hidden_size, generator=generator).bfloat16() for count in num_tokens],
        topk_ids=ids,
        topk_weights=[torch.randn(count, problem.top_k, generator=generator) for count in num_tokens],
    )


def rel_l2(got: Tensor, expected: Tensor) -> float:
    """Relative L2 distance."""
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def as_format(problem: MoEProblem, x: Tensor) -> Any:
    """`x` quantised in the mode's activation format."""
    return activation_format(problem.quant, problem.act_format).quantize(x)


def _split(hidden_states: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(hidden_states, Tensor):
        return hidden_states, None
    return hidden_states.payload.view(torch.uint8), hidden_states.scales

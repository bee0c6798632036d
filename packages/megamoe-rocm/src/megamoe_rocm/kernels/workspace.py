"""The workspace of one rank as these kernels use it: the common layout and arrays of their own."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from megamoe.problem import MoEProblem
from megamoe.schedule.protocol import Join
from megamoe.schedule.tiles import ceil_div, max_pool_blocks
from megamoe.schedule.waves import Ring
from megamoe.schedule.workspace import ACTIVATION_ROWS, WORD, Section, WorkspaceLayout, plan_workspace

BLOCK_TABLE_BYTES = 16  # int32 local expert, first row within it, rows, unused
ADDRESS_BYTES = 8
STATUS_WORDS = 8  # as kernels/flags.py writes them


class LaunchCounter(IntEnum):
    """Words of `launch_counters` before the tickets: programs of a launch that have arrived, by waves."""

    COUNTED = 0
    ROUTED = 1
    FINISHED = 2
    COMBINED = 3


MAX_POOL_ROWS = 1 << 18
"""Rows that the pool holds at most, 1.4 GB with the rows of H=7168, I=3072 in a4w4. A capacity whose fullest call (all
picks of all ranks on one owner) fills more has its stages launched several times a call; rounds without blocks are
launches that end at once."""


def ring_of(problem: MoEProblem, block_m: int, pool_blocks: int | None = None) -> Ring:
    """Blocks that the pool holds at a time; None for all that the fullest call fills, up to `MAX_POOL_ROWS`.

    Stages 1 and 2 run once per ring full of blocks, one after the other, so a ring may hold any number of blocks.
    """
    max_blocks = max_pool_blocks(
        ep_size=problem.ep_size,
        num_max_tokens_per_rank=problem.num_max_tokens_per_rank,
        top_k=problem.top_k,
        num_local_experts=problem.num_local_experts,
        block_m=block_m,
    )
    ring_blocks = min(pool_blocks or MAX_POOL_ROWS // block_m, max_blocks)
    return Ring(block_m=block_m, lag_blocks=0, ring_blocks=ring_blocks, max_blocks=max_blocks)


def num_rounds(ring: Ring) -> int:
    """How often stages 1 and 2 are launched in a call: the host does not know the counts, so as for the fullest one."""
    return ceil_div(ring.max_blocks, ring.ring_blocks)


def counter_words(rings: Sequence[Ring]) -> int:
    """Words of one copy of `counters`, as `schedule.plan_workspace` places them; rows_arrived comes first."""
    return 3 * max(ring.max_blocks for ring in rings) + len(Join)


def launch_words(rings: Sequence[Ring]) -> int:
    """Words of one copy of `launch_counters`: arrivals, then tickets of the rounds of stage 1 and of stage 2."""
    return len(LaunchCounter) + 2 * max(num_rounds(ring) for ring in rings)


def kernel_workspace(problem: MoEProblem, rings: Sequence[Ring]) -> WorkspaceLayout:
    """Where everything is, for a session whose calls use any of `rings`."""
    layout = plan_workspace(
        hidden_size=problem.hidden_size,
        intermediate_size=problem.intermediate_size,
        num_local_experts=problem.num_local_experts,
        ep_size=problem.ep_size,
        num_max_tokens_per_rank=problem.num_max_tokens_per_rank,
        top_k=problem.top_k,
        activation=ACTIVATION_ROWS[str(problem.quant)],
        transport=str(problem.transport),
        rings=tuple(rings),
    )
    own = {
        "epoch": ((1,), WORD),  # number of the last call that ended
        "status": ((STATUS_WORDS,), WORD),  # what a wait that timed out waited for
        "route_totals": ((2, problem.num_experts), WORD),  # by parity: this rank's picks per expert
        "route_bases": ((problem.num_experts,), WORD),
        "pick_places": ((problem.num_max_tokens_per_rank * problem.top_k,), WORD),
        "first_entries": ((problem.ep_size, problem.num_local_experts), WORD),
        "block_table": ((max(ring.max_blocks for ring in rings),), BLOCK_TABLE_BYTES),
        "num_blocks": ((1,), WORD),
        "receive_counts": ((problem.num_local_experts,), WORD),
        "home_rows": ((max(ring.num_rows for ring in rings),), ADDRESS_BYTES),  # where each pool row's result goes
        "launch_counters": ((2, launch_words(rings)), WORD),
    }
    for name, (dims, row_bytes) in own.items():
        layout = layout.with_local(name, dims, row_bytes)
    return layout


class RankMemory:
    """Typed views of one rank's workspace.

    Args:
        layout: made by `kernel_workspace`.
        workspace: uint8, at least `layout.num_bytes`; with `local`, at least the symmetric section.
        local: uint8, the local section, where it is not a part of `workspace`: memory that peers can address may be
            slower.
    """

    def __init__(self, layout: WorkspaceLayout, workspace: Tensor, local: Tensor | None = None) -> None:
        layout.check_size(workspace.numel() + (0 if local is None else local.numel()))
        self.layout = layout
        self.workspace = workspace
        self._local = local

    def bytes(self, name: str) -> Tensor:
        """Array `name` as uint8 `[rows, row bytes]`."""
        array = self.layout[name]
        memory, offset = self.workspace, array.offset
        if self._local is not None and array.section is Section.LOCAL:
            memory, offset = self._local, offset - self.layout.symmetric_bytes
        return memory[offset : offset + array.num_bytes].view(-1, array.row_bytes)

    def words(self, name: str) -> Tensor:
        """Array `name` as int32, flat."""
        return self.bytes(name).view(torch.int32).view(-1)

    def addresses(self, name: str) -> Tensor:
        """Array `name` as int64, flat."""
        return self.bytes(name).view(torch.int64).view(-1)

    def start(self, last_epoch: int) -> None:
        """Ready the flags for the call after `last_epoch`. All ranks do this and meet before any of them launches.

        `dropped_ids`, a sum over all calls, stays.
        """
        as_int32 = (last_epoch + 2**31) % 2**32 - 2**31
        for name in ("counts_published", "rank_finished", "epoch", "abort"):
            self.words(name).fill_(as_int32)
        for name in ("counters", "launch_counters", "route_totals", "status"):
            self.words(name).zero_()

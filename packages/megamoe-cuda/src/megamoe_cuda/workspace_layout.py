"""The workspace of one rank as the SM90 kernel uses it: the common layout and two small arrays of its own."""

from __future__ import annotations

from dataclasses import replace

from megamoe.problem import QuantMode
from megamoe.schedule.tiles import round_up
from megamoe.schedule.workspace import (
    ACTIVATION_ROWS,
    ARRAY_ALIGNMENT,
    WORD,
    Array,
    Section,
    WorkspaceLayout,
    plan_workspace,
)
from megamoe_cuda.kernel_config import KernelConfig

ROWS = {QuantMode.A8W8: "a8w8", QuantMode.BF16: "bf16", QuantMode.A8W4: "a8w4:fp8_1x128"}  # keys of ACTIVATION_ROWS
NUM_ROUTE_WORDS = 2  # the join of the CTAs that route; the units that CTAs have claimed


def kernel_workspace(config: KernelConfig) -> WorkspaceLayout:
    """Where everything is. Kernels of one session (equal problems and `session_rings`) get equal layouts.

    Besides the common arrays: `epoch`, the last call that ended; `route_totals`, twice (by parity), this rank's picks
    per expert, the join of the CTAs that route, and how many units CTAs have claimed.
    """
    common = plan_workspace(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_local_experts=config.num_local_experts,
        ep_size=config.num_ranks,
        num_max_tokens_per_rank=config.num_max_tokens_per_rank,
        top_k=config.top_k,
        activation=ACTIVATION_ROWS[ROWS[config.quant]],
        transport=config.transport,
        rings=config.session_rings,
    )
    layout = common
    for name, dims in (("epoch", (1,)), ("route_totals", (2, config.num_experts + NUM_ROUTE_WORDS))):
        array = Array(
            name=name,
            section=Section.LOCAL,
            region=None,
            dims=dims,
            row_bytes=WORD,
            offset=round_up(layout.num_bytes, ARRAY_ALIGNMENT),
        )
        layout = replace(layout, arrays=(*layout.arrays, array))
    return layout


def initial_words(layout: WorkspaceLayout, epoch: int) -> list[tuple[str, int]]:
    """What a session stores before its first call, and in a collective reset: (array, value of each of its words).

    `epoch` is the number of the last call, first_epoch - 1. Payload arrays need no initial value. All ranks store, then
    meet, before any of them launches. `dropped_ids`, a sum over all calls, is zeroed before the first one only.
    """
    epoch_words = ["counts_published", "rank_finished", "epoch"]
    zero_words = ["abort", "counters", "route_totals", "route_counts"]
    return [(name, epoch % 2**32) for name in epoch_words] + [(name, 0) for name in zero_words]

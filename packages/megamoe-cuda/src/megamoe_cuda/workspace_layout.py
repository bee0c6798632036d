"""The workspace of one rank as the SM90 kernel uses it: the common layout and two small arrays of its own."""

from __future__ import annotations

from megamoe.problem import QuantMode
from megamoe.schedule.workspace import (
    ACTIVATION_ROWS,
    WORD,
    WorkspaceLayout,
    plan_workspace,
)
from megamoe_cuda.kernel_config import BLOCK_K, BLOCK_N, KernelConfig

ROWS = {QuantMode.A8W8: "a8w8", QuantMode.BF16: "bf16", QuantMode.A8W4: "a8w4:fp8_1x128"}  # keys of ACTIVATION_ROWS
NUM_MATRICES = 2  # w13 and w2
NUM_ROUTE_WORDS = 2  # the join of the CTAs that route; the units that CTAs have claimed


def kernel_workspace(config: KernelConfig) -> WorkspaceLayout:
    """Where everything is. Kernels of one session (equal problems and `session_rings`) get equal layouts.

    Besides the common arrays: `epoch`, the last call that ended; `route_totals`, twice (by parity), this rank's picks
    per expert, the join of the CTAs that route, how many units CTAs have claimed, and how much of each matrix
    is converted; `converted_weights`, in a session whose kernels convert ahead: stages of FP8 operands.
    """
    layout = plan_workspace(
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
    stages = 0
    if config.converted_experts:
        stages = config.gemm1_n_tiles * config.gemm1_k_blocks + config.gemm2_n_tiles * config.gemm2_k_blocks
    words = config.num_experts + NUM_ROUTE_WORDS + (config.num_local_experts * NUM_MATRICES if stages else 0)
    own: list[tuple[str, tuple[int, ...], int]] = [("epoch", (1,), WORD), ("route_totals", (2, words), WORD)]
    if stages:
        own.append(("converted_weights", (config.converted_experts, stages), BLOCK_N * BLOCK_K))
    for name, dims, row_bytes in own:
        layout = layout.with_local(name, dims, row_bytes)
    return layout


def initial_words(layout: WorkspaceLayout, epoch: int) -> list[tuple[str, int]]:
    """What a session stores before its first call, and in a collective reset: (array, value of each of its words).

    `epoch` is the number of the last call, first_epoch - 1. Payload arrays need no initial value. All ranks store, then
    meet, before any of them launches. `dropped_ids`, a sum over all calls, is zeroed before the first one only.
    """
    epoch_words = ["counts_published", "rank_finished", "epoch"]
    zero_words = ["abort", "counters", "route_totals", "route_counts"]
    return [(name, epoch % 2**32) for name in epoch_words] + [(name, 0) for name in zero_words]

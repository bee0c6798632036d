"""What a call should take on MI355Xs: bytes, matrix time and hand-shakes of each stage. A model, never measured.

Routing is uniform, all ranks alike. A stage takes as long as what takes longest of it: matrix units, memory, links; the
stages follow each other, and between them stand launches and, twice a call, hand-shakes of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megamoe.formats import activation_format
from megamoe.problem import MoEProblem, QuantMode, Transport
from megamoe.schedule.device_spec import MI355X
from megamoe.schedule.tiles import ceil_div
from megamoe_rocm.heuristics import TileConfig, tile_for

CLOCK_HZ = 2.4e9  # data sheet, peak engine clock
MFMA_CYCLES = {QuantMode.A4W4: 16, QuantMode.A8W4: 32}  # 16x16x128; FP8 operands take twice as long
MFMA_FLOPS = 16 * 16 * 128
SIMDS_PER_CU = 4
LAUNCH_S = 3e-6  # from the end of a kernel to the start of the next on a stream; assumed
FLAG_S = 1.5e-6  # a release at system scope: write-back, then a store over a link; assumed
POLL_S = 1.0e-6  # an atomic at system scope that finds it, and the invalidate behind; assumed
LAUNCHES = 7  # quantise, count, push, plan, stage 1, stage 2, combine
HANDSHAKES = 2  # counts_published and rank_finished


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Seconds of what a stage needs, side by side.

    Args:
        matrix_s: matrix units, at the main loop's modelled utilisation.
        memory_s: device memory, at the data sheet's rate.
        link_s: links to peers, at the data sheet's rate.
    """

    matrix_s: float = 0.0
    memory_s: float = 0.0
    link_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The longest."""
        return max(self.matrix_s, self.memory_s, self.link_s)

    @property
    def limit(self) -> str:
        """Which it is."""
        return max(("matrix", self.matrix_s), ("memory", self.memory_s), ("links", self.link_s), key=lambda x: x[1])[0]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One call of one rank.

    Args:
        num_tokens: of each rank.
        tile: that the call uses.
        padding: share of the multiplied rows that hold none.
        stage1, stage2: pull, GEMM1 and A2; GEMM2 and rows home.
        rest_s: quantise and combine.
        launches_s: gaps between launches.
        handshake_s: both hand-shakes of all ranks.
        utilisation: of the matrix units in the two main loops, while they run.
    """

    num_tokens: int
    tile: TileConfig
    padding: float
    stage1: Stage
    stage2: Stage
    rest_s: float
    launches_s: float
    handshake_s: float
    utilisation: tuple[float, float]

    @property
    def seconds(self) -> float:
        """Everything, one after the other."""
        return self.stage1.seconds + self.stage2.seconds + self.rest_s + self.launches_s + self.handshake_s


Utilisation = Callable[[str, TileConfig, MoEProblem], float]
"""Kernel, tile and problem -> the main loop's modelled share."""


def predict(problem: MoEProblem, num_tokens: int, utilisation: Utilisation) -> Prediction:
    """A call with `num_tokens` tokens on every rank."""
    tile = tile_for(num_max_tokens_per_rank=problem.num_max_tokens_per_rank, num_tokens=num_tokens)
    rows = num_tokens * problem.top_k  # that a rank's experts receive, as many as it sends
    local = problem.num_local_experts
    active = local * (1 - (1 - 1 / local) ** rows)
    remote = 1 - 1 / problem.ep_size
    hidden, inter = problem.hidden_size, problem.intermediate_size
    fmt = activation_format(problem.quant, problem.act_format)
    row_bytes = fmt.payload_bytes(hidden) + hidden // 32
    a2_bytes = fmt.payload_bytes(inter) + inter // 32
    home_bytes = hidden + hidden // 32 if problem.transport is Transport.FP8_BLOCKWISE_1X32 else 2 * hidden
    loops = (utilisation("dispatch_gemm1", tile, problem), utilisation("gemm2_p2p", tile, problem))
    multiplied = [active * _padded(rows / max(active, 1e-9), part) for part in (tile.gemm1_block_m, tile.gemm2_block_m)]
    return Prediction(
        num_tokens=num_tokens,
        tile=tile,
        padding=1 - rows / multiplied[0] if rows else 0.0,
        stage1=Stage(
            matrix_s=_matrix_s(problem, multiplied[0] * 2 * inter * hidden, loops[0]),
            memory_s=(active * 2 * inter * hidden * _WEIGHT_BYTES + rows * (2 * row_bytes + a2_bytes))
            / MI355X.hbm_bytes_per_s,
            link_s=rows * remote * row_bytes / _rate(MI355X.link_pull_bytes_per_s),
        ),
        stage2=Stage(
            matrix_s=_matrix_s(problem, multiplied[1] * hidden * inter, loops[1]),
            memory_s=(active * hidden * inter * _WEIGHT_BYTES + rows * (a2_bytes + home_bytes))
            / MI355X.hbm_bytes_per_s,
            link_s=rows * remote * home_bytes / _rate(MI355X.link_push_bytes_per_s),
        ),
        rest_s=(num_tokens * (2 * hidden + row_bytes) + rows * home_bytes + num_tokens * 2 * hidden)
        / MI355X.hbm_bytes_per_s,
        launches_s=LAUNCHES * LAUNCH_S,
        handshake_s=HANDSHAKES * (FLAG_S + POLL_S) if problem.ep_size > 1 else HANDSHAKES * POLL_S,
        utilisation=loops,
    )


_WEIGHT_BYTES = 1 / 2 + 1 / 32  # e2m1 and its scale


def _padded(rows: float, tile_rows: int) -> float:
    return ceil_div(math.ceil(rows), tile_rows) * tile_rows


def _matrix_s(problem: MoEProblem, multiplications: float, utilisation: float) -> float:
    cycles = multiplications / MFMA_FLOPS * MFMA_CYCLES[QuantMode(problem.quant)]
    return cycles / (MI355X.num_sms * SIMDS_PER_CU) / CLOCK_HZ / utilisation


def _rate(bytes_per_s: float | None) -> float:
    assert bytes_per_s is not None
    return bytes_per_s

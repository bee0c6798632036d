"""`megamoe-rocm model`: the model's figures for every bucket of two known layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from megamoe.problem import MoEProblem, QuantMode, Transport
from megamoe_rocm.code_store import compile_launch
from megamoe_rocm.heuristics import TileConfig
from megamoe_rocm.kernels.launch import Launch
from megamoe_rocm.model.layer import Prediction, predict
from megamoe_rocm.model.main_loop import LATENCIES, utilisation
from megamoe_rocm.standard import Collector, collect

LABEL = "model, never measured"
TOKENS = (8, 128, 512, 2048, 4096, 8192, 32768)  # the buckets end at 128 and 2048
_WIDE = MoEProblem(
    hidden_size=7168,
    intermediate_size=3072,
    num_experts=384,
    top_k=6,
    ep_size=8,
    num_max_tokens_per_rank=max(TOKENS),
    quant=QuantMode.A4W4,
)
LAYERS = {
    "H=7168 I=3072, 384 experts, top-6": _WIDE,
    "DeepSeek-R1: H=7168 I=2048, 256 experts, top-8": replace(_WIDE, intermediate_size=2048, num_experts=256, top_k=8),
}


def lines() -> Iterator[str]:
    """The whole report."""
    yield f"MI355X, 8 ranks, uniform routing: {LABEL}. Times in microseconds."
    for title, layer in LAYERS.items():
        yield ""
        yield f"{title}: calls by mode and transport ({LABEL})"
        yield from _comparison(layer)
        for quant in (QuantMode.A4W4, QuantMode.A8W4):
            for transport in Transport:
                problem = replace(layer, quant=quant, transport=transport)
                yield ""
                yield f"{title}, {quant}, {transport} ({LABEL})"
                yield from _table([predict(problem, count, loop_utilisation) for count in TOKENS])


def _comparison(layer: MoEProblem) -> Iterator[str]:
    """Calls side by side, and both hand-shakes of all ranks: microseconds, and the largest share of a call."""
    problems = [
        replace(layer, quant=quant, transport=transport)
        for quant in (QuantMode.A4W4, QuantMode.A8W4)
        for transport in Transport
    ]
    modes = " | ".join(f"{problem.quant}, {problem.transport}" for problem in problems)
    yield f"| tokens | tile | {modes} | hand-shakes | at most |"
    yield "|---" * (len(problems) + 4) + "|"
    for count in TOKENS:
        rows = [predict(problem, count, loop_utilisation) for problem in problems]
        cells = [str(count), rows[0].tile.name, *(f"{row.seconds * 1e6:.0f}" for row in rows)]
        cells += [f"{rows[0].handshake_s * 1e6:.0f}", f"{max(row.handshake_s / row.seconds for row in rows):.1%}"]
        yield f"| {' | '.join(cells)} |"


def _table(rows: list[Prediction]) -> Iterator[str]:
    yield "| tokens | tile | call | stage 1 | limit | stage 2 | limit | hand-shakes | launches | padding | loops |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        share = row.handshake_s / row.seconds
        cells = [
            str(row.num_tokens),
            row.tile.name,
            f"{row.seconds * 1e6:.0f}",
            f"{row.stage1.seconds * 1e6:.0f}",
            row.stage1.limit,
            f"{row.stage2.seconds * 1e6:.0f}",
            row.stage2.limit,
            f"{row.handshake_s * 1e6:.0f} ({share:.0%})",
            f"{row.launches_s * 1e6:.0f}",
            f"{row.padding:.0%}",
            " ".join(f"{value:.2f}" for value in row.utilisation),
        ]
        yield f"| {' | '.join(cells)} |"


def loop_utilisation(kernel: str, tile: TileConfig, problem: MoEProblem) -> float:
    """Of a main loop at the worse of the two latencies."""
    made_for = (kernel, tile.name, QuantMode(problem.quant), Transport(problem.transport))
    return min(_played(*made_for, latency) for latency in LATENCIES)


@cache
def _launches(tile: str, quant: QuantMode, transport: Transport) -> dict[str, Launch]:
    problem = MoEProblem(
        hidden_size=512,
        intermediate_size=256,
        num_experts=8,
        top_k=2,
        num_max_tokens_per_rank=8,
        quant=quant,
        transport=transport,
    )
    collector = Collector()
    collect(problem, collector, config=tile)
    return {launch.kernel.__name__: launch for launch in collector.found.values()}


@cache
def _played(kernel: str, tile: str, quant: QuantMode, transport: Transport, latency: int) -> float:
    code = compile_launch(_launches(tile, quant, transport)[kernel])
    return utilisation(code, fp4=quant is QuantMode.A4W4, latency=latency)

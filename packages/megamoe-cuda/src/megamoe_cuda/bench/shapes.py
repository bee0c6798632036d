"""Suite `sm90-shapes`: layers of other models as one rank of EP8 has them, beside the peers, on one GPU.

    H=7168 I=2048, 32 local experts, top-8    DeepSeek-V3 and R1
    H=7168 I=3072, 48 local experts, top-6    DeepSeek-V4-Pro

EP1 with uniform routing: experts receive as many rows as those of a rank of EP8 do, and no row crosses a link.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megamoe.bench.results import BenchRow
from megamoe.bench.suites import Suite, SuiteOptions
from megamoe.launch import run_ranks
from megamoe.problem import MoEProblem, Transport
from megamoe_cuda.backend import CudaBackend
from megamoe_cuda.bench.rank import Measurement, measure_rank, row_of

NAME = "sm90-shapes"
TOKENS = (8, 128, 512, 2048, 8192)
UNIFORM = "uniform"
TIME_LIMIT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layer as a rank of EP8 has it."""

    hidden_size: int
    intermediate_size: int
    num_local_experts: int
    top_k: int


SHAPES = (
    Shape(hidden_size=7168, intermediate_size=2048, num_local_experts=32, top_k=8),
    Shape(hidden_size=7168, intermediate_size=3072, num_local_experts=48, top_k=6),
)


def run(options: SuiteOptions) -> Iterator[BenchRow]:
    """Measure, one shape after the other.

    Raises:
        BackendUnavailableError: no usable GPU.
    """
    for shape in SHAPES:
        measurements = list(_measurements(shape, options))
        (results,) = run_ranks(measure_rank, 1, measurements, timeout_s=TIME_LIMIT_S)
        for measurement, result in zip(measurements, results, strict=True):
            yield row_of(NAME, measurement, (result,))


def _measurements(shape: Shape, options: SuiteOptions) -> Iterator[Measurement]:
    for num_tokens in options.tokens or TOKENS:
        for transport in Transport:
            yield Measurement(
                problem=MoEProblem(
                    hidden_size=shape.hidden_size,
                    intermediate_size=shape.intermediate_size,
                    num_experts=shape.num_local_experts,
                    top_k=shape.top_k,
                    num_max_tokens_per_rank=num_tokens,
                    transport=transport,
                ),
                num_tokens=num_tokens,
                routing=UNIFORM,
                repeats=options.repeats,
                config=options.config,
                with_peers=True,
            )


def suites() -> list[Suite]:
    """What this module offers."""
    return [
        Suite(
            name=NAME,
            description="CUDA kernel: layers of DeepSeek-V3 and V4-Pro as a rank of EP8 has them, EP1, beside peers",
            backend=CudaBackend.name,
            run=run,
        )
    ]

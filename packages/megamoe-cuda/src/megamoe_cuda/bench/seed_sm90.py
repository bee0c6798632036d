"""Suite `seed-sm90`: the seed's shape, H=4096, I=2048, 32 experts per rank, top-8, from 8 to 8192 tokens per rank.

    EP8-equivalent   two GPUs whose routing gives each the rows and the remote share of a rank of EP8
    roomy            EP8-equivalent, 8 to 512 tokens in a session of capacity 8192
    EP8, EP4, EP2    as many GPUs, uniform routing; EP8 is the seed's own layer of 256 experts
    EP1              one GPU

Inputs are quantised already, as the peers take them; the time from BF16 input stands among the peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from megamoe.bench.results import BenchRow
from megamoe.bench.suites import Suite, SuiteOptions
from megamoe.errors import BackendUnavailableError
from megamoe.launch import run_ranks
from megamoe.problem import MoEProblem, Transport
from megamoe_cuda.backend import CudaBackend
from megamoe_cuda.bench.published import published
from megamoe_cuda.bench.rank import Measurement, RankResult, measure_rank, row_of

NAME = "seed-sm90"
TOKENS = (8, 128, 256, 512, 1024, 2048, 4096, 8192)
EXPERTS_PER_RANK = 32
TIME_LIMIT_S = 1800.0
EP8_EQUIVALENT = "ep8-equivalent"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Rows that one set of processes measures.

    Args:
        ep_size: ranks, one GPU each.
        routing: a name of `megamoe.bench.routing`.
        most_tokens: larger token counts are left out.
        capacity: of the session; None is the token count.
        with_peers: whether peers run beside it.
    """

    ep_size: int
    routing: str
    most_tokens: int = TOKENS[-1]
    capacity: int | None = None
    with_peers: bool = True


UNIFORM = "uniform"
UNIFORM_EP_SIZES = (8, 4, 2, 1)
SEED_EP_SIZE = 8  # of the published measurements


def settings(num_gpus: int) -> list[Setting]:
    """What a machine is measured on: uniform routing at each EP size it has GPUs for, and what stands in for EP8."""
    uniform = [Setting(ep_size=ep_size, routing=UNIFORM) for ep_size in UNIFORM_EP_SIZES if ep_size <= num_gpus]
    return [
        Setting(ep_size=2, routing=EP8_EQUIVALENT),
        Setting(ep_size=2, routing=EP8_EQUIVALENT, most_tokens=512, capacity=8192, with_peers=False),
        *uniform,
    ]


def suites() -> list[Suite]:
    """What this package offers."""
    return [
        Suite(
            name=NAME,
            description="CUDA kernel: H=4096 I=2048, 32 experts a rank, top-8, EP8-equivalent, EP1 to EP8, with peers",
            backend=CudaBackend.name,
            run=run,
        )
    ]


def run(options: SuiteOptions) -> Iterator[BenchRow]:
    """Measure; settings that need more GPUs than there are come last and end the suite.

    Raises:
        BackendUnavailableError: no usable GPU, or fewer than a setting needs.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise BackendUnavailableError(f"suite {NAME} needs a GPU", got=0, expected="1 for its EP1 rows, 2 for EP8's")
    for setting in sorted(settings(num_gpus), key=lambda setting: setting.ep_size > num_gpus):
        if setting.ep_size > num_gpus:
            raise BackendUnavailableError(
                f"the rest of suite {NAME} needs more GPUs", got=num_gpus, expected=setting.ep_size
            )
        measurements = list(_measurements(setting, options))
        results = run_ranks(measure_rank, setting.ep_size, measurements, timeout_s=TIME_LIMIT_S)
        for measurement, by_rank in zip(measurements, zip(*results, strict=True), strict=True):
            yield _row(measurement, by_rank)


def _measurements(setting: Setting, options: SuiteOptions) -> Iterator[Measurement]:
    for num_tokens in options.tokens or TOKENS:
        if num_tokens > setting.most_tokens:
            continue
        for transport in Transport:
            problem = MoEProblem(
                hidden_size=4096,
                intermediate_size=2048,
                num_experts=EXPERTS_PER_RANK * setting.ep_size,
                top_k=8,
                num_max_tokens_per_rank=setting.capacity or num_tokens,
                ep_size=setting.ep_size,
                transport=transport,
            )
            yield Measurement(
                problem=problem,
                num_tokens=num_tokens,
                routing=setting.routing,
                repeats=options.repeats,
                config=options.config,
                with_peers=setting.with_peers,  # with both transports: peers between calls change the GPU's clock
            )


def _row(measurement: Measurement, by_rank: Sequence[RankResult]) -> BenchRow:
    row = row_of(NAME, measurement, by_rank)
    is_seed_layer = measurement.routing == EP8_EQUIVALENT or measurement.problem.ep_size == SEED_EP_SIZE
    if not (is_seed_layer and measurement.with_peers):
        return row
    return replace(row, peers=row.peers | published(measurement.num_tokens))

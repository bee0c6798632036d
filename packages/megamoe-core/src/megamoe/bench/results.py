"""A benchmark's result: one JSON row, the same for every backend and suite."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from megamoe.bench.commit import current_commit
from megamoe.errors import InputError
from megamoe.problem import MoEProblem

FLOPS_PER_WEIGHT = 2  # one multiplication and one addition


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a result was made.

    Args:
        gpu: the device's name; of a CPU run, the processor's.
        num_gpus: 0 for a CPU run.
        driver: of the GPU, or empty.
        toolkit: what it was compiled with.
    """

    gpu: str
    num_gpus: int
    driver: str
    toolkit: str


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds of a call, the slowest rank's in each repeat."""

    us_median: float
    us_min: float
    us_max: float

    @classmethod
    def of(cls, seconds: Iterable[Sequence[float]]) -> Timing:
        """From each rank's seconds, one entry a repeat."""
        slowest = [max(repeat) * 1e6 for repeat in zip(*seconds, strict=True)]
        return cls(us_median=median(slowest), us_min=min(slowest), us_max=max(slowest))


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One measured configuration.

    Args:
        bench: the suite's name.
        commit: of the installed packages; see `megamoe.bench.commit`.
        date: UTC, ISO 8601.
        command: that made it.
        gpu, num_gpus, driver, toolkit: see `Machine`.
        mode: quant mode.
        transport: of the rows' way home.
        hidden_size, intermediate_size, num_experts, top_k, ep_size: of the problem.
        routing: a name of `megamoe.bench.routing`.
        capacity: num_max_tokens_per_rank of the session.
        num_tokens: per rank, in the call.
        us_median, us_min, us_max: see `Timing`.
        tflops: of a rank, in the median: the two GEMMs' useful FLOPs, padding not counted.
        workspace_mib: of a rank.
        peers: name -> median microseconds of other implementations in the same run.
    """

    bench: str
    commit: str
    date: str
    command: str
    gpu: str
    num_gpus: int
    driver: str
    toolkit: str
    mode: str
    transport: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    ep_size: int
    routing: str
    capacity: int
    num_tokens: int
    us_median: float
    us_min: float
    us_max: float
    tflops: float
    workspace_mib: float
    peers: dict[str, float] = field(default_factory=dict)

    @property
    def problem(self) -> MoEProblem:
        """What was measured, as far as a row says it."""
        return MoEProblem(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_max_tokens_per_rank=self.capacity,
            ep_size=self.ep_size,
            quant=self.mode,
            transport=self.transport,
        )

    @classmethod
    def of(
        cls,
        *,
        bench: str,
        machine: Machine,
        problem: MoEProblem,
        routing: str,
        num_tokens: int,
        timing: Timing,
        workspace_bytes: int,
        peers: dict[str, float],
    ) -> BenchRow:
        """A row of what was just measured here."""
        return cls(
            bench=bench,
            commit=current_commit(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            command=" ".join(["megamoe", *sys.argv[1:]]),
            **asdict(machine),
            mode=str(problem.quant),
            transport=str(problem.transport),
            hidden_size=problem.hidden_size,
            intermediate_size=problem.intermediate_size,
            num_experts=problem.num_experts,
            top_k=problem.top_k,
            ep_size=problem.ep_size,
            routing=routing,
            capacity=problem.num_max_tokens_per_rank,
            num_tokens=num_tokens,
            **asdict(timing),
            tflops=layer_flops(problem, num_tokens) / timing.us_median / 1e6,
            workspace_mib=workspace_bytes / 2**20,
            peers=peers,
        )


def layer_flops(problem: MoEProblem, num_tokens: int) -> int:
    """FLOPs of a rank's share of a call in which every rank brings `num_tokens` tokens and no pick is masked."""
    rows = num_tokens * problem.top_k
    return rows * FLOPS_PER_WEIGHT * 3 * problem.hidden_size * problem.intermediate_size


def write_rows(path: Path, rows: Sequence[BenchRow]) -> None:
    """Write rows as a JSON list, one row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(asdict(row)) for row in rows) + "\n]\n", encoding="utf-8")


def read_rows(path: Path) -> list[BenchRow]:
    """Rows of a results file.

    Raises:
        InputError: no list of rows; names the file, the row and the field.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"results file {path} can't be read", got=error, expected="a JSON list of rows") from error
    if not isinstance(content, list):
        raise InputError(f"results file {path} is not a list of rows", got=type(content).__name__)
    return [_row(path, index, entry) for index, entry in enumerate(content)]


def _row(path: Path, index: int, entry: Any) -> BenchRow:
    names = {each.name for each in fields(BenchRow)}
    if not isinstance(entry, dict) or entry.keys() != names:
        given = set(entry) if isinstance(entry, dict) else set()
        raise InputError(
            f"row {index} of {path} is not a result",
            got=f"missing {sorted(names - given)}, unknown {sorted(given - names)}",
            expected=f"the fields of {BenchRow.__name__}",
        )
    return BenchRow(**entry)

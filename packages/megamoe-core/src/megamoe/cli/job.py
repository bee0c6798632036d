"""The main job: one MoE layer of a checkpoint over several ranks, each with its own experts, held against the oracle.

`run_job` starts the ranks; each loads its share, opens a session, makes the calls, and compares what its experts made
with what they should have made. The caller gets numbers only.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from megamoe import env
from megamoe.backend import Backend, Capability, Plan, Session, SessionStats, StageTaps, VirtualRanks
from megamoe.checkpoint import LayerCheckpoint
from megamoe.cli.compare import Distance, compare_stages
from megamoe.cli.tokens import TokenSource
from megamoe.errors import ConfigError
from megamoe.launch import RankContext, run_ranks
from megamoe.registry import select_backend
from megamoe.symm import Group, ShmGroup
from megamoe.tensors import ExpertWeights
from megamoe.testing.data import Call

GRACE_S = 2.0  # the first failure is what is printed: the others need not wait for their timeouts


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run.

    Args:
        layer: the experts.
        plan: of the backend that runs it.
        tokens: and their routing.
        virtual_ranks: whether one process drives all ranks.
        repeats: calls; the times are medians of them.
        check: whether to compare with the oracle.
    """

    layer: LayerCheckpoint
    plan: Plan
    tokens: TokenSource
    virtual_ranks: bool = False
    repeats: int = 3
    check: bool = True


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One stage in one call: rows, bytes moved, seconds."""

    rows: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank has to say.

    Args:
        weight_bytes: bytes of its experts.
        load_s: seconds that reading and converting them took.
        prepare_s: seconds that bringing them into the kernels' layout took.
        warmup_s: seconds of compiling.
        call_s: seconds of each call.
        stages: of the last call, by name; empty where the backend measures none.
        received_rows: rows that its experts received in the last call.
        dropped_ids: ids that name no expert, over all calls.
        distances: from the oracle, by stage.
    """

    weight_bytes: int
    load_s: float
    prepare_s: float
    warmup_s: float
    call_s: tuple[float, ...]
    stages: dict[str, StageRow]
    received_rows: int
    dropped_ids: int
    distances: dict[str, Distance] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """Reports of all ranks, the whole output, and how far it is from the oracle (None: not checked)."""

    reports: list[RankReport]
    output: list[Tensor]
    distance: Distance | None

    @property
    def call_s(self) -> float:
        """Seconds of a call: the slowest rank's, the median of the repeats."""
        return float(median(max(times) for times in zip(*(report.call_s for report in self.reports))))


def run_job(job: Job, *, time_limit_s: float, on_report: Callable[[int, Any], None] | None = None) -> JobResult:
    """Start the ranks and wait for them.

    Args:
        job: what to run.
        time_limit_s: for all of it.
        on_report: called with (rank, (what, done, total)) for progress bars.
    """
    ep_size = job.plan.problem.ep_size
    with tempfile.TemporaryDirectory(prefix="megamoe-run") as directory:
        results = Path(directory)
        processes = 1 if job.virtual_ranks else ep_size
        reports = run_ranks(
            _run_ranks, processes, job, results, timeout_s=time_limit_s, grace_s=GRACE_S, on_report=on_report
        )
        output = [load_file(results / f"output-{rank}.safetensors")["output"] for rank in range(ep_size)]
        distance = _distance(results, output) if job.check else None
    return JobResult(reports=[report for part in reports for report in part], output=output, distance=distance)


def _distance(results: Path, output: Sequence[Tensor]) -> Distance:
    """Of the output from the sum of what the ranks' experts should have added to it."""
    total = Distance()
    for rank, y in enumerate(output):
        expected = torch.zeros(y.shape)
        for owner in range(len(output)):
            expected += load_file(results / f"expected-{owner}-{rank}.safetensors")["expected"]
        total += Distance.between(y, expected)
    return total


def _run_ranks(context: RankContext, job: Job, results: Path) -> list[RankReport]:
    """A rank's process: its own rank, or all of them if they are virtual."""
    problem = job.plan.problem
    backend = select_backend(job.plan.backend, problem)
    ranks = range(problem.ep_size) if job.virtual_ranks else (context.rank,)
    device = _device(context, job)
    loaded = [_load(context, job, rank, device) for rank in ranks]
    weights = [experts for experts, _ in loaded]
    calls = [_to(job.tokens.call(rank), device) for rank in ranks]
    group = _join(context, job)
    try:
        with backend.open(job.plan, group) as session:
            started = time.perf_counter()
            prepared = [session.prepare(experts) for experts in weights]
            prepare_s = time.perf_counter() - started
            arguments = tuple(
                _pack(column, job.virtual_ranks)
                for column in (
                    [call.hidden_states for call in calls],
                    [call.topk_ids for call in calls],
                    [call.topk_weights for call in calls],
                    prepared,
                )
            )
            measured = _make_calls(context, job, session, arguments)
            taps = _taps(backend, session, arguments, job.virtual_ranks) if job.check else []
    finally:
        if isinstance(group, Group):
            group.close()
    reports = []
    for index, rank in enumerate(ranks):
        save_file({"output": measured.output[index].cpu()}, results / f"output-{rank}.safetensors")
        distances: dict[str, Distance] = {}
        if job.check:
            expected, distances = compare_stages(
                problem,
                rank,
                weights[index],
                [_to(job.tokens.call(src_rank), device) for src_rank in range(problem.ep_size)],
                taps[index] if taps else None,
                on_expert=lambda done: context.report(("oracle", done, problem.num_local_experts)),
            )
            for src_rank, rows in enumerate(expected):
                save_file({"expected": rows.cpu()}, results / f"expected-{rank}-{src_rank}.safetensors")
        reports.append(
            replace(
                measured.reports[index],
                weight_bytes=sum(tensor.nbytes for _, tensor in weights[index].tensors()),
                load_s=loaded[index][1],
                prepare_s=prepare_s,
                distances=distances,
            )
        )
    return reports


def _load(context: RankContext, job: Job, rank: int, device: torch.device) -> tuple[ExpertWeights, float]:
    """A rank's experts on its device, and the seconds that it took."""
    problem = job.plan.problem
    first, count = problem.first_expert(rank), problem.num_local_experts
    started = time.perf_counter()
    weights = job.layer.load_experts(
        range(first, first + count),
        problem.quant,
        on_expert=lambda done: context.report(("load", done, count)),
    )
    moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in weights.tensors()}
    return replace(weights, **moved), time.perf_counter() - started


@dataclass(frozen=True, kw_only=True)
class _Measured:
    output: list[Tensor]
    reports: list[RankReport]


def _make_calls(context: RankContext, job: Job, session: Session, arguments: tuple[Any, ...]) -> _Measured:
    """The timed calls, and what the session counted in the last one."""
    many = job.virtual_ranks
    warmup_s = session.warmup()
    call_s = []
    context.report(("calls", 0, job.repeats))
    for repeat in range(job.repeats):
        before = [_copy(stats) for stats in _unpack(session.stats(), many)]
        started = time.perf_counter()
        output = session.forward(*arguments)
        session.check()  # synchronises
        call_s.append(time.perf_counter() - started)
        context.report(("calls", repeat + 1, job.repeats))
    counts = _unpack(session.receive_counts(), many)
    reports = [
        RankReport(
            weight_bytes=0,
            load_s=0.0,
            prepare_s=0.0,
            warmup_s=warmup_s,
            call_s=tuple(call_s),
            stages=_stages(first, last),
            received_rows=int(received.sum()),
            dropped_ids=last.dropped_ids,
        )
        for first, last, received in zip(before, _unpack(session.stats(), many), counts, strict=True)
    ]
    return _Measured(output=_unpack(output, many), reports=reports)


def _taps(backend: Backend, session: Session, arguments: tuple[Any, ...], many: bool) -> list[StageTaps | None]:
    """What stood between the stages in one more call, where the backend can show it; keeping it takes time."""
    if Capability.STAGE_TAPS not in backend.capabilities():
        return []
    session.keep_taps()
    session.forward(*arguments)
    return _unpack(session.taps(), many)


def _stages(before: SessionStats, after: SessionStats) -> dict[str, StageRow]:
    """Each stage's share of the counters since `before`."""
    return {
        name: StageRow(
            rows=after.stage_rows.get(name, 0) - before.stage_rows.get(name, 0),
            num_bytes=after.stage_bytes.get(name, 0) - before.stage_bytes.get(name, 0),
            seconds=after.stage_seconds.get(name, 0.0) - before.stage_seconds.get(name, 0.0),
        )
        for name in after.stage_seconds | after.stage_rows | after.stage_bytes
    }


def _copy(stats: SessionStats) -> SessionStats:
    return replace(
        stats,
        stage_seconds=dict(stats.stage_seconds),
        stage_rows=dict(stats.stage_rows),
        stage_bytes=dict(stats.stage_bytes),
    )


def _device(context: RankContext, job: Job) -> torch.device:
    if job.plan.device.arch == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(context.gpu)
    return context.gpu


def _join(context: RankContext, job: Job) -> Any:
    """The group argument of `Backend.open`."""
    if job.virtual_ranks:
        return VirtualRanks()
    if context.world_size == 1:
        return None
    if job.plan.device.arch == "cpu":
        return ShmGroup.connect(context.name, context.rank, context.world_size, timeout_s=env.timeout_s())
    context.join_gpus(context.gpu)
    return dist.group.WORLD


def check_devices(plan: Plan, virtual_ranks: bool) -> None:
    """Raise ConfigError where this machine has fewer GPUs than the plan has ranks."""
    if plan.device.arch == "cpu":
        return
    ranks = 1 if virtual_ranks else plan.problem.ep_size
    needed, there = -(-ranks // env.ranks_per_gpu()), torch.cuda.device_count()
    if there < needed:
        raise ConfigError(
            "fewer GPUs than ranks",
            got=f"{there} GPUs",
            expected=f"{needed}",
            hint="lower --ep, or let one GPU play all ranks with --virtual-ranks",
        )


def _to(call: Call, device: torch.device) -> Call:
    assert isinstance(call.hidden_states, Tensor)
    return replace(
        call,
        hidden_states=call.hidden_states.to(device),
        topk_ids=call.topk_ids.to(device),
        topk_weights=call.topk_weights.to(device),
    )


def _pack(values: list[Any], many: bool) -> Any:
    return values if many else values[0]


def _unpack(values: Any, many: bool) -> list[Any]:
    return list(values) if many else [values]

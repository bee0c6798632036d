"""`megamoe run`: one MoE layer of a real checkpoint over several ranks, checked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from safetensors.torch import save_file

from megamoe import env
from megamoe.backend import Plan
from megamoe.bench.routing import ROUTING_NAMES, routing
from megamoe.checkpoint import LayerCheckpoint, StoredLayer, TensorFiles, conversion, find_layer
from megamoe.checkpoint.convert import STORED_AS
from megamoe.cli.compare import Distance
from megamoe.cli.console import (
    EXIT_FAILED,
    RankProgress,
    bytes_text,
    check_writable,
    command,
    err,
    out,
    say,
    seconds_text,
)
from megamoe.cli.job import Job, JobResult, StageRow, check_devices, run_job
from megamoe.cli.tokens import FROM_ROUTER, InputFile, TokenSource, parse_tokens, spread
from megamoe.errors import ConfigError, InputError
from megamoe.problem import MoEProblem, QuantMode, Transport
from megamoe.registry import select_backend
from megamoe.testing.tolerances import oracle_gate

DEFAULT_TOKENS = "128"
ROCM = "rocm"
STAGES = ("quantize_input", "route", "dispatch", "gemm1", "swiglu_quant", "gemm2", "p2p", "combine")  # in their order
MAX_SEED = 2**40  # every rank's generator takes a seed of its own from it, in 63 bits


@command
def run(
    checkpoint: Annotated[
        list[Path],
        typer.Option(help="Safetensors file, index file or directory.", metavar="FILE...", show_default=False),
    ],
    more_files: Annotated[
        list[Path] | None,
        typer.Argument(help="More files of the checkpoint, as in --checkpoint model-*.safetensors", metavar="FILE"),
    ] = None,
    layer: Annotated[int, typer.Option(help="Which layer.", min=0)] = 0,
    ep: Annotated[int, typer.Option(help="Ranks that share the experts, a process each.", min=1)] = 1,
    mode: Annotated[str | None, typer.Option(help="bf16, a8w8, a8w4 or a4w4; default: as stored.")] = None,
    backend: Annotated[str, typer.Option(help="auto, reference, cuda, rocm, or another installed one.")] = "auto",
    device: Annotated[
        str | None, typer.Option(help="Where rocm runs: gfx950, or to rehearse nvidia, interpreter, isa.")
    ] = None,
    transport: Annotated[str, typer.Option(help="bf16 or fp8_blockwise_1x32.")] = Transport.BF16.value,
    act_format: Annotated[str | None, typer.Option(help="Of a8w4: mxfp8 or fp8_1x128.")] = None,
    tokens: Annotated[
        str | None, typer.Option(help=f"Tokens per rank, or one number a rank, as 64,0,7,512. [{DEFAULT_TOKENS}]")
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option("--input", help="Safetensors file with hidden_states and, or not, topk_ids and topk_weights."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Safetensors file to write the layer's output to.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts per token; default: config.json's.", min=1)] = None,
    routing_name: Annotated[
        str, typer.Option("--routing", help=" | ".join((*ROUTING_NAMES, f"{FROM_ROUTER} (the checkpoint's own)")))
    ] = "uniform",
    seed: Annotated[int, typer.Option(help="Of tokens and routing.", min=0, max=MAX_SEED)] = 0,
    config: Annotated[str | None, typer.Option(help="A configuration of the backend, by name.")] = None,
    repeats: Annotated[int, typer.Option(help="Calls; the time is their median.", min=1)] = 3,
    check: Annotated[bool, typer.Option(help="Compare with the FP32 oracle.")] = True,
    virtual_ranks: Annotated[
        bool, typer.Option("--virtual-ranks", help="One process, and one GPU, plays all ranks.")
    ] = False,
    time_limit: Annotated[float, typer.Option(help="Seconds for everything.", min=1)] = 3600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Run one MoE layer of a checkpoint over --ep ranks, each with its own experts only.

    Prints rows, bytes and time of each stage, and the distance from the FP32 oracle. Exit code 1 if that is above the
    mode's gate, 2 for bad input.
    """
    stored = find_layer(TensorFiles.find([*checkpoint, *(more_files or [])]), layer)
    if output is not None:
        _check_output(output, stored)
    if routing_name != FROM_ROUTER:
        routing(routing_name, also=(FROM_ROUTER,))
    source = None if input_file is None else InputFile.open(input_file)
    if source is not None and tokens is not None:
        raise ConfigError("--tokens and --input exclude each other", hint="the file says how many tokens there are")
    counts = parse_tokens(tokens or DEFAULT_TOKENS, ep) if source is None else spread(source.num_tokens, ep)
    problem = make_problem(
        stored,
        ep_size=ep,
        quant=mode,
        transport=transport,
        act_format=act_format,
        top_k=top_k or (source.top_k if source else None),
        num_max_tokens=max(1, *counts),
    )
    if source is not None:
        _check_input(source, problem)
        if source.dtype != "BF16":
            note = f"hidden_states of {source.path} are {source.dtype}: rounded to BF16, which calls take"
            err.print(note, markup=False, soft_wrap=True)
    if device is not None:
        backend = _set_device(device, backend)
    chosen = select_backend(backend, problem)
    plan = chosen.plan(problem, config=config)
    check_devices(plan, virtual_ranks)
    check_rehearsal(plan, virtual_ranks)
    job = Job(
        layer=stored,
        plan=plan,
        tokens=TokenSource(
            problem=problem, num_tokens=counts, routing=routing_name, seed=seed, file=source, layer=stored
        ),
        virtual_ranks=virtual_ranks,
        repeats=repeats,
        check=check,
    )
    with RankProgress() as progress:
        result = run_job(job, time_limit_s=time_limit, on_report=progress.report)
    if output is not None:
        _save(output, job, result)
    failures = gate_failures(problem, result.distance)
    if as_json:
        out.print_json(json.dumps(_as_json(job, result, failures)))
    else:
        _print(job, result, failures)
    if failures:
        raise typer.Exit(EXIT_FAILED)


def make_problem(
    layer: LayerCheckpoint,
    *,
    ep_size: int,
    quant: str | None,
    transport: str,
    act_format: str | None,
    top_k: int | None,
    num_max_tokens: int,
) -> MoEProblem:
    """The problem that a checkpoint's layer poses.

    Raises:
        ConfigError: top_k is neither given nor in config.json, or sizes that contradict each other.
    """
    stored = layer.stored
    if top_k is None:
        top_k = layer.files.config.get("num_experts_per_tok")
    if not isinstance(top_k, int):
        raise ConfigError(
            "nothing says how many experts a token has", hint="give --top-k, or a config.json with num_experts_per_tok"
        )
    require_distinct_picks(top_k, stored.num_experts)
    return MoEProblem(
        hidden_size=stored.hidden_size,
        intermediate_size=stored.intermediate_size,
        num_experts=stored.num_experts,
        top_k=top_k,
        num_max_tokens_per_rank=num_max_tokens,
        ep_size=ep_size,
        quant=quant or STORED_AS[stored.weights],
        transport=transport,
        activation=stored.activation,
        swiglu_limit=stored.swiglu_limit,
        expert_bias=stored.expert_bias,
        act_format=act_format,
    )


def require_distinct_picks(top_k: int, num_experts: int) -> None:
    """Raise ConfigError for more picks than experts: a call takes an expert twice, but no router makes such a call."""
    if top_k > num_experts:
        raise ConfigError("more picks than experts", got=f"top_k {top_k}", expected=f"at most {num_experts}")


def _set_device(device: str, backend: str) -> str:
    """Choose where rocm runs; returns its name, since a device that no backend looks at would be passed over."""
    if backend not in ("auto", ROCM):
        raise ConfigError(
            "--device says where backend rocm runs", got=f"--backend {backend}", expected="--backend rocm"
        )
    env.set_rocm_device(device)
    return ROCM


def check_rehearsal(plan: Plan, virtual_ranks: bool) -> None:
    """Raise ConfigError, before ranks are started, where one process has to play all of them."""
    if plan.backend == ROCM and env.rocm_device() == "isa" and not virtual_ranks:
        raise ConfigError("the instruction interpreter runs all ranks in one process", hint="add --virtual-ranks")


def _check_output(output: Path, layer: LayerCheckpoint) -> None:
    check_writable(output, "--output")
    if output.resolve() in {file.resolve() for file in layer.files.where.values()}:
        raise ConfigError("--output would replace a file of the checkpoint", got=output, hint="name another file")


def _check_input(source: InputFile, problem: MoEProblem) -> None:
    if source.hidden_size != problem.hidden_size:
        raise InputError(
            f"the tokens of {source.path} are not this layer's",
            got=f"hidden size {source.hidden_size}",
            expected=f"{problem.hidden_size}",
        )
    if source.top_k is not None and source.top_k != problem.top_k:
        raise InputError(
            f"--top-k contradicts {source.path}", got=problem.top_k, expected=f"{source.top_k}, as topk_ids has"
        )


def gate_failures(problem: MoEProblem, distance: Distance | None) -> list[str]:
    """What is above the mode's gate, in words; nothing where it was not checked."""
    if distance is None:
        return []
    gate, failures = oracle_gate(problem), []
    if not distance.rel_l2 < gate.rel_l2:
        failures.append(f"relL2 {distance.rel_l2:.4g} is not below {gate.rel_l2:g}")
    if gate.calc_diff is not None and not distance.calc_diff < gate.calc_diff:
        failures.append(f"calc_diff {distance.calc_diff:.4g} is not below {gate.calc_diff:g}")
    return failures


def _save(path: Path, job: Job, result: JobResult) -> None:
    """The output of all ranks in order, with the routing that it was made with."""
    calls = [job.tokens.call(rank) for rank in range(len(result.output))]
    tensors = {
        "output": torch.cat(result.output),
        "topk_ids": torch.cat([call.topk_ids for call in calls]),
        "topk_weights": torch.cat([call.topk_weights for call in calls]),
    }
    save_file(tensors, path)


def stage_totals(result: JobResult) -> dict[str, StageRow]:
    """Stages of all ranks together, in the pipeline's order: rows and bytes summed, the slowest rank's seconds."""
    names = in_order(name for report in result.reports for name in report.stages)
    rows = {name: [report.stages.get(name, StageRow()) for report in result.reports] for name in names}
    return {
        name: StageRow(
            rows=sum(row.rows for row in of_ranks),
            num_bytes=sum(row.num_bytes for row in of_ranks),
            seconds=max(row.seconds for row in of_ranks),
        )
        for name, of_ranks in rows.items()
    }


def in_order(names: Iterable[str]) -> list[str]:
    """Names of stages, each once, as a row goes through them; a rank without rows has not been through all."""
    return sorted(dict.fromkeys(names), key=lambda name: STAGES.index(name) if name in STAGES else len(STAGES))


def stage_distances(result: JobResult) -> dict[str, Distance]:
    """Distances of all ranks together; the output's stands at its stage, combine."""
    totals: dict[str, Distance] = {}
    for report in result.reports:
        for name, distance in report.distances.items():
            totals[name] = totals.get(name, Distance()) + distance
    if result.distance is not None:
        totals["combine"] = result.distance
    return totals


def _print(job: Job, result: JobResult, failures: list[str]) -> None:
    problem, stored = job.plan.problem, job.layer.stored
    say(f"[bold]{stored.prefix}[/] ({stored.naming}): {_sizes(stored)}, top-{problem.top_k}")
    say(f"weights: {conversion(stored.weights, QuantMode(problem.quant))}")
    say(
        f"backend: {job.plan.backend}, configuration {job.plan.config.name}, mode {problem.quant}, "
        f"transport {problem.transport}, EP{problem.ep_size}"
    )
    out.print(_rank_table(job, result))
    out.print(_stage_table(result))
    if not stage_totals(result) and any(report.received_rows for report in result.reports):
        say(f"backend {job.plan.backend} counts no rows, bytes or times of its stages")
    dropped = sum(report.dropped_ids for report in result.reports) // job.repeats
    if dropped:
        say(f"[bold yellow]dropped[/] in each call: {dropped} ids that are no expert's, neither -1 nor below the count")
    for failure in failures:
        say(f"[bold red]FAIL[/] {failure}")
    distance = result.distance
    if distance is not None and not failures:
        gate = oracle_gate(problem)
        limit = "" if gate.calc_diff is None else f" (gate {gate.calc_diff:g})"
        say(
            f"[bold green]PASS[/] relL2 {distance.rel_l2:.4g} (gate {gate.rel_l2:g}), "
            f"calc_diff {distance.calc_diff:.3g}{limit} against the FP32 oracle"
        )


def _sizes(stored: StoredLayer) -> str:
    return f"H={stored.hidden_size} I={stored.intermediate_size}, {stored.num_experts} experts"


def _rank_table(job: Job, result: JobResult) -> Table:
    table = Table("rank", "experts", "weights", "loaded in", "tokens", "rows received", "call")
    for column in table.columns[2:]:
        column.justify = "right"
    problem = job.plan.problem
    for rank, report in enumerate(result.reports):
        first = problem.first_expert(rank)
        table.add_row(
            str(rank),
            f"{first}-{first + problem.num_local_experts - 1}",
            bytes_text(report.weight_bytes),
            seconds_text(report.load_s),
            str(job.tokens.num_tokens[rank]),
            str(report.received_rows),
            seconds_text(sorted(report.call_s)[len(report.call_s) // 2]),
        )
    return table


def _stage_table(result: JobResult) -> Table:
    table = Table("stage", "rows", "bytes", "time", "relL2 to oracle")
    for column in table.columns[1:]:
        column.justify = "right"
    totals, distances = stage_totals(result), stage_distances(result)
    for name in in_order(totals | distances):
        row, distance = totals.get(name), distances.get(name)
        counted = ("", "", "") if row is None else (str(row.rows), bytes_text(row.num_bytes), seconds_text(row.seconds))
        table.add_row(name, *counted, "" if distance is None else f"{distance.rel_l2:.2e}")
    table.add_section()
    table.add_row("the call", "", "", seconds_text(result.call_s), "")
    return table


def _as_json(job: Job, result: JobResult, failures: list[str]) -> dict[str, Any]:
    distance = result.distance
    problem: dict[str, Any] = {
        name: str(value) if isinstance(value, str) else value for name, value in vars(job.plan.problem).items()
    }
    return {
        "naming": job.layer.stored.naming,
        "prefix": job.layer.stored.prefix,
        "weights": conversion(job.layer.stored.weights, QuantMode(job.plan.problem.quant)),
        "backend": job.plan.backend,
        "config": job.plan.config.name,
        "problem": problem,
        "num_tokens": list(job.tokens.num_tokens),
        "routing": "file" if job.tokens.file and job.tokens.file.top_k else job.tokens.routing,
        "seed": job.tokens.seed,
        "call_s": result.call_s,
        "stages": {name: asdict(row) for name, row in stage_totals(result).items()},
        "stage_rel_l2": {name: _finite(value.rel_l2) for name, value in stage_distances(result).items()},
        "ranks": [
            {key: value for key, value in asdict(report).items() if key not in ("stages", "distances")}
            for report in result.reports
        ],
        "rel_l2": None if distance is None else _finite(distance.rel_l2),
        "calc_diff": None if distance is None else _finite(distance.calc_diff),
        "passed": None if distance is None else not failures,
        "failures": failures,
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity; `failures` says it in words."""
    return value if math.isfinite(value) else None

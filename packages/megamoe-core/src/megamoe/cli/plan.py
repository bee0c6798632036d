"""`megamoe plan`: memory, limits and predicted time of a problem, on any machine."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from megamoe.backend import Plan
from megamoe.bench.roofline import weight_bytes
from megamoe.checkpoint import TensorFiles, find_layer
from megamoe.cli.console import bytes_text, command, out, say
from megamoe.cli.prediction import predict_on_paper, predict_plan, print_prediction, why_not
from megamoe.cli.run import make_problem, require_distinct_picks
from megamoe.errors import BackendUnavailableError, ConfigError, NoBackendError
from megamoe.problem import Activation, MoEProblem, Transport
from megamoe.registry import REFERENCE, candidates, load


@command
def plan(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="May be given several times; default: all that are installed, the reference if no other can."
        ),
    ] = None,
    checkpoint: Annotated[
        list[Path] | None, typer.Option(help="Take the sizes from a checkpoint's layer instead of options.")
    ] = None,
    layer: Annotated[int, typer.Option(help="Which layer of the checkpoint.", min=0)] = 0,
    hidden: Annotated[int | None, typer.Option(help="H, elements of a token.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="I, elements after the activation.")] = None,
    experts: Annotated[int | None, typer.Option(help="Experts of the layer.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts per token.")] = None,
    tokens: Annotated[int, typer.Option(help="Capacity: most tokens per rank in a call.")] = 8192,
    ep: Annotated[int, typer.Option(help="Ranks that share the experts.")] = 8,
    mode: Annotated[str | None, typer.Option(help="bf16, a8w8, a8w4 or a4w4; default: a8w8, or as stored.")] = None,
    transport: Annotated[str, typer.Option(help="bf16 or fp8_blockwise_1x32.")] = Transport.BF16.value,
    activation: Annotated[str, typer.Option(help="swiglu or swiglu_oai.")] = Activation.SWIGLU.value,
    swiglu_limit: Annotated[float | None, typer.Option(help="Clamp of the activation's inputs.")] = None,
    expert_bias: Annotated[bool, typer.Option("--expert-bias", help="Experts have biases.")] = False,
    act_format: Annotated[str | None, typer.Option(help="Of a8w4: mxfp8 or fp8_1x128.")] = None,
    config: Annotated[str | None, typer.Option(help="A configuration of the backend, by name.")] = None,
    moe_layers: Annotated[int, typer.Option(help="MoE layers of the model, which share the workspace.", min=1)] = 1,
    simulate: Annotated[bool, typer.Option("--simulate", help="Predict the time of calls, from the schedule.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show settings, arrays, and with --simulate larger groups on paper.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show what a session would allocate and how it would run. Needs no GPU and allocates nothing."""
    if checkpoint:
        found = find_layer(TensorFiles.find(checkpoint), layer)
        problem = make_problem(
            found,
            ep_size=ep,
            quant=mode,
            transport=transport,
            act_format=act_format,
            top_k=top_k,
            num_max_tokens=tokens,
        )
    else:
        sizes = _sizes(hidden, intermediate, experts, top_k)
        require_distinct_picks(sizes["top_k"], sizes["num_experts"])
        problem = MoEProblem(
            **sizes,
            num_max_tokens_per_rank=tokens,
            ep_size=ep,
            quant=mode or "a8w8",
            transport=transport,
            activation=activation,
            swiglu_limit=swiglu_limit,
            expert_bias=expert_bias,
            act_format=act_format,
        )
    plans, refusals = make_plans(problem, backend, config)
    if as_json:
        reports = [_as_json(each) | (_simulated(each) if simulate else {}) for each in plans]
        out.print_json(json.dumps({"plans": reports, "refusals": refusals}))
    else:
        for each in plans:
            _print_memory(each, moe_layers)
            if simulate:
                print_prediction(each, on_paper=verbose)
            if verbose:
                _print_settings(each)
                _print_workspace(each)
        for name, why in refusals.items():
            say(f"[bold]{name}[/] can't run this: {escape(why)}")
    if not plans:
        raise NoBackendError("no backend can run this problem", hint="the output says why")


def _sizes(hidden: int | None, intermediate: int | None, experts: int | None, top_k: int | None) -> dict[str, Any]:
    """What a checkpoint would say, as fields of `MoEProblem`."""
    options = {"--hidden": hidden, "--intermediate": intermediate, "--experts": experts, "--top-k": top_k}
    missing = [option for option, value in options.items() if value is None]
    if missing:
        raise ConfigError("sizes are missing", hint=f"give {', '.join(missing)}, or --checkpoint")
    return {"hidden_size": hidden, "intermediate_size": intermediate, "num_experts": experts, "top_k": top_k}


def make_plans(problem: MoEProblem, names: list[str] | None, config: str | None) -> tuple[list[Plan], dict[str, str]]:
    """Plans of the backends that support `problem`, and what the others say.

    Without names the reference's is left out where another backend has one: nobody plans a CPU's memory then.

    Raises:
        BackendUnavailableError: a backend of that name is not installed, or does not import.
        ConfigError: a backend that was asked for by name has no configuration of that name for the problem.
    """
    plans, refusals = [], {}
    for name in names or [candidate.name for candidate in candidates() if candidate.backend is not None]:
        candidate = load(name)
        if candidate.backend is None:
            verdict = candidate.verdict
            raise BackendUnavailableError(f"backend {name} can't be asked ({verdict.reason}): {verdict.detail}")
        verdict = candidate.backend.supports(problem)
        if not verdict.ok:
            refusals[name] = f"{verdict.reason}: {verdict.detail}"
            continue
        try:
            plans.append(candidate.backend.plan(problem, config=config))
        except ConfigError as error:
            if names:
                raise
            refusals[name] = str(error)  # the name is another backend's configuration
    if not names and any(plan.backend != REFERENCE for plan in plans):
        plans = [plan for plan in plans if plan.backend != REFERENCE]
    return plans, refusals


def _print_memory(plan: Plan, moe_layers: int) -> None:
    """What a rank needs: the sum first, then its parts."""
    weights, biases = weight_bytes(plan.problem), ", biases left out" if plan.problem.expert_bias else ""
    say(f"[bold]{plan.backend}[/] on {plan.device.name}, configuration {plan.config.name}")
    layers = "one MoE layer" if moe_layers == 1 else f"{moe_layers} MoE layers"
    say(f"memory of a rank: [bold]{bytes_text(moe_layers * weights + plan.bytes)}[/] with {layers}")
    say(f"  experts: {bytes_text(weights)} a layer ({plan.problem.num_local_experts} of them{biases})")
    symmetric = bytes_text(plan.workspace.symmetric_bytes)
    say(f"  workspace: {bytes_text(plan.bytes)} for all layers ({symmetric} of it symmetric)")


def _print_settings(plan: Plan) -> None:
    settings = Table("setting", "value", title="configuration", title_justify="left")
    for field in fields(plan.config):
        if field.name != "name":
            settings.add_row(field.name, escape(_text(getattr(plan.config, field.name))))
    out.print(settings)


def _print_workspace(plan: Plan) -> None:
    table = Table("array", "section", "shape", "bytes", title="workspace of a rank", title_justify="left")
    table.columns[-1].justify = "right"
    for name, section, shape, num_bytes in plan.workspace.breakdown():
        table.add_row(name, section, shape, bytes_text(num_bytes))
    table.add_section()
    table.add_row("symmetric", "", "", bytes_text(plan.workspace.symmetric_bytes))
    table.add_row("local", "", "", bytes_text(plan.workspace.local_bytes))
    table.add_row("total", "", "", bytes_text(plan.bytes))
    out.print(table)


def _text(value: Any) -> str:
    """A setting for people: of tiles and rings a line each, with what is not as by default."""
    if isinstance(value, tuple):
        return "\n".join(map(_text, value))
    if not is_dataclass(value):
        return str(value)
    shown = (field for field in fields(value) if getattr(value, field.name) != field.default)
    return ", ".join(f"{field.name} {getattr(value, field.name)}" for field in shown)


def _as_json(plan: Plan) -> dict[str, Any]:
    return {
        "backend": plan.backend,
        "device": plan.device.name,
        "config": {name: _plain(value) for name, value in asdict(plan.config).items()},
        "problem": {name: _plain(value) for name, value in vars(plan.problem).items()},
        "weight_bytes": weight_bytes(plan.problem),
        "bytes": plan.bytes,
        "symmetric_bytes": plan.workspace.symmetric_bytes,
        "local_bytes": plan.workspace.local_bytes,
        "workspace": [
            {"array": name, "section": section, "shape": shape, "bytes": num_bytes}
            for name, section, shape, num_bytes in plan.workspace.breakdown()
        ],
    }


def _simulated(plan: Plan) -> dict[str, Any]:
    reason = why_not(plan)
    if reason is not None:
        return {"prediction": None, "no_prediction": reason}
    paper = [call.as_json() for call in predict_on_paper(plan)]
    return {"prediction": [call.as_json() for call in predict_plan(plan)], "on_paper": paper}


def _plain(value: Any) -> Any:
    """What JSON can hold."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | None) else str(value)

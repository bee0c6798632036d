"""`megamoe-cuda`: compile kernels ahead of time and carry them to other machines, without a GPU; trace a call, with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from megamoe import env
from megamoe.bench.routing import ROUTING_NAMES
from megamoe.bench.routing import routing as named_routing
from megamoe.cli.console import check_writable, command, make_folder
from megamoe.errors import ConfigError
from megamoe.problem import ActFormat, MoEProblem, QuantMode
from megamoe.schedule.device_spec import H200
from megamoe_cuda.aot import Build, builds, complaints, standard_builds
from megamoe_cuda.backend import CudaBackend
from megamoe_cuda.jit.cache import KernelCache
from megamoe_cuda.jit.compiler import CompiledKernel
from megamoe_cuda.jit.store import load_or_compile

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
cache_app = typer.Typer(no_args_is_help=True, help="Compiled kernels on disk: $MEGAMOE_CACHE_DIR, or ~/.cache/megamoe.")
app.add_typer(cache_app, name="cache")


@app.command("compile")
@command
def compile_command(
    context: typer.Context,
    hidden: Annotated[int | None, typer.Option(help="H, elements of a token; without it, a standard list.")] = None,
    intermediate: Annotated[int, typer.Option(help="I, elements after the activation.")] = 2048,
    experts: Annotated[int, typer.Option(help="Experts of the layer.")] = 256,
    top_k: Annotated[int, typer.Option(help="Experts per token.")] = 8,
    tokens: Annotated[int, typer.Option(help="Capacity: most tokens per rank in a call.")] = 8192,
    ep: Annotated[int, typer.Option(help="Ranks that share the experts.")] = 8,
    mode: Annotated[str, typer.Option(help="a8w8, bf16 or a8w4 (with fp8_1x128 activations).")] = "a8w8",
    transport: Annotated[str, typer.Option(help="bf16 or fp8_blockwise_1x32.")] = "bf16",
    activation: Annotated[str, typer.Option(help="swiglu or swiglu_oai.")] = "swiglu",
    swiglu_limit: Annotated[float | None, typer.Option(help="Clamp of the activation's inputs.")] = None,
    expert_bias: Annotated[bool, typer.Option("--expert-bias", help="Experts have biases.")] = False,
    virtual_ranks: Annotated[bool, typer.Option("--virtual-ranks", help="One GPU plays all ranks.")] = False,
    num_sms: Annotated[int, typer.Option(help="SMs that the kernel takes.", min=1)] = H200.num_sms,
    config: Annotated[str | None, typer.Option(help="A configuration of the backend, by name.")] = None,
) -> None:
    """Compile kernels into the cache and report what they take; exit 1 where one is over its budget."""
    if hidden is None:
        _require_no_options(context)
        wanted: Iterable[Build] = standard_builds()
    else:
        problem = MoEProblem(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_experts=experts,
            top_k=top_k,
            num_max_tokens_per_rank=tokens,
            ep_size=ep,
            quant=mode,
            act_format=ActFormat.FP8_1X128 if mode == QuantMode.A8W4 else None,
            transport=transport,
            activation=activation,
            swiglu_limit=swiglu_limit,
            expert_bias=expert_bias,
        )
        CudaBackend().require(problem)
        wanted = builds(problem, config=config, virtual=virtual_ranks, num_sms=num_sms)
    over_budget = [name for name, found in map(_compile_and_report, wanted) if found]
    if over_budget:
        typer.echo(f"{len(over_budget)} kernels are over their budget")
        raise typer.Exit(1)


@app.command("trace")
@command
def trace_command(
    output: Annotated[Path, typer.Argument(help="File to write, for `megamoe trace`.")],
    tokens: Annotated[int, typer.Option(help="Tokens per rank, and the capacity.")] = 512,
    ep: Annotated[int, typer.Option(help="Ranks that share the experts, one GPU each.")] = 1,
    hidden: Annotated[int, typer.Option(help="H, elements of a token.")] = 4096,
    intermediate: Annotated[int, typer.Option(help="I, elements after the activation.")] = 2048,
    experts: Annotated[int | None, typer.Option(help="Experts of the layer; default: 32 a rank.")] = None,
    top_k: Annotated[int, typer.Option(help="Experts per token.")] = 8,
    transport: Annotated[str, typer.Option(help="bf16 or fp8_blockwise_1x32.")] = "bf16",
    routing: Annotated[str, typer.Option(help=" | ".join(ROUTING_NAMES))] = "uniform",
    config: Annotated[str | None, typer.Option(help="A configuration of the backend, by name.")] = None,
) -> None:
    """Run a call with kernels that store time stamps, with a cold L2 cache, and write them."""
    from megamoe.bench.trace import write_trace
    from megamoe_cuda.trace import TracedCall, trace_call  # the session and what it imports

    check_writable(output, "OUTPUT")
    named_routing(routing)
    problem = MoEProblem(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_experts=32 * ep if experts is None else experts,
        top_k=top_k,
        num_max_tokens_per_rank=tokens,
        ep_size=ep,
        transport=transport,
    )
    call = TracedCall(problem=problem, num_tokens=tokens, routing=routing, config=config)
    write_trace(output, trace_call(call))
    typer.echo(f"{call.title}: written to {output}; see megamoe trace {output}")


def _require_no_options(context: typer.Context) -> None:
    """Raise where options of one layer would be passed over, and a hundred other kernels be compiled."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError("these options are of one layer", got=options, hint="add its --hidden, or leave them out")


def _compile_and_report(build: Build) -> tuple[str, list[str]]:
    kernel = load_or_compile(build.kernel)
    found = complaints(kernel)
    typer.echo(f"{'BAD ' if found else 'ok  '} {build.name}: {_costs(kernel)}")
    for line in found:
        typer.echo(f"       {line}")
    return build.name, found


def _costs(kernel: CompiledKernel) -> str:
    return (
        f"{kernel.registers} registers, {kernel.spill_bytes} B spilled, {kernel.stack_bytes} B stack, "
        f"{kernel.dynamic_smem_bytes} B shared memory, {len(kernel.cubin)} B code, {len(kernel.warnings)} warnings"
    )


@cache_app.command("info")
@command
def cache_info() -> None:
    """List the entries that are whole."""
    cache = KernelCache(env.cache_dir())
    count = 0
    for key, entry in cache.entries():
        count += 1
        typer.echo(f"{key[:16]} {len(entry.code):>9} B  {entry.info['config']}")
    typer.echo(f"{count} kernels in {cache.directory}")


@cache_app.command("export")
@command
def cache_export(bundle: Annotated[Path, typer.Argument(help="File to write.")]) -> None:
    """Write all kernels to one file."""
    check_writable(bundle, "BUNDLE")
    count = KernelCache(env.cache_dir()).export_bundle(bundle)
    typer.echo(f"{count} kernels written to {bundle}")


@cache_app.command("import")
@command
def cache_import(bundle: Annotated[Path, typer.Argument(help="File of `cache export`.")]) -> None:
    """Check a bundle and add its kernels."""
    cache = KernelCache(env.cache_dir())
    make_folder(cache.directory, "MEGAMOE_CACHE_DIR")
    typer.echo(f"{cache.import_bundle(bundle)} kernels added to {cache.directory}")


def main() -> None:
    """Entry point."""
    app()

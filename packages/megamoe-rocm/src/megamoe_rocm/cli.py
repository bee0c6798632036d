"""`megamoe-rocm`: find out whether everything works on an MI355X, or rehearse that without one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megamoe import env
from megamoe.cli.console import command, make_folder
from megamoe_rocm.aot.compiler import import_triton
from megamoe_rocm.rungs import Rung

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.callback()
def callback() -> None:
    """Commands of megamoe-rocm."""


@app.command("validate")
@command
def validate_command(
    output: Annotated[Path, typer.Option(help="folder for validation.json and validation.md")] = Path("validation"),
    device: Annotated[str, typer.Option(help="gfx950, or to rehearse: nvidia, interpreter, isa")] = Rung.GFX950.value,
    step: Annotated[
        list[str] | None,
        typer.Option(help="code-objects, gates, matrix or bench: run it alone; may be given more than once"),
    ] = None,
    serving: Annotated[
        Path | None, typer.Option(help="JSON file: servers to measure besides (docs/gfx950.md); left out without it")
    ] = None,
) -> None:
    """Machine, code objects, accuracy gates, conformance matrix, benchmark, serving on request; exit 1 if any fails."""
    env.set_rocm_device(device)  # before anything of Triton is imported; the processes of a step are to see it too
    make_folder(output, "--output")
    from megamoe_rocm.serving import ServingPlan
    from megamoe_rocm.validate import Step, validate

    plan = None if serving is None else ServingPlan.read(serving)

    def tell(ended: Step) -> None:
        typer.echo(f"{ended.outcome:8} {ended.name} ({ended.seconds} s) {ended.why}")

    result = validate(output, only=step or (), serving=plan, on_step=tell)
    typer.echo(f"{'passed' if result.passed else 'failed'}: see {output / 'validation.md'}")
    if not result.passed:
        raise typer.Exit(1)


@app.command("compile")
@command
def compile_command(
    output: Annotated[
        Path | None, typer.Option(help="folder; by default the one in this package, which its wheel takes along")
    ] = None,
) -> None:
    """Compile every kernel of the standard configurations for gfx950, without a GPU, and hold each to its promises."""
    if output is not None:
        make_folder(output, "--output")
    import_triton()
    from megamoe_rocm.aot import CodeObject, Expectation, check
    from megamoe_rocm.code_store import PACKAGED, build
    from megamoe_rocm.standard import standard_launches

    def tell(key: str, code: CodeObject) -> None:
        check(code, Expectation())  # no spills, no scratch, LDS that fits
        used = code.resources
        typer.echo(
            f"{key}: {len(code.hsaco)} bytes, {used.num_vgprs} VGPRs, {used.num_sgprs} SGPRs, "
            f"{used.lds_bytes} bytes of LDS, {code.occupancy.workgroups_per_cu} workgroups a CU"
        )

    folder = output or PACKAGED
    store = build(folder, (launch for _, launch in standard_launches()), on_code=tell)
    typer.echo(f"{len(store.hashes)} code objects in {folder}")


@app.command("model")
@command
def model_command() -> None:
    """Print what calls should take on MI355Xs, by a model: nothing of it was measured. Needs Triton and LLVM."""
    import_triton()
    from megamoe_rocm.model.report import lines

    for line in lines():
        typer.echo(line)


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()

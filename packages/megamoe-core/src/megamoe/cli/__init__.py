"""The command line: `megamoe doctor | run | plan | bench | trace`."""

from __future__ import annotations

from typing import Annotated

import typer

from megamoe._version import __version__
from megamoe.cli import bench
from megamoe.cli.console import Debug, out
from megamoe.cli.doctor import doctor
from megamoe.cli.plan import plan
from megamoe.cli.run import run
from megamoe.cli.trace import trace

app = typer.Typer(
    help="Fused expert-parallel mixture-of-experts layers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(doctor)
app.command()(run)
app.command()(plan)
app.command()(trace)
app.add_typer(bench.app, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        out.print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option(help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    Debug.enabled = debug


def main() -> None:
    """Entry point of the `megamoe` command."""
    app()

"""`megamoe bench`: run a suite of measurements, and make tables and plots of results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from megamoe.bench.report import Series, grouped, markdown, plot
from megamoe.bench.results import BenchRow, read_rows, write_rows
from megamoe.bench.suites import SuiteOptions, find_suite, suites
from megamoe.cli.console import check_writable, command, err, make_folder, out, say, seconds_text
from megamoe.errors import ConfigError, InputError

app = typer.Typer(help="Measure a backend, or report what was measured.", invoke_without_command=True)


@app.callback()
@command
def bench(
    context: typer.Context,
    suite: Annotated[str | None, typer.Option(help="Which suite; without it they are listed.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens per rank, as 8,128,512; default: the suite's.")] = None,
    repeats: Annotated[int, typer.Option(help="Calls per measurement.", min=1)] = 20,
    config: Annotated[str | None, typer.Option(help="A configuration of the backend, by name.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file to write the results to.")] = None,
) -> None:
    """Run a suite and print its results as they come."""
    if context.invoked_subcommand is not None:
        return
    if suite is None:
        out.print(_suite_table())
        return
    options = SuiteOptions(tokens=_parse_tokens(tokens), repeats=repeats, config=config)
    chosen = find_suite(suite)
    if output is not None:
        check_writable(output, "--output")
    rows: list[BenchRow] = []
    with err.status(f"measuring {chosen.name}"):
        for row in chosen.run(options):
            rows.append(row)
            peers = "".join(f", {name} {seconds_text(us / 1e6)}" for name, us in row.peers.items())
            spread = f"({seconds_text(row.us_min / 1e6)} to {seconds_text(row.us_max / 1e6)})"
            say(
                f"{row.mode} EP{row.ep_size} {row.routing}, {row.num_tokens} tokens per rank: "
                f"[bold]{seconds_text(row.us_median / 1e6)}[/] {spread}, {row.tflops:.3g} TFLOP/s{peers}"
            )
            if output is not None:
                write_rows(output, rows)  # after each, so that an interrupted suite leaves what it has


@app.command()
@command
def report(
    results: Annotated[list[Path], typer.Argument(help="JSON files of results, or directories of them.")],
    output: Annotated[Path | None, typer.Option(help="Markdown file to write; default: print it.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Directory for one SVG per series.")] = None,
) -> None:
    """Make tables and plots of results."""
    if output is not None:
        check_writable(output, "--output")
    rows = [row for path in results for file in _files(path) for row in read_rows(file)]
    text = markdown(rows)
    if output is None:
        out.print(text, markup=False, soft_wrap=True)
    else:
        output.write_text(text, encoding="utf-8")
    if plots is not None:
        make_folder(plots, "--plots")
        for series, of_series in grouped(rows).items():
            plot(of_series, plots / f"{_file_name(series)}.svg")


def _suite_table() -> Table:
    table = Table("suite", "backend", "what it measures")
    for suite in suites().values():
        table.add_row(suite.name, suite.backend, suite.description)
    return table


def _parse_tokens(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ConfigError("--tokens is not a list of numbers", got=repr(text), expected="8,128,512, say")
    return tuple(map(int, parts))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.rglob("*.json"))
    if not files:
        raise InputError(f"directory {path} holds no results", expected="*.json, as megamoe bench --output writes")
    return files


def _file_name(series: Series) -> str:
    """Letters, digits and hyphens that tell series apart."""
    parts = (
        series.bench,
        series.gpu.replace(" ", "-"),
        f"h{series.hidden_size}-i{series.intermediate_size}-e{series.num_experts}-k{series.top_k}",
        f"ep{series.ep_size}",
        series.routing,
        series.mode,
        series.transport,
        "fit" if series.fits else f"capacity{series.capacity}",
    )
    return "".join(char if char.isalnum() else "-" for char in "-".join(parts)).lower()

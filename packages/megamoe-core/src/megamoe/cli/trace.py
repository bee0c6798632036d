"""`megamoe trace`: a call's time stamps as a table, a Perfetto file and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from megamoe.bench.trace import draw, perfetto, read_trace, summaries
from megamoe.cli.console import check_writable, command, out, say


@command
def trace(
    stamps: Annotated[Path, typer.Argument(help="Time stamps of a call, as `megamoe-cuda trace` writes them.")],
    perfetto_file: Annotated[
        Path | None, typer.Option("--perfetto", help="JSON file to write for ui.perfetto.dev.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="SVG or PNG to draw; needs extra plots of megamoe-core.")] = None,
) -> None:
    """Show where the time of one call went."""
    for option, path in (("--perfetto", perfetto_file), ("--picture", picture)):
        if path is not None:
            check_writable(path, option)
    found = read_trace(stamps)
    table = Table("rank", "role", "span", "median µs", "max µs", "last end µs", title=escape(found.title))
    for column in table.columns[3:]:
        column.justify = "right"
    for each in summaries(found):
        times = (each.median_us, each.max_us, each.last_end_us)
        table.add_row(str(each.rank), each.span.role, each.span.name, *(f"{us:.1f}" for us in times))
    out.print(table)
    if perfetto_file is not None:
        perfetto_file.write_text(json.dumps(perfetto(found)) + "\n", encoding="utf-8")
        say(f"wrote {perfetto_file}")
    if picture is not None:
        draw(found, picture)
        say(f"wrote {picture}")

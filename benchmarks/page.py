"""Write docs/benchmarks.md and its plots from benchmarks/results, as `megamoe bench report` makes them.

    python benchmarks/page.py

benchmarks/page.md is what stands before the tables. Needs `megamoe-core[plots]`.
"""

from __future__ import annotations

import re
from pathlib import Path

from megamoe.bench.report import Series, grouped, markdown, plot
from megamoe.bench.results import read_rows

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PLOTS = DOCS / "assets" / "benchmarks"


def main() -> None:
    rows = [row for file in sorted((HERE / "results").glob("*.json")) for row in read_rows(file)]
    parts = [(HERE / "page.md").read_text(encoding="utf-8")]
    PLOTS.mkdir(parents=True, exist_ok=True)
    for series, of_series in grouped(rows).items():
        name = file_name(series)
        plot(of_series, PLOTS / name)
        parts += [markdown(of_series), f"![time and TFLOP/s against tokens](assets/benchmarks/{name})\n"]
    (DOCS / "benchmarks.md").write_text("\n".join(parts), encoding="utf-8")


def file_name(series: Series) -> str:
    """Lower-case letters, digits and hyphens; the title tells series apart."""
    return re.sub(r"[^a-z0-9]+", "-", series.title.lower()).strip("-") + ".svg"


if __name__ == "__main__":
    main()

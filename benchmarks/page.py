"""Write docs/benchmarks.md with its plots, as `megamoe bench report` makes them, and docs/accuracy.md.

    python benchmarks/page.py

They are made from benchmarks/results; page.md, end_to_end/page.md and small_model.md stand before the tables. Needs
`megamoe-core[plots]`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from end_to_end.report import markdown as end_to_end
from small_model_report import markdown as small_model

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
    if models := sorted((HERE / "results" / "end-to-end").glob("*.json")):
        parts.append((HERE / "end_to_end" / "page.md").read_text(encoding="utf-8"))
        parts.append(end_to_end(models))
    (DOCS / "benchmarks.md").write_text("\n".join(parts), encoding="utf-8")
    write_accuracy()


def write_accuracy() -> None:
    """Write docs/accuracy.md from the latest evaluation of the small model."""
    *_, latest = sorted((HERE / "results" / "small-model").glob("*.json"))
    report = json.loads(latest.read_text(encoding="utf-8"))
    text = (HERE / "small_model.md").read_text(encoding="utf-8")
    (DOCS / "accuracy.md").write_text(f"{text}\n{small_model(report)}", encoding="utf-8")


def file_name(series: Series) -> str:
    """Lower-case letters, digits and hyphens; the title tells series apart."""
    return re.sub(r"[^a-z0-9]+", "-", series.title.lower()).strip("-") + ".svg"


if __name__ == "__main__":
    main()

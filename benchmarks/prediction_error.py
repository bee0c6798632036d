"""Print how far `megamoe plan --simulate` is from the results: one Markdown table row per measured configuration.

    python benchmarks/prediction_error.py [RESULTS.json ...]

Without files, those of benchmarks/results. Takes the rows of a device, mode and routing that the simulation knows
(schedule/simulate.py); the tile is the one that megamoe-cuda picks for the call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from megamoe.bench.results import BenchRow, read_rows
from megamoe.bench.routing import EP8_REMOTE
from megamoe.schedule.device_spec import DEVICES
from megamoe.schedule.expected_rows import expected_rows, two_rank_sources, uniform_sources
from megamoe.schedule.kernel_rates import KERNEL_RATES, links_of
from megamoe.schedule.simulate import simulate
from megamoe_cuda.heuristics import session_config

RESULTS = Path(__file__).parent / "results"
ROUTINGS = ("ep8-equivalent", "uniform")
NVLINK_DOMAIN = 8


def main(files: list[str]) -> None:
    paths = [Path(file) for file in files] or sorted(RESULTS.glob("*.json"))
    print("| tokens per rank | capacity | transport | EP | measured µs | predicted µs | error |")
    print("|---|---|---|---|---|---|---|")
    worst = 0.0
    for row in known(row for path in paths for row in read_rows(path)):
        predicted = predict(row)
        error = predicted / row.us_median - 1
        worst = max(worst, abs(error))
        group = "EP8-equivalent" if row.routing == "ep8-equivalent" else f"EP{row.ep_size}"
        cells = (row.num_tokens, row.capacity, row.transport, group, f"{row.us_median:.1f}", f"{predicted:.1f}")
        print("|", *(f"{cell} |" for cell in cells), f"{error:+.1%} |")
    print(f"\nLargest error: {worst:.1%}")


def known(rows: Iterable[BenchRow]) -> Iterator[BenchRow]:
    """Rows that can be predicted."""
    for row in rows:
        if row.gpu in KERNEL_RATES and row.mode == "a8w8" and row.routing in ROUTINGS:
            yield row


def predict(row: BenchRow) -> float:
    """Microseconds."""
    problem = row.problem
    device = DEVICES[row.gpu]
    links = links_of(device, row.ep_size, NVLINK_DOMAIN)
    sources = uniform_sources(problem, row.num_tokens)
    if row.routing == "ep8-equivalent":
        links = tuple(replace(link, share=EP8_REMOTE) for link in links)
        sources = two_rank_sources(problem, row.num_tokens, EP8_REMOTE)
    return simulate(
        problem,
        session_config(problem, None).tiling(problem, row.num_tokens, device.num_sms),
        num_tokens=row.num_tokens,
        rows_per_expert=expected_rows(sources, problem.num_local_experts),
        links=links,
        rates=KERNEL_RATES[row.gpu],
        dirty_l2_bytes=device.l2_bytes or 0,  # suites flush the cache by writing
    ).us


if __name__ == "__main__":
    main(sys.argv[1:])

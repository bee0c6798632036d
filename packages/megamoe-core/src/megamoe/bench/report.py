"""Tables and plots from result rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamoe.bench.results import BenchRow
from megamoe.bench.roofline import Floor, floor_of
from megamoe.errors import BackendUnavailableError
from megamoe.schedule.device_spec import DEVICES, DeviceSpec


@dataclass(frozen=True, order=True, kw_only=True)
class Series:
    """What rows of one table and one curve share: everything but the number of tokens."""

    bench: str
    gpu: str
    num_gpus: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    ep_size: int
    routing: str
    mode: str
    transport: str
    fits: bool  # capacity equal to the tokens of the call, or one large capacity for all
    capacity: int  # 0 where it fits

    @classmethod
    def of(cls, row: BenchRow) -> Series:
        """The series that a row belongs to."""
        fits = row.capacity == max(1, row.num_tokens)
        return cls(
            bench=row.bench,
            gpu=row.gpu,
            num_gpus=row.num_gpus,
            hidden_size=row.hidden_size,
            intermediate_size=row.intermediate_size,
            num_experts=row.num_experts,
            top_k=row.top_k,
            ep_size=row.ep_size,
            routing=row.routing,
            mode=row.mode,
            transport=row.transport,
            fits=fits,
            capacity=0 if fits else row.capacity,
        )

    @property
    def title(self) -> str:
        """One line."""
        capacity = "" if self.fits else f", capacity {self.capacity}"
        return (
            f"{self.bench}: {self.mode}, transport {self.transport}, EP{self.ep_size}, {self.routing} routing, "
            f"H={self.hidden_size} I={self.intermediate_size} E={self.num_experts} top-{self.top_k}{capacity}"
        )


def grouped(rows: Iterable[BenchRow]) -> dict[Series, list[BenchRow]]:
    """Rows by series, ascending tokens; of rows that were measured again, the latest stays."""
    latest: dict[tuple[Series, int], BenchRow] = {}
    for row in sorted(rows, key=lambda row: row.date):
        latest[Series.of(row), row.num_tokens] = row
    result: dict[Series, list[BenchRow]] = {}
    for (series, _), row in sorted(latest.items(), key=lambda item: item[0]):
        result.setdefault(series, []).append(row)
    return result


def device_of(row: BenchRow) -> DeviceSpec | None:
    """The device that a row was measured on, where its rates are known."""
    return next((spec for name, spec in DEVICES.items() if name in row.gpu), None)


def markdown(rows: Iterable[BenchRow]) -> str:
    """A section with a table for each series."""
    return "\n".join(_section(series, of_series) for series, of_series in grouped(rows).items())


def _section(series: Series, rows: Sequence[BenchRow]) -> str:
    peers = sorted({peer for row in rows for peer in row.peers})
    head = ["tokens/rank", "µs", "min to max", "TFLOP/s", "workspace MiB", "floor µs", "x floor", *peers]
    lines = [f"### {series.title}", "", _line(head), _line(["---:"] * len(head))]
    for row in rows:
        floor = _floor(row)
        limits = ["", ""] if floor is None else [f"{floor.us:.0f}", f"{row.us_median / floor.us:.2f}"]
        lines.append(
            _line(
                [
                    str(row.num_tokens),
                    f"{row.us_median:.1f}",
                    f"{row.us_min:.1f} to {row.us_max:.1f}",
                    f"{row.tflops:.3g}",
                    f"{row.workspace_mib:.1f}",
                    *limits,
                    *(f"{row.peers[peer]:.1f}" if peer in row.peers else "" for peer in peers),
                ]
            )
        )
    last = max(rows, key=lambda row: row.date)
    gpus = f"{last.num_gpus} x " if last.num_gpus else ""
    driver = f", driver {last.driver}" if last.driver else ""
    lines += ["", f"{gpus}{last.gpu}{driver}, {last.toolkit}, commit {last.commit}, {last.date}: `{last.command}`", ""]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _floor(row: BenchRow) -> Floor | None:
    device = device_of(row)
    return None if device is None else floor_of(row, device)


def plot(rows: Sequence[BenchRow], path: Path) -> None:
    """Draw time and TFLOP/s of one series against tokens, beside its peers and floors.

    Args:
        rows: of one series.
        path: .svg or .png to write.

    Raises:
        BackendUnavailableError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, StrMethodFormatter
    except ImportError as error:
        raise BackendUnavailableError(
            "plots need matplotlib", hint="pip install megamoe-core[plots], or leave --plots away"
        ) from error
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    time_axes, rate_axes = figure.subplots(1, 2)
    tokens = [row.num_tokens for row in rows]
    time_axes.plot(tokens, [row.us_median for row in rows], marker="o", label="MegaMoE")
    rate_axes.plot(tokens, [row.tflops for row in rows], marker="o", label="MegaMoE")
    for peer in sorted({peer for row in rows for peer in row.peers}):
        measured = [row for row in rows if peer in row.peers]
        xs, ys = [row.num_tokens for row in measured], [row.peers[peer] for row in measured]
        # A peer's rate: the same FLOPs in its own time.
        rates = [row.tflops * row.us_median / row.peers[peer] for row in measured]
        time_axes.plot(xs, ys, marker=".", linewidth=1, label=peer)
        rate_axes.plot(xs, rates, marker=".", linewidth=1, label=peer)
    floors = [_floor(row) for row in rows]
    if all(floor is not None for floor in floors):
        heights = [floor.us for floor in floors if floor is not None]
        roofs = [row.tflops * row.us_median / height for row, height in zip(rows, heights)]
        style = {"linestyle": "--", "color": "black", "linewidth": 1}
        time_axes.plot(tokens, heights, label="floor: weights, FLOPs", **style)
        rate_axes.plot(tokens, roofs, label="roof: weights, FLOPs", **style)
    time_axes.set(xscale="log", yscale="log", xlabel="tokens per rank", ylabel="µs")
    time_axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    time_axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    rate_axes.set(xscale="log", xlabel="tokens per rank", ylabel="TFLOP/s per rank")
    for axes in (time_axes, rate_axes):
        axes.set_xticks(tokens, [str(count) for count in tokens])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(Series.of(rows[0]).title, fontsize="medium")
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure as .svg or .png. The same figure gives the same bytes."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "megamoe"}):  # text stays text
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)

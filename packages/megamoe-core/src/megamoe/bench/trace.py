"""Time stamps of one call, from inside the kernel: the file that holds them, a Perfetto file and a picture of it.

A backend writes the file: points that every CTA passes, with the time at which it did, and which points bound which
span of which role. Ranks are drawn from their own first stamp: clocks of two GPUs need not agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megamoe.bench.report import save_figure
from megamoe.errors import BackendUnavailableError, InputError

COLOURS = ("#4c78a8", "#72b7b2", "#f58518", "#54a24b", "#b279a2", "#e45756", "#9d755d", "#eeca3b")


@dataclass(frozen=True, kw_only=True)
class Span:
    """Work of a role between two points, by name."""

    role: str
    name: str
    begin: str
    end: str


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One call.

    Args:
        title: what was called, for people.
        points: names, in the order of the stamps.
        spans: what stands between them; of one role, without overlap.
        stamps_ns: [rank][CTA][point], nanoseconds; 0 where a CTA did not pass the point.
    """

    title: str
    points: tuple[str, ...]
    spans: tuple[Span, ...]
    stamps_ns: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A span as it happened: microseconds from the rank's first stamp."""

    rank: int
    cta: int
    span: Span
    begin_us: float
    end_us: float


def bars(trace: Trace) -> Iterator[Bar]:
    """Every span of every CTA whose two points it passed."""
    place = {point: index for index, point in enumerate(trace.points)}
    for rank, ctas in enumerate(trace.stamps_ns):
        start = min((stamp for stamps in ctas for stamp in stamps if stamp), default=0)
        for cta, stamps in enumerate(ctas):
            for span in trace.spans:
                begin, end = stamps[place[span.begin]], stamps[place[span.end]]
                if begin and end:
                    yield Bar(rank=rank, cta=cta, span=span, begin_us=(begin - start) / 1e3, end_us=(end - start) / 1e3)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A span over the CTAs of a rank, microseconds."""

    rank: int
    span: Span
    median_us: float
    max_us: float
    last_end_us: float


def summaries(trace: Trace) -> list[Summary]:
    """One per rank and span that some CTA has, in order."""
    found: dict[tuple[int, Span], list[Bar]] = {}
    for bar in bars(trace):
        found.setdefault((bar.rank, bar.span), []).append(bar)
    return [
        Summary(
            rank=rank,
            span=span,
            median_us=median(bar.end_us - bar.begin_us for bar in of_span),
            max_us=max(bar.end_us - bar.begin_us for bar in of_span),
            last_end_us=max(bar.end_us for bar in of_span),
        )
        for rank in range(len(trace.stamps_ns))
        for span in trace.spans
        if (of_span := found.get((rank, span)))
    ]


def perfetto(trace: Trace) -> dict[str, Any]:
    """The call in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

    A process is a rank, a thread is a role of a CTA.
    """
    roles = list(dict.fromkeys(span.role for span in trace.spans))
    events: list[dict[str, Any]] = []
    for rank, ctas in enumerate(trace.stamps_ns):
        events.append(_name("process_name", f"rank {rank}", pid=rank))
        for cta in range(len(ctas)):
            for index, role in enumerate(roles):
                events.append(_name("thread_name", f"CTA {cta} {role}", pid=rank, tid=cta * len(roles) + index))
    for bar in bars(trace):
        events.append(
            {
                "ph": "X",
                "name": bar.span.name,
                "cat": bar.span.role,
                "pid": bar.rank,
                "tid": bar.cta * len(roles) + roles.index(bar.span.role),
                "ts": bar.begin_us,
                "dur": bar.end_us - bar.begin_us,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"title": trace.title}}


def _name(kind: str, name: str, **ids: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "args": {"name": name}, **ids}


def draw(trace: Trace, path: Path) -> None:
    """Draw every CTA's spans over time, a panel per rank, a lane per role.

    Args:
        trace: the call.
        path: .svg or .png to write.

    Raises:
        BackendUnavailableError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendUnavailableError("pictures need matplotlib", hint="pip install megamoe-core[plots]") from error
    roles = list(dict.fromkeys(span.role for span in trace.spans))
    lane = 1 / len(roles)
    num_ranks = max(1, len(trace.stamps_ns))
    figure = Figure(figsize=(11, 1 + 4 * num_ranks), layout="constrained")
    panels = figure.subplots(num_ranks, 1, squeeze=False, sharex=True)[:, 0]
    by_span: dict[tuple[int, Span], list[Bar]] = {}
    for bar in bars(trace):
        by_span.setdefault((bar.rank, bar.span), []).append(bar)
    for (rank, span), of_span in by_span.items():
        panels[rank].barh(
            [bar.cta + lane * roles.index(span.role) for bar in of_span],
            [bar.end_us - bar.begin_us for bar in of_span],
            left=[bar.begin_us for bar in of_span],
            height=lane,
            align="edge",
            color=COLOURS[trace.spans.index(span) % len(COLOURS)],
            label=f"{span.role}: {span.name}",
        )
    for rank, axes in enumerate(panels):
        axes.set(ylabel=f"rank {rank}, CTA", ylim=(len(trace.stamps_ns[rank]), 0) if trace.stamps_ns else None)
    panels[-1].set_xlabel("µs from the rank's first stamp")
    if by_span:
        panels[0].legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=3)
    figure.suptitle(trace.title, fontsize="medium")
    save_figure(figure, path)


def write_trace(path: Path, trace: Trace) -> None:
    """Write the file that `read_trace` reads."""
    spans = [[span.role, span.name, span.begin, span.end] for span in trace.spans]
    content = {"title": trace.title, "points": trace.points, "spans": spans, "stamps_ns": trace.stamps_ns}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_trace(path: Path) -> Trace:
    """Read a call's time stamps.

    Raises:
        InputError: no such file, or not of that form; names what is wrong.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"trace {path} can't be read", got=error, expected="a file that a backend's trace wrote"
        ) from error
    try:
        trace = Trace(
            title=str(content["title"]),
            points=tuple(map(str, content["points"])),
            spans=tuple(
                Span(role=role, name=name, begin=begin, end=end) for role, name, begin, end in content["spans"]
            ),
            stamps_ns=tuple(
                tuple(tuple(int(stamp) for stamp in stamps) for stamps in ctas) for ctas in content["stamps_ns"]
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is no trace", got=repr(error), expected="title, points, spans, stamps_ns") from error
    _require_whole(path, trace)
    return trace


def _require_whole(path: Path, trace: Trace) -> None:
    unknown = {point for span in trace.spans for point in (span.begin, span.end)} - set(trace.points)
    if unknown:
        raise InputError(f"spans of {path} name unknown points", got=sorted(unknown), expected=list(trace.points))
    lengths: set[int] = {len(stamps) for ctas in trace.stamps_ns for stamps in ctas}
    if lengths - {len(trace.points)}:
        raise InputError(
            f"a CTA of {path} has another number of stamps than there are points",
            got=sorted(lengths),
            expected=len(trace.points),
        )


def concatenated(title: str, traces: Sequence[Trace]) -> Trace:
    """The ranks of several traces of one call, in order; all have the same points and spans."""
    first = traces[0]
    assert all((trace.points, trace.spans) == (first.points, first.spans) for trace in traces)
    stamps = tuple(ctas for trace in traces for ctas in trace.stamps_ns)
    return Trace(title=title, points=first.points, spans=first.spans, stamps_ns=stamps)

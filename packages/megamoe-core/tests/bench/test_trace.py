"""A call's time stamps: spans, summaries, the Perfetto file, the picture, the file."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from megamoe.bench.trace import Span, Trace, bars, concatenated, draw, perfetto, read_trace, summaries, write_trace
from megamoe.cli import app
from megamoe.errors import InputError

PULL = Span(role="dispatch", name="pull", begin="planned", end="pulled")
MULTIPLY = Span(role="math", name="multiply", begin="planned", end="multiplied")
COMBINE = Span(role="math", name="combine", begin="multiplied", end="combined")
TRACE = Trace(
    title="512 tokens, EP2",
    points=("planned", "pulled", "multiplied", "combined"),
    spans=(PULL, MULTIPLY, COMBINE),
    stamps_ns=(
        ((1_000_000, 1_004_000, 1_020_000, 1_021_000), (1_001_000, 1_003_000, 1_030_000, 1_032_000)),
        ((77_000_000, 77_006_000, 77_025_000, 0), (0, 0, 0, 0)),  # another clock; CTAs that left early
    ),
)


def test_bars_count_from_their_own_rank_s_first_stamp() -> None:
    found = {(bar.rank, bar.cta, bar.span): (bar.begin_us, bar.end_us) for bar in bars(TRACE)}
    assert found == {
        (0, 0, PULL): (0.0, 4.0),
        (0, 0, MULTIPLY): (0.0, 20.0),
        (0, 0, COMBINE): (20.0, 21.0),
        (0, 1, PULL): (1.0, 3.0),
        (0, 1, MULTIPLY): (1.0, 30.0),
        (0, 1, COMBINE): (30.0, 32.0),
        (1, 0, PULL): (0.0, 6.0),
        (1, 0, MULTIPLY): (0.0, 25.0),
    }


def test_summaries() -> None:
    found = {(each.rank, each.span): (each.median_us, each.max_us, each.last_end_us) for each in summaries(TRACE)}
    assert found == {
        (0, PULL): (3.0, 4.0, 4.0),
        (0, MULTIPLY): (24.5, 29.0, 30.0),
        (0, COMBINE): (1.5, 2.0, 32.0),
        (1, PULL): (6.0, 6.0, 6.0),
        (1, MULTIPLY): (25.0, 25.0, 25.0),
    }


def test_perfetto_has_a_process_per_rank_and_a_thread_per_role_of_a_cta() -> None:
    content = json.loads(json.dumps(perfetto(TRACE)))
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    names: dict[Any, str] = {
        (event["pid"], event.get("tid")): event["args"]["name"]
        for event in content["traceEvents"]
        if event["ph"] == "M"
    }
    assert {name for (_, tid), name in names.items() if tid is None} == {"rank 0", "rank 1"}
    assert len(spans) == len(list(bars(TRACE)))
    for event in spans:
        assert names[event["pid"], event["tid"]].endswith(event["cat"])
    multiply = next(e for e in spans if names[e["pid"], e["tid"]] == "CTA 1 math" and e["name"] == "multiply")
    assert (multiply["pid"], multiply["ts"], multiply["dur"]) == (0, 1.0, 29.0)
    # Threads of one process never overlap: Perfetto would nest what does.
    for thread in {(event["pid"], event["tid"]) for event in spans}:
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == thread)
        assert all(before[1] <= after[0] for before, after in pairwise(times))


def test_the_file_gives_back_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "new" / "call.json"
    write_trace(path, TRACE)
    assert read_trace(path) == TRACE
    halves = [replace(TRACE, stamps_ns=(ctas,)) for ctas in TRACE.stamps_ns]
    assert concatenated(TRACE.title, halves) == TRACE


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"spans": [["math", "multiply", "planned", "gone"]]}, "unknown points"),
        ({"stamps_ns": [[[1, 2, 3]]]}, "another number of stamps"),
        ({"stamps_ns": 7}, "no trace"),
        ({"spans": [["math"]]}, "no trace"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    path = tmp_path / "call.json"
    write_trace(path, TRACE)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=complaint):
        read_trace(path)
    path.write_text("no json")
    with pytest.raises(InputError, match="can't be read"):
        read_trace(path)


def test_the_picture_has_a_panel_per_rank(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "call.svg"
    draw(TRACE, path)
    text = {"".join(node.itertext()).strip() for node in ElementTree.parse(path).iter() if node.tag.endswith("text")}
    assert {TRACE.title, "rank 0, CTA", "rank 1, CTA", "math: multiply", "dispatch: pull"} <= text
    draw(replace(TRACE, stamps_ns=()), path)  # nothing happened: an empty picture


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    stamps, json_file, picture = (tmp_path / name for name in ("call.json", "perfetto.json", "call.svg"))
    write_trace(stamps, TRACE)
    done = CliRunner().invoke(
        app, ["trace", str(stamps), "--perfetto", str(json_file), "--picture", str(picture)], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert "multiply" in done.stdout
    assert "29.0" in done.stdout
    assert json.loads(json_file.read_text()) == json.loads(json.dumps(perfetto(TRACE)))
    assert picture.stat().st_size
    missing = CliRunner().invoke(app, ["trace", str(tmp_path / "none.json")])
    assert missing.exit_code == 2

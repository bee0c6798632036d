"""What benchmarks/tuning/counters.py makes of Nsight Compute's output; the counters themselves need a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

TUNING = Path(__file__).parents[1] / "benchmarks" / "tuning"

NCU_OUTPUT = """\
==PROF== Connected to process 7
{"num_tokens": 8, "touched_experts": [28, 29, 30]}
==PROF== Disconnected from process 7
"ID","Process ID","Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum","lts__t_sector_hit_rate.pct"
"","","","byte","ns","%"
"0","7","sm90_mega_moe","758,240,512","196,992","27.66"
"1","7","sm90_mega_moe","760,446,720","197,344","27.62"
"""


def test_calls_of_a_profile_are_read_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TUNING))
    from counters import METRICS, profiled_calls

    metrics = {name: METRICS[name] for name in ("us", "hbm_read_bytes", "l2_hit_percent")}
    calls = list(profiled_calls(NCU_OUTPUT, metrics))
    assert [call["us"] for call in calls] == [196.992, 197.344]
    assert [call["hbm_read_bytes"] for call in calls] == [758_240_512, 760_446_720]
    assert calls[1]["l2_hit_percent"] == 27.62


def test_counted_bytes_are_those_of_the_experts_that_were_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TUNING))
    from counters import counted, problem_of

    layer = argparse.Namespace(
        hidden=4096, intermediate=2048, experts=32, top_k=8, quant="a8w8", transport="fp8_blockwise_1x32"
    )
    found = counted(problem_of(layer, 8), 8, touched=[28, 29, 30])
    expert = 3 * 4096 * 2048 + 4 * (32 * 32 + 32 * 16)  # e4m3, and an FP32 scale for 128 x 128
    assert found["weight_bytes"] == 29 * expert
    assert found["input_bytes"] == 8 * (4096 + 4 * 32)
    assert found["output_bytes"] == 8 * 4096 * 2
    assert found["home_rows_bytes"] == 64 * (4096 + 128)  # e4m3, and a scale byte for 32

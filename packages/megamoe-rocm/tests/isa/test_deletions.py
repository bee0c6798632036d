"""Single instructions deleted from the product's kernels: running what is left has to show it.

`deletions.py` has the scenes, and wrote the records that are looked at here: `nox -s deletions-rocm`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RECORDS = Path(__file__).parents[4] / "benchmarks/results/deletions"
SHIPPED = Path(__file__).parents[1] / "code_objects.json"
KERNELS = (
    "quantize_input", "copy_input", "count_picks", "push_entries", "plan_blocks", "dispatch_gemm1", "gemm2_p2p",
    "combine_rows",
)  # fmt: skip
SAMPLE = int(os.environ.get("MEGAMOE_TEST_DELETIONS", "60"))


def test_the_records_say_what_they_have_to() -> None:
    """Of each kernel, as it ships, 200 deletions or all there are; of all that are executed 95% are noticed.

    Every other one has a reason. Fences, which other tests drop, are counted besides.
    """
    records = [json.loads(path.read_text()) for path in RECORDS.glob("*.json")]
    assert {record["kernel"] for record in records} == set(KERNELS)
    shipped = set(json.loads(SHIPPED.read_text()).values())
    for record in records:
        assert record["sha256"] in shipped, record["kernel"]
        assert record["deleted"] >= min(200, record["sites"]), record["kernel"]
        assert all(survivor["reason"] for survivor in record["survivors"]), record["kernel"]
    shares = [share.split(" of ") for kind, share in by_kind(records) if kind != "fence"]
    noticed, executed = (sum(map(int, column)) for column in zip(*shares, strict=True))
    assert noticed >= 0.95 * executed


def by_kind(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Kinds of instructions, and how many deletions of that kind were noticed: `8 of 9`."""
    for record in records:
        yield from record["noticed_of_executed"].items()


@pytest.mark.usefixtures("toolchain")
def test_deletions_in_a_small_kernel_show(layers: ModuleType) -> None:
    """A few, so that the scenes are run in CI."""
    from deletions import delete

    result = delete(layers, "quantize_input", "a4w4", "fp8_blockwise_1x32", 8)
    assert not result.report.unexplained, result.report.table()
    assert result.report.share_noticed == 1


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("quant, transport", [("a4w4", "fp8_blockwise_1x32"), ("a8w4", "bf16")])
@pytest.mark.parametrize("kernel", KERNELS)
def test_deletions(layers: ModuleType, kernel: str, quant: str, transport: str) -> None:
    """Of a sample, nine of ten are noticed in each kernel, and the others have a reason."""
    from deletions import delete

    report = delete(layers, kernel, quant, transport, SAMPLE).report
    print(report.table())
    assert report.share_noticed >= 0.9
    assert not report.unexplained, report.table()

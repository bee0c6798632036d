"""Single instructions deleted from the product's kernels: running what is left has to show it.

`deletions.py` has the scenes, and wrote the records that are looked at here: `nox -s deletions-rocm`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType

import pytest

from megamoe_rocm.isa.mutation import EQUIVALENT

RECORDS = Path(__file__).parents[4] / "benchmarks/results/deletions"
KERNELS = (
    "quantize_input", "copy_input", "count_picks", "push_entries", "plan_blocks", "dispatch_gemm1", "gemm2_p2p",
    "combine_rows",
)  # fmt: skip
SAMPLE = int(os.environ.get("MEGAMOE_TEST_DELETIONS", "60"))


def test_the_records_say_what_they_have_to() -> None:
    """Of each kernel 200 deletions, or all there are; 95% of those that are not proven to be equivalent are noticed.

    Every other one has a reason.
    """
    records = [json.loads(path.read_text()) for path in RECORDS.glob("*.json")]
    assert {record["kernel"] for record in records} == set(KERNELS)
    for record in records:
        assert record["deleted"] >= min(200, record["sites"]), record["kernel"]
        assert all(survivor["reason"] for survivor in record["survivors"]), record["kernel"]
    reasons = [survivor["reason"] for record in records for survivor in record["survivors"]]
    noticed, executed = (sum(record[key] for record in records) for key in ("noticed", "executed"))
    assert noticed >= 0.95 * (executed - sum(reason in EQUIVALENT for reason in reasons))


@pytest.mark.usefixtures("toolchain")
def test_deletions_in_a_small_kernel_show(layers: ModuleType) -> None:
    """A few, so that the scenes are run in CI."""
    from deletions import delete

    result = delete(layers, "copy_input", "a4w4", "fp8_blockwise_1x32", 6)
    assert not result.report.unexplained, result.report.table()
    assert result.report.share_noticed > 0.5


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

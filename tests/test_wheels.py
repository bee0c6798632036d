"""The check of wheels tells a code object that no test has executed from those that one has."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
CODE = {"combine_rows-0": b"combine", "gemm2_p2p-0": b"rows"}


@pytest.fixture(scope="module")
def check_wheels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_wheels", ROOT / "ci/check_wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problems(check_wheels: ModuleType, folder: Path, shipped: Mapping[str, bytes]) -> list[str]:
    executed = folder / "code_objects.json"
    executed.write_text(json.dumps({key: hashlib.sha256(content).hexdigest() for key, content in CODE.items()}))
    with zipfile.ZipFile(folder / "a.whl", "w") as wheel:
        for key, content in shipped.items():
            wheel.writestr(f"megamoe_rocm/code_objects/{key}.hsaco", content)
            wheel.writestr(f"megamoe_rocm/code_objects/{key}.json", "{}")
    found: list[str] = check_wheels.code_object_problems(folder / "a.whl", executed)
    return found


@pytest.mark.parametrize(
    "shipped, message",
    [
        pytest.param(CODE | {"gemm2_p2p-0": b"rowz"}, "gemm2_p2p-0 is not the one that was executed", id="changed"),
        pytest.param({"combine_rows-0": b"combine"}, "gemm2_p2p-0 is missing", id="missing"),
        pytest.param(CODE | {"gemm2_p2p-1": b"rows"}, "gemm2_p2p-1 is none that was executed", id="another"),
    ],
)
def test_another_code_object_than_those_executed(
    check_wheels: ModuleType, tmp_path: Path, shipped: Mapping[str, bytes], message: str
) -> None:
    (found,) = problems(check_wheels, tmp_path, shipped)
    assert message in found


def test_exactly_those_executed(check_wheels: ModuleType, tmp_path: Path) -> None:
    assert problems(check_wheels, tmp_path, CODE) == []


def test_each_kernel_has_hashes_of_code_objects_that_tests_execute(check_wheels: ModuleType) -> None:
    executed = json.loads(check_wheels.EXECUTED.read_text())
    assert {key.rsplit("-", 1)[0] for key in executed} == {
        "quantize_input", "copy_input", "count_picks", "push_entries", "plan_blocks", "dispatch_gemm1", "gemm2_p2p",
        "combine_rows",
    }  # fmt: skip

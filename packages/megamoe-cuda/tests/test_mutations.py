"""Edits of the kernel's headers (tests/gpu) find their places, and the calls that shall show faults reach them."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from megamoe_cuda.heuristics import session_config, tiles_of
from megamoe_cuda.jit import codegen

GPU_TESTS = Path(__file__).parent / "gpu"
sys.path.insert(0, str(GPU_TESTS))
MODULE = runpy.run_path(str(GPU_TESTS / "mutations.py"))
SESSION = runpy.run_path(str(GPU_TESTS / "test_session_gpu.py"))
STUCK = runpy.run_path(str(GPU_TESTS / "test_stuck_gpu.py"))
SANITIZE = runpy.run_path(str(GPU_TESTS / "sanitize.py"))


def test_the_cases_wrap_the_ring_and_bite_the_clamp() -> None:
    cases = list(MODULE["cases"]())
    assert all(case.problem.swiglu_limit for case in cases)
    hot = [case for case in cases if case.hot_rank]
    for case in hot:
        rows = case.problem.ep_size * case.num_tokens * case.problem.top_k * 0.9
        for ring in (session_config(case.problem, name).rings[0] for name in tiles_of(case.problem)):
            assert rows / ring.block_m > ring.ring_blocks, "the ring does not wrap"


@pytest.mark.parametrize("mutation", MODULE["MUTATIONS"], ids=lambda mutation: mutation.name)
def test_every_fault_has_its_place_in_the_headers(mutation: Any, tmp_path: Path) -> None:
    headers = MODULE["mutant"](mutation, tmp_path)
    for edit in mutation.edits:
        mutant, original = (path / "megamoe" / edit.file for path in (headers, codegen.INCLUDE_DIR))
        assert mutant.read_text() != original.read_text()


def test_every_other_edit_has_its_place_in_the_headers(tmp_path: Path) -> None:
    for name, edits in (
        ("every lane", SANITIZE["EVERY_LANE"]),
        *((name, [edit]) for name, edit in STUCK["FAULTS"].items()),
    ):
        MODULE["edited_headers"](edits, tmp_path / name, name)


def test_faults_that_comparisons_miss_are_shown_by_a_test() -> None:
    tests = [name for name in (*SESSION, *STUCK) if name.startswith("test_")]
    shown = [mutation.test for mutation in MODULE["MUTATIONS"] if mutation.test]
    assert shown
    for name in shown:
        assert any(name in test for test in tests), name

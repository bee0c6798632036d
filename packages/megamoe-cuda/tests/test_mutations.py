"""The calls by which seeded faults are to be caught (gpu/mutations.py) reach what the faults are in."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from megamoe_cuda.heuristics import session_config, tiles_of
from megamoe_cuda.jit import codegen

MODULE = runpy.run_path(str(Path(__file__).parent / "gpu" / "mutations.py"))


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
    headers = MODULE["mutate"](mutation, tmp_path)
    mutant, original = (path / "megamoe" / mutation.file for path in (headers, codegen.INCLUDE_DIR))
    assert mutant.read_text() != original.read_text()

"""Every code object that the wheel ships, executed: `tests/code_objects.json` has their hashes.

    python packages/megamoe-rocm/tests/isa/shipped.py    # build and execute them all, then write the hashes anew

After a change of a kernel, of a tile, or of what kernels are compiled with, the hashes are others: run this, and look
at the difference. CI executes what it builds, and fails where that is not what the file says; the wheel is held to the
same file (`ci/check_wheels.py`).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megamoe_rocm.code_store import CodeStore, build
from megamoe_rocm.heuristics import config_names
from megamoe_rocm.isa.device import Programs
from megamoe_rocm.isa.session import EMULATED, open_emulated
from megamoe_rocm.planning import make_plan
from megamoe_rocm.standard import standard_launches

HASHES = Path(__file__).parents[1] / "code_objects.json"
TOKENS = (12, 9)
BOUND = 1e-2  # of y against the staged reference
# K = 1280 in both GEMMs, five steps: the main loop goes round once, and a remainder follows.
SIZES = {"hidden_size": 1280, "intermediate_size": 1280, "num_experts": 2, "top_k": 2, "num_max_tokens_per_rank": 12}
FORMS = (
    {"activation": "swiglu", "transport": "bf16"},
    {"activation": "swiglu_oai", "swiglu_limit": 7.0, "transport": "fp8_blockwise_1x32"},
)


def build_all(folder: Path) -> CodeStore:
    """Compile what the wheel ships."""
    return build(folder, (launch for _, launch in standard_launches()))


def calls(harness: ModuleType) -> Iterator[tuple[str, Any, bool]]:
    """Tile, problem, and whether tokens come quantised, so that each code object is in some call."""
    tiles = [name for name in config_names() if name != "auto"]
    for tile, quant, bias, form in product(tiles, ("a4w4", "a8w4"), (False, True), FORMS):
        quantized = (quant, bias, form) == ("a8w4", True, FORMS[0])
        yield tile, harness.problem(quant=quant, expert_bias=bias, **SIZES, **form), quantized


def execute(harness: ModuleType, programs: Programs, tile: str, problem: Any, quantized: bool) -> set[str]:
    """One call of two ranks, held to the staged reference; returns the hashes of what was executed."""
    weights = [harness.random_weights(problem, rank) for rank in range(2)]
    inputs = harness.random_inputs(problem, TOKENS, low=-1)
    rows = [harness.as_format(problem, item) for item in inputs.hidden_states] if quantized else inputs.hidden_states
    ids = [item.long() if problem.expert_bias else item for item in inputs.topk_ids]
    with open_emulated(make_plan(problem, EMULATED, config=tile), seed=1, programs=programs) as session:
        prepared = [session.prepare(item) for item in weights]
        outs = session.forward(rows, ids, inputs.topk_weights, prepared)
        session.check()
        hashes = {code.sha256 for code in session.executed()}
    expected = harness.staged(problem, rows, inputs.topk_ids, inputs.topk_weights, weights).outputs
    for out, right in zip(outs, expected, strict=True):
        distance = harness.rel_l2(out, right)
        assert distance < BOUND, f"{tile}, {problem}: relL2 {distance} from the staged reference"
    return hashes


def main() -> None:
    from deletions import load_harness

    torch.set_num_threads(1)
    harness = load_harness()
    with tempfile.TemporaryDirectory() as folder:
        store = build_all(Path(folder))
        programs, executed = Programs(store.find), set()
        for tile, problem, quantized in calls(harness):
            executed |= execute(harness, programs, tile, problem, quantized)
        missing = [key for key, sha256 in store.hashes.items() if sha256 not in executed]
        if missing:
            sys.exit(f"in no call: {missing}")
    HASHES.write_text(json.dumps(dict(sorted(store.hashes.items())), indent=1) + "\n")
    print(f"{len(store.hashes)} code objects executed; {HASHES} written")


if __name__ == "__main__":
    main()

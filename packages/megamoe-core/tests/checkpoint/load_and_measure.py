"""Loads experts in a fresh process and prints how far its memory grew: `load_and_measure.py FILE FIRST COUNT`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from megamoe.checkpoint import TensorFiles, find_layer


def _kib(key: str) -> int:
    return int(re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)[1])


def main() -> None:
    path, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    before = _kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak starts again from the present size
    weights = find_layer(TensorFiles.find([path]), 0).load_experts(range(first, first + count))
    share = sum(tensor.nbytes for _, tensor in weights.tensors())
    grown = 1024 * (_kib("VmHWM") - before)
    print(json.dumps({"share_bytes": share, "peak_growth_bytes": grown}))


if __name__ == "__main__":
    main()

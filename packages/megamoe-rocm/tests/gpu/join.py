"""Join the lines that `-p record` left into a result to commit.

    python join.py --commit COMMIT --backend WHAT --command COMMAND --date DATE LINES ... > conformance.json

Of a test that ran more than once, because a time limit was raised, the last outcome counts.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def joined(lines: Sequence[Mapping[str, Any]], about: Mapping[str, str]) -> dict[str, Any]:
    """How many tests came to what, the largest distances from the staged reference, and each test."""
    tests = {line["test"]: line for line in lines if "test" in line}
    cases = [line for line in lines if "case" in line]
    worst = {
        f"{quant}, {transport}": {
            key: max(line[key] for line in cases if (line["quant"], line["transport"]) == (quant, transport))
            for key in ("y", "row")
        }
        for quant, transport in sorted({(line["quant"], line["transport"]) for line in cases})
    }
    counts = Counter(line["outcome"] for line in tests.values())
    run = {name: line for name, line in tests.items() if line["outcome"] != "skipped"}
    return {
        "bench": "conformance",
        **about,
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "largest_relL2_from_staged": worst,
        "tests": [{"test": name, "outcome": line["outcome"], "seconds": line["s"]} for name, line in run.items()],
        "refused": sorted(tests.keys() - run.keys()),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("commit", "backend", "command", "date"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("lines", nargs="+", type=Path)
    arguments = vars(parser.parse_args())
    lines = [json.loads(line) for path in arguments.pop("lines") for line in path.read_text().splitlines()]
    print(json.dumps(joined(lines, arguments), indent=0))


if __name__ == "__main__":
    main()

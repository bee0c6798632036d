"""Fail when the running environment holds a distribution that ci/constraints.txt does not pin at that version.

Usage: `python ci/check_pins.py`.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

CONSTRAINTS = Path(__file__).with_name("constraints.txt")
# pip comes with the Python that made the environment, Triton has its own pin in noxfile.py, and check_lockstep.py looks
# after the packages of this repository.
NOT_PINNED = {"pip", "triton", "megamoe-core", "megamoe-cuda", "megamoe-rocm"}


def canonical(name: str) -> str:
    """The normalized spelling of a distribution's name (PyPA name normalization)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Name to version, of a constraints file that only has `name==version` lines and comments."""
    lines = (line.strip() for line in text.splitlines())
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonical(name): version for name, version in pairs}


def problems(installed: dict[str, str], pinned: dict[str, str]) -> list[str]:
    """One sentence for each installed distribution that is not pinned, or pinned at another version."""
    found = []
    for name, version in sorted(installed.items()):
        public_version = version.split("+")[0]  # 2.13.0+cpu is a build of 2.13.0
        if name in NOT_PINNED or pinned.get(name) == public_version:
            continue
        found.append(f"{name} {version} is installed, but ci/constraints.txt has {pinned.get(name, 'no line for it')}")
    return found


def main() -> int:
    installed = {canonical(dist.metadata["Name"]): dist.version for dist in distributions()}
    found = problems(installed, pins(CONSTRAINTS.read_text()))
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Fail unless the packages are released in lockstep: one version, one licence, vendor packages pinned to that core.

Usage: `python ci/check_lockstep.py [REPOSITORY_ROOT]`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PACKAGES = {"megamoe-core": "megamoe", "megamoe-cuda": "megamoe_cuda", "megamoe-rocm": "megamoe_rocm"}
BUILD_HOOK = "hatch_build.py"  # each package is built alone, so each has a copy


def version_of(package_root: Path, module: str) -> str:
    """The version in `_version.py`, which hatch and the module itself both read."""
    text = (package_root / "src" / module / "_version.py").read_text()
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise SystemExit(f'{package_root}: _version.py has no line `__version__ = "…"`')
    return match[1]


def problems(root: Path) -> list[str]:
    """One sentence for each thing that is out of step."""
    versions = {name: version_of(root / "packages" / name, module) for name, module in PACKAGES.items()}
    core_version = versions["megamoe-core"]
    found = [
        f"{name} is {version}, megamoe-core is {core_version}: set all three _version.py files to one version"
        for name, version in versions.items()
        if version != core_version
    ]
    for name in PACKAGES:
        package_root = root / "packages" / name
        project = tomllib.loads((package_root / "pyproject.toml").read_text())["project"]
        if name != "megamoe-core" and f"megamoe-core=={core_version}" not in project["dependencies"]:
            found.append(f"{name} must depend on megamoe-core=={core_version}, has {project['dependencies']}")
        if (package_root / "LICENSE").read_bytes() != (root / "LICENSE").read_bytes():
            found.append(f"{name}: LICENSE differs from the one at the top of the repository")
        if (package_root / BUILD_HOOK).read_bytes() != (root / "packages/megamoe-core" / BUILD_HOOK).read_bytes():
            found.append(f"{name}: {BUILD_HOOK} differs from megamoe-core's")
    if f"## [{core_version}]" not in (root / "CHANGELOG.md").read_text():
        found.append(f"CHANGELOG.md has no section for {core_version}")
    return found


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).parents[1]
    found = problems(root)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Check what `python -m build` left in a folder: contents, metadata, lockstep, and that the wheels install and import.

Usage: `python ci/check_wheels.py dist`. It installs into a temporary environment: that takes a network and a minute.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
PACKAGES = {"megamoe-core": "megamoe", "megamoe-cuda": "megamoe_cuda", "megamoe-rocm": "megamoe_rocm"}
SHIPPED = re.compile(r"\.(py|cuh|json)$")  # and py.typed; nothing else belongs into a wheel
CODE_OBJECTS = re.compile(r"\.(hsaco|cubin)$")  # kernels built ahead of time may be shipped, never sources of others
AHEAD_OF_TIME = "megamoe_rocm/code_objects/"  # from `megamoe-rocm compile`, not in git
EXECUTED = ROOT / "packages/megamoe-rocm/tests/code_objects.json"  # hashes of those that tests execute


def source_files(package_root: Path) -> set[str]:
    """What the wheel should hold of `src/`: everything there that git would not ignore."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"],
        cwd=package_root,
        capture_output=True,
        text=True,
        check=True,
    )
    return {str(PurePosixPath(line).relative_to("src")) for line in listing.stdout.splitlines()}


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def wheel_problems(path: Path, name: str, module: str, core_version: str) -> list[str]:
    """One sentence for each thing wrong with the wheel at `path`."""
    with zipfile.ZipFile(path) as wheel:
        files = {entry for entry in wheel.namelist() if not entry.endswith("/")}
        metadata = metadata_of(wheel)
    info = {entry for entry in files if ".dist-info/" in entry}
    payload = files - info
    built = {entry for entry in payload if entry.startswith(AHEAD_OF_TIME)} if name == "megamoe-rocm" else set()
    expected = source_files(ROOT / "packages" / name) | built | {f"{module}/_commit.py"}
    found = code_object_problems(path) if name == "megamoe-rocm" else []
    found += [f"{entry} is missing" for entry in sorted(expected - payload)]
    found += [f"{entry} does not belong there" for entry in sorted(payload - expected)]
    for entry in sorted(payload):
        if not (SHIPPED.search(entry) or CODE_OBJECTS.search(entry) or entry == f"{module}/py.typed"):
            found.append(f"{entry} is of a kind that no wheel ships")
        if "tests" in PurePosixPath(entry).parts:
            found.append(f"{entry} is a test")
    if f"{module}/py.typed" not in payload:
        found.append(f"{module}/py.typed is missing")
    if not any(entry.endswith("licenses/LICENSE") for entry in info):
        found.append("the licence is missing")
    if metadata["Version"] != core_version:
        found.append(f"version {metadata['Version']}, megamoe-core has {core_version}")
    if metadata["License-Expression"] != "Apache-2.0":
        found.append(f"licence expression {metadata['License-Expression']}, expected Apache-2.0")
    requirements = metadata.get_all("Requires-Dist") or []
    if name != "megamoe-core" and f"megamoe-core=={core_version}" not in requirements:
        found.append(f"does not require megamoe-core=={core_version}: {requirements}")
    return [f"{path.name}: {problem}" for problem in found]


def code_object_problems(path: Path, executed: Path = EXECUTED) -> list[str]:
    """One sentence for each code object of a wheel that is not one of those that tests execute, or is missing."""
    expected: dict[str, str] = json.loads(executed.read_text())
    with zipfile.ZipFile(path) as wheel:
        shipped = {
            PurePosixPath(entry).stem: hashlib.sha256(wheel.read(entry)).hexdigest()
            for entry in wheel.namelist()
            if entry.startswith(AHEAD_OF_TIME) and entry.endswith(".hsaco")
        }
    found = [f"code object {key} is missing: run `megamoe-rocm compile`" for key in sorted(expected.keys() - shipped)]
    found += [f"code object {key} is none that was executed" for key in sorted(shipped.keys() - expected)]
    changed = sorted(key for key in expected.keys() & shipped if shipped[key] != expected[key])
    return found + [f"code object {key} is not the one that was executed" for key in changed]


def sdist_problems(path: Path, module: str) -> list[str]:
    """One sentence for each thing missing from the source distribution at `path`."""
    with tarfile.open(path) as archive:
        files = {str(PurePosixPath(*PurePosixPath(member).parts[1:])) for member in archive.getnames()}
    wanted = {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", "hatch_build.py", f"src/{module}/_commit.py"}
    return [f"{path.name}: {name} is missing" for name in sorted(wanted - files)]


def find_one(folder: Path, pattern: str) -> Path:
    """The only file of that pattern."""
    matches = sorted(folder.glob(pattern))
    if len(matches) != 1:
        raise SystemExit(f"{folder} has {len(matches)} files of {pattern}, expected one: run ci/build.sh")
    return matches[0]


def install_elsewhere(wheels: list[Path]) -> None:
    """Install the wheels into an environment of their own and use them from a folder outside of the repository."""
    constraints = ROOT / "ci/constraints.txt"
    torch = next(line for line in constraints.read_text().splitlines() if line.startswith("torch=="))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = str(Path(folder, "bin/python"))
        pip = [python, "-m", "pip", "install", "--quiet", "-c", str(constraints)]
        subprocess.run([*pip, torch], check=True)
        subprocess.run([*pip, *map(str, wheels)], check=True)
        code = "\n".join(
            [
                "import importlib.metadata, megamoe, megamoe_cuda, megamoe_rocm",
                "assert megamoe.__version__ == megamoe_cuda.__version__ == megamoe_rocm.__version__",
                "for entry in importlib.metadata.entry_points(group='megamoe.backends'):",
                "    print(entry.name, *entry.load()().probe())",
            ]
        )
        subprocess.run([python, "-c", code], check=True, cwd=folder, env=environment)
        doctor = [str(Path(folder, "bin/megamoe")), "doctor", "--json"]
        report = subprocess.run(
            doctor, check=True, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
        ).stdout
        print(report)
        describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        checkout = subprocess.run(describe, check=True, capture_output=True, text=True).stdout.strip()
        if (commit := json.loads(report)["commit"]) != checkout:
            raise SystemExit(f"the wheels say that they are of commit {commit}, the checkout is {checkout}")


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0])
    wheels = {name: find_one(folder, f"{name.replace('-', '_')}-*.whl") for name in PACKAGES}
    with zipfile.ZipFile(wheels["megamoe-core"]) as core:
        core_version = metadata_of(core)["Version"]
    found = []
    for name, module in PACKAGES.items():
        found += wheel_problems(wheels[name], name, module, core_version)
        found += sdist_problems(find_one(folder, f"{name.replace('-', '_')}-*.tar.gz"), module)
    for line in found:
        print(line, file=sys.stderr)
    if found:
        return 1
    install_elsewhere(list(wheels.values()))
    print(f"3 wheels and 3 sdists of {core_version}: contents, metadata, installation and import are right")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

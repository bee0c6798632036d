"""Wheels name their commit; their check tells a code object that no test has executed from those that one has."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
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


def run(*command: str, cwd: Path, **environment: str) -> str:
    ran = subprocess.run(command, cwd=cwd, env=os.environ | environment, check=True, capture_output=True, text=True)
    return ran.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with megamoe-core in it, of one commit."""
    package = tmp_path / "checkout/packages/megamoe-core"
    shutil.copytree(ROOT / "packages/megamoe-core", package, ignore=shutil.ignore_patterns("tests", "__pycache__"))
    commit(tmp_path / "checkout", ".")
    return tmp_path / "checkout"


def commit(folder: Path, files: str) -> str:
    """Make the folder a repository with one commit of these files; returns it."""
    author = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    run("git", "init", "--quiet", cwd=folder)
    run("git", "add", files, cwd=folder)
    run("git", *author, "commit", "--quiet", "--message", "all", cwd=folder)
    return run("git", "describe", "--always", cwd=folder)


def build(package: Path, target: str, into: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(into), cwd=package)
    (made,) = into.iterdir()
    return made


def test_a_wheel_names_the_commit_it_was_built_from(checkout: Path, tmp_path: Path) -> None:
    """Also one that is built from a source distribution, and where another checkout is around what is installed."""
    package = checkout / "packages/megamoe-core"
    built_from = run("git", "describe", "--always", cwd=checkout)
    with tarfile.open(build(package, "sdist", tmp_path / "sdist")) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # older Pythons have none
        archive.extractall(tmp_path / "elsewhere/unpacked")
    assert commit(tmp_path / "elsewhere", ".") != built_from
    (unpacked,) = (tmp_path / "elsewhere/unpacked").iterdir()
    (package / "README.md").write_text("changed")
    wheels = {
        built_from: build(unpacked, "wheel", tmp_path / "of-sdist"),
        f"{built_from}-dirty": build(package, "wheel", tmp_path / "of-changed"),
    }
    for expected, wheel in wheels.items():
        site = tmp_path / "elsewhere" / expected
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        assert named_by(site) == expected
    assert not (package / "src/megamoe/_commit.py").exists()


def test_sources_without_their_repository_name_no_commit(checkout: Path, tmp_path: Path) -> None:
    """Those around are another's: a checkout that holds an unpacked archive, a project with a virtual environment."""
    shutil.rmtree(checkout / ".git")
    (checkout / "other").write_text("")
    commit(checkout, "other")
    package = checkout / "packages/megamoe-core"
    with zipfile.ZipFile(build(package, "wheel", tmp_path / "wheel")) as wheel:
        assert "megamoe/_commit.py" not in wheel.namelist()
    assert named_by(package / "src") == "unknown"


def named_by(site: Path) -> str:
    """What core alone says there: its own path comes first, and the other packages are told to be missing."""
    program = "import megamoe.bench.commit as c; c.PACKAGES = ('megamoe',); print(c.current_commit())"
    return run(sys.executable, "-c", program, cwd=site, PYTHONPATH=str(site))

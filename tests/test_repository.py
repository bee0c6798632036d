"""The rules of the house that span packages: import layers, versions in lockstep, and what CI calls."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE_SRC = ROOT / "packages/megamoe-core/src"

# A module may import those of its own layer and of the layers above it in this list.
LAYERS = [
    ("_version", "errors", "env", "problem", "schedule", "formats"),
    ("stages", "layouts", "symm"),
    (
        "tensors",
        "backend",
        "call_checks",
        "opening",
        "device_session",
        "registry",
        "expert_map",
        "shared_experts",
        "meter",
    ),
    ("reference", "ops", "testing", "bench", "checkpoint", "launch", "integrations", "cli", "__main__"),
    ("__init__",),
]
LAYER_OF = {name: index for index, names in enumerate(LAYERS) for name in names}

GPU_LIBRARIES = {"cuda", "cupy", "hip", "mori", "nvshmem", "pynvml", "triton"}


def core_modules() -> Iterator[tuple[str, Path]]:
    """Dotted name and file of every module of megamoe-core."""
    for path in sorted((CORE_SRC / "megamoe").rglob("*.py")):
        parts = path.relative_to(CORE_SRC).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts), path


MODULES = dict(core_modules())


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere, also inside functions and for type checkers only."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            # `from megamoe import x` may name a module; `from megamoe.x import y` reads module x in any case.
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            names |= submodules or {str(node.module)}
    return names


def component(module: str) -> str:
    """`megamoe.formats.e8m0` belongs to `formats`; names that megamoe/__init__.py offers to `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_layers(module: str) -> None:
    assert component(module) in LAYER_OF, f"{module} has no layer: give {component(module)} one in LAYERS"
    layer = LAYER_OF[component(module)]
    for name in imports(MODULES[module]):
        if name.split(".")[0] == "megamoe":
            assert LAYER_OF[component(name)] <= layer, f"{module} imports {name}, which is in a layer above it"


def reachable_imports(module: str) -> set[str]:
    """Everything that importing `module` imports, through other modules of megamoe."""
    seen: set[str] = set()
    pending = [module]
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += imports(MODULES[name]) if name in MODULES else []
    return seen


@pytest.mark.parametrize("module", [name for name in MODULES if component(name) == "schedule"])
def test_schedule_is_pure_python(module: str) -> None:
    """Planning runs where torch is not installed or too slow to import, and a device mirrors it line by line."""
    roots = {name.split(".")[0] for name in reachable_imports(module)}
    assert roots <= {"megamoe"} | sys.stdlib_module_names


def test_importing_megamoe_loads_no_gpu_library() -> None:
    """Compared with torch alone, which loads some itself in CUDA builds; and no context may be made."""
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import megamoe\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "megamoe" in loaded
    assert not loaded & GPU_LIBRARIES


def lockstep_problems(root: Path) -> list[str]:
    found: list[str] = runpy.run_path(str(ROOT / "ci/check_lockstep.py"))["problems"](root)
    return found


def test_packages_are_in_lockstep() -> None:
    assert lockstep_problems(ROOT) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        ("packages/megamoe-rocm/src/megamoe_rocm/_version.py", "0.1.0", "0.1.1", "megamoe-rocm is 0.1.1"),
        ("packages/megamoe-cuda/pyproject.toml", "megamoe-core==0.1.0", "megamoe-core>=0.1.0", "must depend on"),
        ("packages/megamoe-core/LICENSE", "Apache License", "Other License", "LICENSE differs"),
        ("CHANGELOG.md", "[0.1.0]", "[0.0.9]", "no section for 0.1.0"),
    ],
    ids=["version", "dependency", "licence", "changelog"],
)
def test_lockstep_check_finds(file: str, old: str, new: str, complaint: str, tmp_path: Path) -> None:
    for name in ("packages", "LICENSE", "CHANGELOG.md"):
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    broken = tmp_path / file
    text = broken.read_text()
    assert old in text
    broken.write_text(text.replace(old, new))
    (problem,) = lockstep_problems(tmp_path)
    assert complaint in problem


def test_pin_check_finds_what_is_not_pinned() -> None:
    check = runpy.run_path(str(ROOT / "ci/check_pins.py"))
    pinned = check["pins"]("# comment\ntorch==2.13.0\nml_dtypes==0.6.0\n")
    assert check["problems"]({"torch": "2.13.0+cpu", "ml-dtypes": "0.6.0", "pip": "1"}, pinned) == []
    assert len(check["problems"]({"torch": "2.13.1", "left-pad": "1.0"}, pinned)) == 2


def gpu_node(folder: Path, index: int, version: int) -> None:
    node = folder / str(index)
    node.mkdir()
    (node / "properties").write_text(f"simd_count 1024\ngfx_target_version {version}\n")


def test_rocm_hardware_check_reads_the_kernel_drivers_list(tmp_path: Path) -> None:
    missing_rocm = runpy.run_path(str(ROOT / "ci/hardware.py"))["missing_rocm"]
    assert "does not exist" in missing_rocm(tmp_path / "absent")
    gpu_node(tmp_path, 0, 0)  # a CPU is a node too
    assert "no GPU" in missing_rocm(tmp_path)
    gpu_node(tmp_path, 1, 90402)  # gfx942
    assert "90402" in missing_rocm(tmp_path)
    gpu_node(tmp_path, 2, 90500)
    assert missing_rocm(tmp_path) is None


def test_session_without_its_hardware_fails_unless_told_to_skip(tmp_path: Path) -> None:
    """The sentence names the session and the reason; the environment is not even made."""
    no_gpu = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "NOXPATH": str(ROOT)}
    if shutil.which("nvidia-smi", path=no_gpu["PATH"]):
        pytest.skip("this machine has an NVIDIA driver")
    nox = [sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), "--envdir", str(tmp_path), "--no-venv"]
    command = [*nox, "-s", "conformance-cuda"]
    failed = subprocess.run(command, env=no_gpu, capture_output=True, text=True, check=False)
    assert failed.returncode != 0
    assert "conformance-cuda needs hardware that this machine lacks: no NVIDIA driver" in failed.stderr
    command += ["--", "--skip-missing-hardware"]
    skipped = subprocess.run(command, env=no_gpu, capture_output=True, text=True, check=False)
    assert skipped.returncode == 0, skipped.stderr


def test_ci_calls_the_readmes_commands() -> None:
    """What the README promises about a fresh clone is what CI runs, word for word."""
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"```sh\n(.*?)```", readme, re.DOTALL)
    assert block is not None
    demo, tests = (shlex.split(line) for line in block[1].strip().splitlines())
    assert demo[:-1] == tests[:-1]
    assert (demo[-1], tests[-1]) == ("demo", "tests")
    assert tests in [shlex.split(line, comments=True) for line in (ROOT / ".ci/run").read_text().splitlines()]

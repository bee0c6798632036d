"""Every check of the repository, one session each: `nox -l` lists them, a bare `nox` runs those that need no GPU.

A session makes an environment with the versions of ci/constraints.txt and then calls a step of ci/, so each step can
also be run by hand, in any environment that has what it imports. Arguments after `--` go to the step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

CONSTRAINTS = Path("ci/constraints.txt").resolve()
CORE, CUDA, ROCM = "packages/megamoe-core", "packages/megamoe-cuda", "packages/megamoe-rocm"
# Not in ci/constraints.txt, and installed without dependencies: CUDA builds of torch insist on an older Triton, while
# the kernels of megamoe-rocm are written for this one. On a CPU nothing of torch uses it.
TRITON = "triton==3.9.0"
SKIP_MISSING_HARDWARE = "--skip-missing-hardware"  # after `--`, or MEGAMOE_SKIP_MISSING_HARDWARE=1


def pinned(name: str) -> str:
    """The line of ci/constraints.txt for the distribution `name`."""
    return next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith(f"{name}=="))


def install(session: nox.Session, *requirements: str) -> None:
    """Install requirements at the pinned versions."""
    session.install("-c", str(CONSTRAINTS), *requirements)


def install_packages(session: nox.Session, *packages: str, tools: tuple[str, ...] = ()) -> None:
    """Install packages of this repository, editable, with what they depend on, and then the tools a step calls.

    torch comes first and by its exact version: asked for through a range, pip may take another build of it, gigabytes
    larger, from another index.
    """
    install(session, pinned("torch"), "hatchling", "editables", *tools)
    editables = [argument for package in packages for argument in ("-e", package)]
    install(session, "--no-build-isolation", *editables)


def step(session: nox.Session, script: str, *arguments: str) -> None:
    """Run a script of ci/ with the session's environment first on the path."""
    session.run("bash", f"ci/{script}", *arguments, external=True)


def require_hardware(session: nox.Session, kind: str) -> list[str]:
    """End the session, before anything is installed, where its GPUs are missing; returns the arguments for the step."""
    check = subprocess.run([sys.executable, "ci/hardware.py", kind], capture_output=True, text=True, check=False)
    if check.returncode != 0:
        sentence = f"{session.name} needs hardware that this machine lacks: {check.stderr.strip()}"
        if SKIP_MISSING_HARDWARE in session.posargs or os.environ.get("MEGAMOE_SKIP_MISSING_HARDWARE") == "1":
            session.skip(sentence)
        session.error(f"{sentence}. To skip it: nox -s {session.name} -- {SKIP_MISSING_HARDWARE}")
    return [argument for argument in session.posargs if argument != SKIP_MISSING_HARDWARE]


@nox.session
def demo(session: nox.Session) -> None:
    """Run one MoE layer of a DeepSeek-V3-style FP8 checkpoint over four processes."""
    install_packages(session, CORE)
    step(session, "demo.sh", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Unit tests of all packages, and the tests that span them."""
    tools = ("nox", "torchao", "pytest-xdist")
    install_packages(session, f"{CORE}[test,transformers,plots]", f"{CUDA}[compile-cu13]", ROCM, tools=tools)
    session.install("--no-deps", TRITON)
    session.run("python", "ci/check_pins.py")
    step(session, "tests.sh", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's rules and formatting, and the packages' lockstep."""
    install(session, "ruff")
    step(session, "lint.sh", *session.posargs)


@nox.session
def typecheck(session: nox.Session) -> None:
    """mypy --strict on the host code of all packages."""
    install_packages(session, f"{CORE}[test]", tools=("mypy", "nox"))
    step(session, "typecheck.sh", *session.posargs)


@nox.session(name="conformance-reference")
def conformance_reference(session: nox.Session) -> None:
    """The conformance matrix on the CPU reference."""
    install_packages(session, f"{CORE}[test]")
    if session.posargs:
        step(session, "conformance.sh", "reference", *session.posargs)
        return
    step(session, "conformance.sh", "reference")
    # The protocol once more between processes, which can be late, time out and be killed one by one.
    step(session, "conformance.sh", "reference", "--ranks=processes", "-m", "smoke or own_ranks or processes")


@nox.session(name="conformance-cuda", default=False)
def conformance_cuda(session: nox.Session) -> None:
    """The conformance matrix on the CUDA kernel; needs a Hopper GPU."""
    arguments = require_hardware(session, "cuda")
    install_packages(session, f"{CORE}[test]", f"{CUDA}[cu13]")
    step(session, "conformance.sh", "cuda", *arguments)


@nox.session(name="conformance-rocm", default=False, venv_params=["--system-site-packages"])
def conformance_rocm(session: nox.Session) -> None:
    """The conformance matrix on the ROCm kernels; needs a gfx950 GPU and a ROCm build of torch in the base Python."""
    arguments = require_hardware(session, "rocm")
    install_rocm(session)
    session.env["MEGAMOE_ROCM_DEVICE"] = "gfx950"  # all that is written is run, whatever is claimed
    heap = os.environ.get("MORI_SHMEM_HEAP_SIZE", "32G")  # a rank's process opens sessions of all sizes
    session.env["MORI_SHMEM_HEAP_SIZE"] = heap
    step(session, "conformance.sh", "rocm", *arguments)


def install_rocm(session: nox.Session) -> None:
    """Install core and the ROCm backend beside the ROCm build of torch that is there, from an index of its own.

    hip-python of ROCm's major version, since others load other libraries. Triton into the session's environment, where
    it hides torch's own: the tests' and the benchmark's kernels that no wheel has are compiled with it.
    """
    check = "import sys, torch; print(torch.version.hip or sys.exit('torch is there, but not a ROCm build of it'))"
    version = str(session.run("python", "-c", check, silent=True)).split()[-1]  # warnings come first
    major = version.split(".")[0]
    packages = ["-e", f"{CORE}[test]", "-e", f"{ROCM}[mori]", f"hip-python=={major}.*"]
    session.install(*packages, env={"PIP_CONSTRAINT": ""})
    session.install("--no-deps", TRITON, env={"PIP_CONSTRAINT": ""})


@nox.session(name="validate-mi355x", default=False, venv_params=["--system-site-packages"])
def validate_mi355x(session: nox.Session) -> None:
    """Everything that an MI355X has to show, into one JSON file and one report; needs what conformance-rocm needs."""
    arguments = require_hardware(session, "rocm")
    install_rocm(session)
    session.run("megamoe-rocm", "validate", *arguments)


@nox.session(name="rehearse-rocm", default=False)
def rehearse_rocm(session: nox.Session) -> None:
    """The conformance matrix on the ROCm kernels without their GPU: `-- interpreter|isa|nvidia [pytest arguments]`."""
    device, *arguments = session.posargs or ["interpreter", "-m", "smoke"]
    install_packages(session, f"{CORE}[test]", ROCM)
    session.install("--no-deps", TRITON)
    step(session, "rehearse-rocm.sh", device, *arguments)


@nox.session(name="deletions-rocm", default=False)
def deletions_rocm(session: nox.Session) -> None:
    """Delete instructions of the ROCm kernels, one at a time: `-- FOLDER [KERNEL ...] [--sample N]`; all take hours."""
    install_packages(session, f"{CORE}[test]", ROCM)
    session.install("--no-deps", TRITON)
    session.run("python", f"{ROCM}/tests/isa/deletions.py", *(session.posargs or ["build/deletions"]))


def test_engine(session: nox.Session, engine: str) -> None:
    """Test an adapter against a serving engine that is installed without its kernels."""
    install(session, pinned("torch"), "hatchling", "editables")
    # Versions that suit the engine, not those of ci/constraints.txt: each engine asks for a transformers of its own.
    session.install("--no-deps", "-r", f"ci/engines/{engine}.txt", env={"PIP_CONSTRAINT": ""})
    session.install("--no-deps", "--no-build-isolation", "-e", CORE)
    step(session, "engines.sh", engine, *session.posargs)


@nox.session(name="engines-vllm", default=False)
def engines_vllm(session: nox.Session) -> None:
    """The adapter for vLLM against the release that it was written for; on a CPU, 3.5 GB of downloads."""
    test_engine(session, "vllm")


@nox.session(name="engines-sglang", default=False)
def engines_sglang(session: nox.Session) -> None:
    """The adapter for SGLang against the release that it was written for; on a CPU, 2.5 GB once installed."""
    test_engine(session, "sglang")


@nox.session(name="compile-cuda")
def compile_cuda(session: nox.Session) -> None:
    """Compile every CUDA kernel for sm_90a, without a GPU; a spill or a count above its budget fails."""
    install_packages(session, CORE, f"{CUDA}[compile-cu13]")
    step(session, "compile-cuda.sh", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Build wheels and sdists, check their contents, install them elsewhere."""
    install_packages(session, CORE, ROCM, tools=("build",))
    session.install("--no-deps", TRITON)
    step(session, "build.sh", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a broken link or a page outside of the navigation fails."""
    install(session, "mkdocs", "mkdocs-material")
    step(session, "docs.sh", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Time a layer with `megamoe bench`, on the GPU backend that is usable here or on the CPU reference."""
    install_packages(session, CORE)
    session.run("megamoe", "bench", *session.posargs)

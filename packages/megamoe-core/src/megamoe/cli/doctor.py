"""`megamoe doctor`: what is installed here, and which backend would run."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table

from megamoe import env
from megamoe._version import __version__
from megamoe.bench.commit import current_commit
from megamoe.cli.console import bytes_text, command, out, say
from megamoe.registry import SelectionReport, selection_report

PACKAGES = ("megamoe-core", "megamoe-cuda", "megamoe-rocm", "torch", "numpy", "safetensors")
OPTIONAL_PACKAGES = (
    "nvshmem4py-cu12",
    "nvshmem4py-cu13",
    "cuda-core",
    "hip-python",
    "amd-mori",
    "triton",
    "transformers",
)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU that torch sees."""

    name: str
    arch: str
    memory_bytes: int


@command
def doctor(
    backend: Annotated[str, typer.Option(help="Ask for this backend instead of auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Say what is installed, which backend would be chosen, and why not the others."""
    versions, gpus, report = installed(), find_gpus(), selection_report(backend)
    if as_json:
        out.print_json(json.dumps(_as_json(versions, gpus, report)))
        return
    python = f"Python {platform.python_version()} on {platform.machine()}"
    say(f"[bold]megamoe {__version__}[/] (commit {current_commit()}), {python}")
    say(", ".join(f"{name} {found}" for name, found in versions.items() if found))
    missing = [name for name in OPTIONAL_PACKAGES if not versions[name]]
    if missing:
        say(f"not installed, and optional: {', '.join(missing)}")
    say(_toolkit())
    for name, value in env.given().items():
        say(escape(f"{name}={value}") + ("" if name in env.VARIABLES else " [bold yellow]is read by nothing[/]"))
    for index, gpu in enumerate(gpus):
        say(f"GPU {index}: {gpu.name}, {gpu.arch}, {bytes_text(gpu.memory_bytes)}")
    table = Table("backend", "package", "verdict", "detail")
    table.columns[-1].overflow = "fold"  # a long word is broken, not cut: details name variables and commands
    for candidate in report.candidates:
        chosen = "[bold green]chosen[/]" if candidate.name == report.chosen else str(candidate.verdict.reason)
        table.add_row(candidate.name, candidate.package, chosen, escape(candidate.verdict.detail))
    out.print(table)
    say(f"would run: [bold]{report.chosen or 'nothing'}[/] ({report.why})")


def installed() -> dict[str, str | None]:
    """Versions of the packages that matter, None where one is missing."""
    return {name: _version(name) for name in (*PACKAGES, *OPTIONAL_PACKAGES)}


def find_gpus() -> list[Gpu]:
    """GPUs that torch sees."""
    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        Gpu(
            name=gpu.name,
            arch=gpu.gcnArchName if torch.version.hip else f"sm_{gpu.major}{gpu.minor}",
            memory_bytes=gpu.total_memory,
        )
        for gpu in properties
    ]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _toolkit() -> str:
    if torch.version.cuda:
        return f"torch was built for CUDA {torch.version.cuda}" + (
            "" if torch.cuda.is_available() else "; it sees no GPU"
        )
    if torch.version.hip:
        return f"torch was built for ROCm {torch.version.hip}" + (
            "" if torch.cuda.is_available() else "; it sees no GPU"
        )
    return "torch was built without GPU support"


def _as_json(versions: dict[str, str | None], gpus: list[Gpu], report: SelectionReport) -> dict[str, object]:
    return {
        "version": __version__,
        "commit": current_commit(),
        "python": platform.python_version(),
        "packages": versions,
        "torch_cuda": torch.version.cuda,
        "torch_hip": torch.version.hip,
        "gpus": [asdict(gpu) for gpu in gpus],
        "environment": env.given(),
        "chosen": report.chosen,
        "why": report.why,
        "backends": [
            {
                "name": candidate.name,
                "package": candidate.package,
                "ok": candidate.verdict.ok,
                "reason": str(candidate.verdict.reason),
                "detail": candidate.verdict.detail,
            }
            for candidate in report.candidates
        ],
    }

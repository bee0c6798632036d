"""`megamoe-rocm validate`: what an owner of a gfx950 runs once to know whether everything works on it.

    machine       the GPU, its runtime and libraries
    code objects  every kernel of every configuration: compiled, compared with the packaged one where there is one, and
                  its registers, spills, scratch and LDS
    gates         the seed's operator gates, on the layers that it names
    matrix        the conformance matrix of a4w4 and a8w4 with virtual ranks, and over processes where there are GPUs
    bench         suite `seed-gfx950`: times, beside those of the same layer unfused over Mori
    serving       where a plan of it is given: throughput, latencies and GSM8K of served models (`megamoe_rocm.serving`)

`--step` chooses among them; the machine is looked at all the same. One JSON file holds all results, one Markdown file
says the same for people; both are written after each step. On a stand-in (`--device`) the same steps run smaller: a
rehearsal, which the report says.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from megamoe.bench.commit import current_commit
from megamoe.bench.suites import SuiteOptions
from megamoe.errors import BackendUnavailableError, ConfigError, MegaMoEError
from megamoe_rocm import __version__, rungs
from megamoe_rocm.rungs import Rung
from megamoe_rocm.serving import AccuracyRow, ServingPlan, ServingRow
from megamoe_rocm.serving import report as serving_report
from megamoe_rocm.serving import run as run_serving
from megamoe_rocm.symm_mori import HEAP_OF_MANY_SESSIONS, HEAP_SIZE

PACKAGES = ("torch", "triton", "hip-python", "amd-mori", "megamoe-core", "megamoe-rocm")
LAYERS = {Rung.GFX950: "smoke or shapes or edge or stress", Rung.NVIDIA: "smoke or shapes or edge or stress"}
REHEARSED_LAYER = "smoke"
REHEARSED_CASES = "plain-a4w4-ep2 or plain-a8w4-fp8p2p-ep2"
MATRIX_TIMEOUT_S = 7200.0
LDS_BYTES = 160 * 1024  # of a compute unit
COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped)")
TAIL = 4000  # characters of a failed run's output
NOT_ASKED_FOR = "not asked for"
SERVING = "serving"
CHOICES = ("code-objects", "gates", "matrix", "bench")  # of `--step`


class StepFailedError(MegaMoEError):
    """A step ran and found something wrong; `details` is what it knows."""

    def __init__(self, message: str, details: dict[str, Any]) -> None:
        super().__init__(message)
        self.details = details


@dataclass(kw_only=True)
class Step:
    """What came of one step, and why: "passed", "failed", "not run", or "not asked for"."""

    name: str
    outcome: str
    seconds: float = 0.0
    why: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Validation:
    """The whole result."""

    rung: str
    version: str
    commit: str
    date: str
    host: str
    steps: list[Step] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every step that was asked for ran and passed."""
        return all(step.outcome in ("passed", NOT_ASKED_FOR) for step in self.steps)

    def write(self, folder: Path) -> None:
        """Write validation.json and validation.md."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "validation.json").write_text(json.dumps({**asdict(self), "passed": self.passed}, indent=1) + "\n")
        (folder / "validation.md").write_text(report(self))


def validate(
    folder: Path,
    *,
    only: Collection[str] = (),
    serving: ServingPlan | None = None,
    on_step: Callable[[Step], None],
) -> Validation:
    """Run every step on the rung that is set, whatever became of the earlier ones.

    Args:
        folder: where the results go.
        only: steps to run beside the first, of CHOICES; empty for all.
        serving: what to serve in the last step; None leaves it out.
        on_step: told of each step when it has ended.

    Raises:
        ConfigError: `only` names something else; nothing has run.
    """
    if unknown := set(only) - set(CHOICES):
        raise ConfigError("--step is no step of validate", got=", ".join(sorted(unknown)), expected=", ".join(CHOICES))
    result = Validation(
        rung=rungs.current().value,
        version=__version__,
        commit=current_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        host=platform.node(),
    )
    # With which of CHOICES it runs; None: with any.
    steps: list[tuple[str | None, str, Callable[[], dict[str, Any]]]] = [
        (None, "machine", machine),
        ("code-objects", "code objects", code_objects),
        ("gates", "gates", gates),
        ("matrix", "matrix, virtual ranks", lambda: matrix("--ranks=virtual")),
        ("matrix", "matrix, processes", lambda: matrix("--ranks=processes")),
        ("bench", "bench", bench),
    ]
    if serving is not None:
        steps.append((None, SERVING, lambda: serve(serving, folder / "serving")))
    for choice, name, act in steps:
        if only and choice is not None and choice not in only:
            result.steps.append(Step(name=name, outcome=NOT_ASKED_FOR, why="--step leaves it out"))
            continue
        step = _reason_not_to_run(name, result) or _run(name, act)
        result.steps.append(step)
        result.write(folder)
        on_step(step)
    if serving is None:
        result.steps.append(Step(name=SERVING, outcome=NOT_ASKED_FOR, why="--serving PLAN.json asks for it"))
        result.write(folder)
    return result


def _reason_not_to_run(name: str, result: Validation) -> Step | None:
    """What needs something that an earlier step found missing."""
    if result.steps and result.steps[0].outcome == "failed" and name != "code objects":
        return Step(name=name, outcome="not run", why="the machine can't run the kernels")
    if name == "matrix, processes":
        if rungs.current() is Rung.ISA:
            return Step(name=name, outcome="not run", why="the instruction interpreter runs all ranks in one process")
        if not rungs.is_cpu(rungs.current()) and _num_gpus() < 2:
            return Step(name=name, outcome="not run", why="one GPU: ranks as processes need two")
    return None


def _run(name: str, act: Callable[[], dict[str, Any]]) -> Step:
    start = time.perf_counter()
    try:
        details = act()
    except StepFailedError as error:
        step = Step(name=name, outcome="failed", why=str(error), details=error.details)
    except Exception as error:  # the other steps still say something
        step = Step(name=name, outcome="failed", why=f"{type(error).__name__}: {error}")
    else:
        step = Step(name=name, outcome="passed", details=details)
    step.seconds = round(time.perf_counter() - start, 1)
    return step


def machine() -> dict[str, Any]:
    """The GPUs, the libraries, and the backend's own verdict."""
    from megamoe_rocm.probe import look, probe

    found: dict[str, Any] = {"python": platform.python_version(), "versions": {}, "gpus": []}
    for package in PACKAGES:
        try:
            found["versions"][package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found["versions"][package] = None
    found["driver"] = asdict(look())
    verdict = probe(rungs.current())
    if not verdict.ok:
        raise StepFailedError(f"{verdict.reason}: {verdict.detail}", found)
    if rungs.current() is Rung.GFX950:
        from megamoe_rocm.runtime.hip_runtime import query

        found["gpus"] = [asdict(query(index)) for index in range(_num_gpus())]
    return {**found, "verdict": verdict.detail}


def code_objects() -> dict[str, Any]:
    """Every kernel for gfx950: its hash and what it takes. The same on every rung: it needs no GPU."""
    if importlib.util.find_spec("triton") is None:
        raise StepFailedError(
            "Triton is missing, in which kernels are written: ROCm builds of PyTorch bring it, elsewhere pip install "
            "megamoe-rocm[triton]",
            {},
        )
    code = "import json, megamoe_rocm.validate as v; print(json.dumps(v.list_code_objects()))"
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=compiled, capture_output=True, text=True, check=False)
    if done.returncode:
        cause = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise StepFailedError(
            f"kernels are neither packaged nor can they be compiled: {cause}",
            {"output": (done.stdout + done.stderr)[-TAIL:]},
        )
    found = json.loads(done.stdout.splitlines()[-1])
    bad = [
        each["kernel"]
        for each in found
        if each["vgpr_spills"] or each["scratch_bytes"] or each["lds_bytes"] > LDS_BYTES or each["reproduced"] is False
    ]
    if bad:
        raise StepFailedError(
            f"{len(bad)} kernels spill, take too much LDS, or are not as packaged: {bad}", {"kernels": found}
        )
    return {"kernels": found}


def list_code_objects() -> list[dict[str, Any]]:
    """Kernel, hash and resources of each code object, in a process in which Triton compiles.

    `reproduced` says whether compiling it here gives the packaged bytes; None where one of the two is not there.
    """
    from megamoe_rocm.aot.errors import CodeObjectError, ToolchainError
    from megamoe_rocm.code_store import CodeStore, compile_launch
    from megamoe_rocm.standard import standard_launches

    found = []
    for name, launch in standard_launches():
        try:
            packaged = CodeStore.open().find(launch)
        except CodeObjectError:  # no folder, or not in it
            packaged = None
        try:
            compiled = compile_launch(launch)
        except ToolchainError:
            if packaged is None:
                raise
            compiled = None
        code = packaged or compiled
        assert code is not None
        reproduced = packaged.sha256 == compiled.sha256 if packaged is not None and compiled is not None else None
        found.append({"kernel": name, "sha256": code.sha256, "reproduced": reproduced, **asdict(code.resources)})
    return found


def gates() -> dict[str, Any]:
    """The seed's operator gates."""
    from megamoe_rocm.gates import measure

    rows = list(measure())
    found = {"gates": [asdict(row) for row in rows]}
    failed = [row for row in rows if not row.passed]
    if failed:
        worst = max(failed, key=lambda row: row.rel_l2)
        raise StepFailedError(
            f"{len(failed)} of {len(rows)} layers are too far from the oracle: "
            f"{worst.mode} over {worst.transport} {worst.rel_l2:.4f}, gate {worst.limit}",
            found,
        )
    return found


def matrix(ranks: str) -> dict[str, Any]:
    """The conformance matrix, in a process of its own, with the layers that this rung has time for."""
    if importlib.util.find_spec("pytest") is None:
        raise StepFailedError("pytest is missing: pip install 'megamoe-rocm[validate]'", {})
    rung = rungs.current()
    device = "cpu" if rungs.is_cpu(rung) else "cuda"
    selection = ["-m", LAYERS.get(rung, REHEARSED_LAYER)]
    if rung not in LAYERS:
        selection += ["-k", REHEARSED_CASES, "--ep-sizes=2"]
    command = [sys.executable, "-m", "pytest", "-p", "megamoe_rocm.claimed", "-p", "megamoe.testing.plugin", "-q"]
    command += ["--backend=rocm", f"--device={device}", ranks, *selection]
    command += ["--tb=short", "-W", "ignore", "-p", "no:cacheprovider", "--pyargs", "megamoe.testing.conformance"]
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if rung is Rung.INTERPRETER else {})
    environment.setdefault(HEAP_SIZE, HEAP_OF_MANY_SESSIONS)  # a process opens sessions of all sizes
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=MATRIX_TIMEOUT_S, check=False
    )
    counts = {kind: int(number) for number, kind in COUNTS.findall(done.stdout.splitlines()[-1] if done.stdout else "")}
    details = {"command": " ".join(command[1:]), **counts}
    if done.returncode or not counts.get("passed"):
        details["output"] = (done.stdout + done.stderr)[-TAIL:]
        raise StepFailedError(f"pytest ended with status {done.returncode}", details)
    return details


def bench() -> dict[str, Any]:
    """Times of the seed's suite; on a stand-in that it runs, no more."""
    from megamoe_rocm.bench import run

    repeats = 1 if rungs.is_cpu(rungs.current()) else SuiteOptions().repeats
    rows: list[dict[str, Any]] = []
    try:
        rows.extend(asdict(row) for row in run(SuiteOptions(repeats=repeats)))
    except BackendUnavailableError as error:  # of the pipeline beside the kernels; rows are there
        raise StepFailedError(str(error), {"rows": rows}) from error
    return {"rows": rows}


def serve(plan: ServingPlan, folder: Path) -> dict[str, Any]:
    """A serving run."""
    rows: dict[str, list[dict[str, Any]]] = {"serving": [], "accuracy": []}

    def keep(row: ServingRow | AccuracyRow) -> None:
        rows["serving" if isinstance(row, ServingRow) else "accuracy"].append(asdict(row))

    try:
        return run_serving(plan, folder, on_row=keep)
    except MegaMoEError as error:
        raise StepFailedError(str(error), dict(rows)) from error


def report(result: Validation) -> str:
    """The result as Markdown."""
    rehearsal = "" if result.rung == Rung.GFX950 else f" A rehearsal on {rungs.WHAT[Rung(result.rung)]}: no gfx950 ran."
    lines = [
        f"# megamoe-rocm {result.version} on {result.host}",
        "",
        f"Commit {result.commit}, {result.date}, MEGAMOE_ROCM_DEVICE={result.rung}.{rehearsal}",
        f"**{_verdict(result)}**",
        "",
        "| step | outcome | seconds | |",
        "|---|---|---|---|",
    ]
    lines += [f"| {step.name} | {step.outcome} | {step.seconds} | {_summary(step)} |" for step in result.steps]
    for step in result.steps:
        lines += _tables(step)
    for step in result.steps:
        if "output" in step.details:
            lines += ["", f"## {step.name}", "", "```", step.details["output"], "```"]
    return "\n".join(lines) + "\n"


def _verdict(result: Validation) -> str:
    if not result.passed:
        return "Not everything passed."
    left_out = [step.name for step in result.steps if step.outcome == NOT_ASKED_FOR and step.name != SERVING]
    return f"Passed, with {'; '.join(left_out)} left out." if left_out else "Everything passed."


def _tables(step: Step) -> list[str]:
    """A step's results."""
    lines: list[str] = []
    shape = ("mode", "transport", "hidden_size", "intermediate_size", "ep_size", "num_tokens")
    header = "mode | transport | H | I | ranks | tokens a rank"
    if "gates" in step.details:
        lines += ["", f"| {header} | relL2 | gate | calc_diff |", "|---" * 9 + "|"]
        for row in step.details["gates"]:
            cells = [str(row[name]) for name in shape]
            cells += [f"{row['rel_l2']:.4f}", f"{row['limit']}", f"{row['calc_diff']:.5f}"]
            lines.append(f"| {' | '.join(cells)} |")
    if step.details.get("rows"):
        lines += ["", f"| {header} | median us | TFLOP/s | unfused us | |", "|---" * 10 + "|"]
        for row in step.details["rows"]:
            cells = [str(row[name]) for name in shape] + [f"{row['us_median']:.0f}", f"{row['tflops']:.1f}"]
            peers = row["peers"]
            cells += [", ".join(f"{microseconds:.0f}" for microseconds in peers.values()), ", ".join(peers)]
            lines.append(f"| {' | '.join(cells)} |")
    if step.details.get("serving"):
        lines += ["", *serving_report(step.details)]
    return lines


def _summary(step: Step) -> str:
    if step.why:
        return step.why.replace("\n", " ").replace("|", "/")[:300]
    if "kernels" in step.details:
        reproduced = sum(each["reproduced"] is True for each in step.details["kernels"])
        return (
            f"{len(step.details['kernels'])} code objects; {reproduced} packaged, and compiled here to the same bytes"
        )
    if "passed" in step.details:
        return f"{step.details['passed']} tests"
    if "gates" in step.details:
        return f"{len(step.details['gates'])} layers"
    return str(step.details.get("verdict", ""))


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()

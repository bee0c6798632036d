"""Finding backends and choosing one, with the reason why not for each of the others.

Backends are found through the entry-point group `megamoe.backends`. An installed backend that fails to import is
reported with its error, never passed over in silence.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import ParamSpec

from megamoe import env
from megamoe.backend import API_VERSION, Backend, Reason, Verdict
from megamoe.errors import BackendError, BackendUnavailableError, ConfigError, NoBackendError, UnsupportedProblemError
from megamoe.problem import MoEProblem, require_problem

ENTRY_POINT_GROUP = "megamoe.backends"
AUTO = "auto"
REFERENCE = "reference"
VENDOR_PACKAGES = {"cuda": "megamoe-cuda", "rocm": "megamoe-rocm"}  # named in the report when they are not installed

P = ParamSpec("P")

logger = logging.getLogger("megamoe")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One backend and what stands for or against it.

    Args:
        name: the backend's name.
        package: distribution and version, or what to install.
        backend: the loaded backend, or None where it could not be.
        verdict: the first reason against it, or OK.
    """

    name: str
    package: str
    backend: Backend | None
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class SelectionReport:
    """Every backend that was looked at, and which was chosen."""

    candidates: tuple[Candidate, ...]
    chosen: str | None
    why: str

    def __str__(self) -> str:
        lines = [f"chosen: {self.chosen or 'none'} ({self.why})"]
        for candidate in self.candidates:
            verdict = candidate.verdict
            lines.append(f"  {candidate.name} [{candidate.package}]: {verdict.reason}: {verdict.detail or 'usable'}")
        return "\n".join(lines)


def installed_backends() -> dict[str, EntryPoint]:
    """Entry points of the installed backends by name, sorted."""
    return {entry.name: entry for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name)}


def known_names() -> list[str]:
    """Names to ask for: "auto", the installed backends, and those that packages of this repository would bring."""
    return [AUTO, *sorted({*installed_backends(), *VENDOR_PACKAGES})]


def require_name(name: object, *, known: bool = False) -> None:
    """Raise ConfigError for what is no name of a backend.

    Args:
        name: what was given for one.
        known: whether it has to be one of `known_names()`.
    """
    names = known_names()
    if not isinstance(name, str) or not name or (known and name not in names):
        hint = _meant(name) if isinstance(name, str) else None
        raise ConfigError("unknown backend", got=repr(name), expected=" or ".join(names), hint=hint)


def _meant(name: str) -> str | None:
    """The name that `name` may be a misspelling of, as a question."""
    close = difflib.get_close_matches(name.lower(), known_names(), n=1)
    return f"did you mean {close[0]}?" if close else None


def load(name: str) -> Candidate:
    """Import the backend `name` and ask nothing of it yet but its API version."""
    entry = installed_backends().get(name)
    if entry is None:
        package = VENDOR_PACKAGES.get(name)
        installed = f"installed are {', '.join(installed_backends()) or 'none'}"
        hint = f"pip install {package}" if package else " ".join(filter(None, (_meant(name), installed)))
        return _candidate(name, package or "unknown", None, Verdict.no(Reason.NOT_INSTALLED, hint))
    candidate = _made(entry, f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value)
    if candidate.backend is not None and candidate.backend.name != name:
        detail = f"its entry point is called {name}, the backend {candidate.backend.name}: give both the same name"
        return _candidate(name, candidate.package, None, Verdict.no(Reason.BROKEN, detail))
    return candidate


def load_class(path: str) -> Candidate:
    """`load` for a backend that no package registers, as one that is being written: `module:Class`, importable here."""
    entry = EntryPoint(name=path, value=path, group=ENTRY_POINT_GROUP)
    if not entry.pattern.match(path):
        return _candidate(path, "no package", None, Verdict.no(Reason.NOT_INSTALLED, "it is no module:Class"))
    return _made(entry, "no package")


def _made(entry: EntryPoint, package: str) -> Candidate:
    name = entry.name
    try:
        backend: object = entry.load()()
    except (Exception, SystemExit) as error:
        return _candidate(name, package, None, Verdict.no(Reason.IMPORT_FAILED, f"{type(error).__name__}: {error}"))
    if not isinstance(backend, Backend):
        detail = f"its entry point makes {type(backend).__name__}, not a megamoe.backend.Backend"
        return _candidate(name, package, None, Verdict.no(Reason.BROKEN, detail))
    if backend.api_version != API_VERSION:
        detail = f"speaks API version {backend.api_version}, core speaks {API_VERSION}: install matching versions"
        return _candidate(name, package, None, Verdict.no(Reason.API_VERSION, detail))
    return _candidate(name, package, backend, Verdict.yes())


def _candidate(name: str, package: str, backend: Backend | None, verdict: Verdict) -> Candidate:
    return Candidate(name=name, package=package, backend=backend, verdict=verdict)


def candidates(problem: MoEProblem | None = None) -> tuple[Candidate, ...]:
    """Every installed or known backend with its verdict: import, then `probe()`, then `supports(problem)`."""
    return tuple(_judge(load(name), problem) for name in sorted(installed_backends().keys() | VENDOR_PACKAGES.keys()))


def _judge(candidate: Candidate, problem: MoEProblem | None) -> Candidate:
    backend = candidate.backend
    if backend is None:
        return candidate
    verdict = _ask(backend.probe)
    if verdict.ok and problem is not None:
        verdict = _ask(backend.supports, problem)
    return _candidate(candidate.name, candidate.package, backend, verdict)


def _ask(check: Callable[P, Verdict], *args: P.args, **kwargs: P.kwargs) -> Verdict:
    """What a backend says; one that raises instead must not keep the others from being used."""
    try:
        verdict: object = check(*args, **kwargs)
    except Exception as error:
        return Verdict.no(Reason.BROKEN, f"{check.__qualname__} raised {type(error).__name__}: {error}")
    if not isinstance(verdict, Verdict):
        return Verdict.no(Reason.BROKEN, f"{check.__qualname__} returned {verdict!r}, not a Verdict")
    return verdict


def selection_report(name: str = AUTO, problem: MoEProblem | None = None) -> SelectionReport:
    """Decide as `select_backend` does, and say why; never raises for a backend that can't be used.

    Args:
        name: "auto", or the name of a backend.
        problem: what it has to support, or None to ask for the machine only.

    Raises:
        ConfigError: `problem` is no `MoEProblem`, or `name` no name.
    """
    require_name(name)
    if problem is not None:
        require_problem(problem)
    wanted, why = name, "asked for by name"
    if name == AUTO:
        wanted, why = env.backend() or AUTO, "asked for by MEGAMOE_BACKEND"
    if wanted != AUTO:
        known = candidates(problem)
        if wanted not in {candidate.name for candidate in known}:
            known += (load(wanted),)
        usable = next(candidate for candidate in known if candidate.name == wanted).verdict.ok
        others = tuple(_not_asked_for(candidate, wanted) for candidate in known)
        return SelectionReport(candidates=others, chosen=wanted if usable else None, why=why)
    return _choose_automatically(candidates(problem))


def _not_asked_for(candidate: Candidate, wanted: str) -> Candidate:
    if candidate.name == wanted or not candidate.verdict.ok:
        return candidate
    detail = f"usable, but {wanted} was asked for"
    return _candidate(candidate.name, candidate.package, candidate.backend, Verdict.no(Reason.NOT_ASKED_FOR, detail))


def _choose_automatically(known: tuple[Candidate, ...]) -> SelectionReport:
    """The single usable backend beside the reference; without any GPU, the reference, so that none is left idle."""
    usable = [candidate.name for candidate in known if candidate.verdict.ok and candidate.name != REFERENCE]
    if len(usable) == 1:
        return SelectionReport(candidates=known, chosen=usable[0], why="the only usable backend but the reference")
    if len(usable) > 1:
        why = f"several are usable ({', '.join(usable)}): name one or set MEGAMOE_BACKEND"
        return SelectionReport(candidates=known, chosen=None, why=why)
    device = gpu_name()
    if device is None:
        runs_it = any(candidate.verdict.ok for candidate in known if candidate.name == REFERENCE)
        return SelectionReport(candidates=known, chosen=REFERENCE if runs_it else None, why="this machine has no GPU")
    detail = f"this machine has a GPU ({device}); the CPU reference is taken only when it is asked for by name"
    barred = tuple(
        _candidate(c.name, c.package, c.backend, Verdict.no(Reason.REFERENCE_NOT_AUTOMATIC, detail))
        if c.name == REFERENCE
        else c
        for c in known
    )
    return SelectionReport(candidates=barred, chosen=None, why="no GPU backend can be used")


def gpu_name() -> str | None:
    """Name of the first GPU that torch sees, or None; makes no context on a machine without one."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def select_backend(name: str = AUTO, problem: MoEProblem | None = None) -> Backend:
    """Find the backend to use.

    The explicit name comes first, then `MEGAMOE_BACKEND`, then the only backend beside the reference that is usable
    here, whatever it runs on, then, on a machine without a GPU, the CPU reference, with one warning.

    Args:
        name: "auto", "reference", "cuda", "rocm", or the name of any installed backend.
        problem: what it has to support; None asks for the machine only.

    Raises:
        BackendUnavailableError: a backend that was asked for can't run on this machine.
        UnsupportedProblemError: it runs here, but not this problem.
        NoBackendError: nothing usable was found automatically. Each message names every backend with its reason.
        ConfigError: `problem` is no `MoEProblem`, or `name` no name.
    """
    report = selection_report(name, problem)
    if report.chosen is None:
        raise _selection_error(report, name)
    chosen = next(candidate for candidate in report.candidates if candidate.name == report.chosen)
    assert chosen.backend is not None
    if report.chosen == REFERENCE and name == AUTO:
        logger.warning("MegaMoE runs on the CPU reference backend: %s", report.why)
    else:
        logger.info("MegaMoE backend %s: %s", report.chosen, report.why)
    return chosen.backend


def _selection_error(report: SelectionReport, name: str) -> BackendError:
    wanted = env.backend() if name == AUTO else name
    if wanted is None:
        return NoBackendError(f"no backend can be used\n{report}")
    candidate = next(candidate for candidate in report.candidates if candidate.name == wanted)
    runs_here = candidate.backend is not None and _ask(candidate.backend.probe).ok
    error: type[BackendError] = UnsupportedProblemError if runs_here else BackendUnavailableError
    return error(f"backend {wanted} can't be used ({candidate.verdict.reason}): {candidate.verdict.detail}\n{report}")

"""Finding and choosing backends: the order of precedence, and a reason for each that is not taken."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest
from torch import Tensor

from megamoe import registry
from megamoe.backend import API_VERSION, Backend, Capability, Plan, Reason, Session, Verdict
from megamoe.errors import BackendUnavailableError, ConfigError, NoBackendError, UnsupportedProblemError
from megamoe.problem import MoEProblem
from megamoe.registry import load, select_backend, selection_report
from megamoe.schedule.device_spec import DeviceSpec

PROBLEM = MoEProblem(
    hidden_size=256, intermediate_size=128, num_experts=4, top_k=2, num_max_tokens_per_rank=8, quant="bf16"
)


FORMATS = frozenset({Capability.QUANT_BF16, Capability.TRANSPORT_BF16, Capability.ACTIVATION_SWIGLU})


class FakeBackend(Backend):
    """Claims bf16 up to H = 1024; subclasses change what a test is about."""

    name: ClassVar[str] = "fake"
    machine: ClassVar[Verdict] = Verdict.yes("a fake device")

    def probe(self) -> Verdict:
        return self.machine

    def capabilities(self) -> frozenset[Capability]:
        return FORMATS

    def check_limits(self, problem: MoEProblem) -> Verdict:
        if problem.hidden_size > 1024:
            return Verdict.no(Reason.SHAPE, f"hidden_size {problem.hidden_size} is above 1024")
        return Verdict.yes()

    def plan(self, problem: MoEProblem, device: DeviceSpec | None = None, *, config: str | None = None) -> Plan:
        raise NotImplementedError

    def open(
        self, plan: Plan, group: Any = None, *, timeout_s: float | None = None, workspace: Tensor | None = None
    ) -> Session:
        raise NotImplementedError


class Reference(FakeBackend):
    name: ClassVar[str] = "reference"
    machine: ClassVar[Verdict] = Verdict.yes("CPU")


class Usable(FakeBackend):
    name: ClassVar[str] = "cuda"


class WithoutDevice(FakeBackend):
    name: ClassVar[str] = "rocm"
    machine: ClassVar[Verdict] = Verdict.no(Reason.NO_DEVICE, "no gfx950 GPU; found none")


class OfAnotherTime(FakeBackend):
    api_version: ClassVar[int] = API_VERSION + 1


def broken_import() -> Backend:
    raise OSError("librocm.so: cannot open shared object file")


Installer = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Installer:
    """Install exactly these backends on a machine without a GPU; `install(gpu="H200", ...)` puts one in."""
    monkeypatch.delenv("MEGAMOE_BACKEND", raising=False)

    def install(*, gpu: str | None = None, **backends: Callable[[], Backend]) -> None:
        found = {name: _Entry(name, factory) for name, factory in backends.items()}
        monkeypatch.setattr(registry, "installed_backends", lambda: found)
        monkeypatch.setattr(registry, "gpu_name", lambda: gpu)

    return install


class _Entry:
    """Stands in for an importlib EntryPoint; its `load` is the import."""

    def __init__(self, name: str, factory: Callable[[], Backend]) -> None:
        self.name = name
        self.value = f"fake_{name}:Backend"
        self.dist = None
        self.factory = factory

    def load(self) -> Callable[[], Backend]:
        if self.factory is broken_import:
            return self.factory()  # type: ignore[return-value]
        return self.factory


def reasons(report: registry.SelectionReport) -> dict[str, Reason]:
    return {candidate.name: candidate.verdict.reason for candidate in report.candidates}


def test_entry_points_are_read_from_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        EntryPoint("zeta", "test_registry:Usable", registry.ENTRY_POINT_GROUP),
        EntryPoint("alpha", "json:no_such_name", registry.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == "megamoe.backends" else [])
    assert list(registry.installed_backends()) == ["alpha", "zeta"]
    candidate = load("alpha")
    assert candidate.backend is None
    assert candidate.verdict.reason is Reason.IMPORT_FAILED
    assert "no_such_name" in candidate.verdict.detail


def test_the_reference_is_installed_with_core() -> None:
    assert "reference" in registry.installed_backends()


def test_import_failure_is_reported_with_its_error(install: Installer) -> None:
    install(rocm=broken_import, reference=Reference)
    candidate = load("rocm")
    assert candidate.verdict.reason is Reason.IMPORT_FAILED
    assert candidate.verdict.detail == "OSError: librocm.so: cannot open shared object file"
    assert "librocm.so" in str(selection_report())


class RaisesInProbe(FakeBackend):
    name: ClassVar[str] = "rocm"

    def probe(self) -> Verdict:
        raise OSError("the driver exploded")


class RaisesInSupports(FakeBackend):
    name: ClassVar[str] = "rocm"

    def check_limits(self, problem: MoEProblem) -> Verdict:
        raise ValueError("limits exploded")


class AnswersNothing(FakeBackend):
    name: ClassVar[str] = "rocm"

    def probe(self) -> Verdict:
        return None  # type: ignore[return-value]


def leaves() -> Backend:
    raise SystemExit(3)


@pytest.mark.parametrize(
    "broken, reason, detail",
    [
        (RaisesInProbe, Reason.BROKEN, "probe raised OSError: the driver exploded"),
        (RaisesInSupports, Reason.BROKEN, "supports raised ValueError: limits exploded"),
        (AnswersNothing, Reason.BROKEN, "probe returned None"),
        (object, Reason.BROKEN, "makes object, not a megamoe.backend.Backend"),
        (leaves, Reason.IMPORT_FAILED, "SystemExit: 3"),
    ],
)
def test_a_broken_backend_is_named_and_bars_no_other(
    install: Installer, broken: Callable[[], Backend], reason: Reason, detail: str
) -> None:
    install(rocm=broken, reference=Reference)
    report = selection_report("auto", PROBLEM)
    assert report.chosen == "reference"
    assert reasons(report)["rocm"] is reason
    assert detail in str(report)
    with pytest.raises((BackendUnavailableError, UnsupportedProblemError), match=reason):
        select_backend("rocm", PROBLEM)


def test_another_api_version_is_not_used(install: Installer) -> None:
    install(cuda=OfAnotherTime)
    candidate = load("cuda")
    assert candidate.backend is None
    assert candidate.verdict.reason is Reason.API_VERSION
    assert f"API version {API_VERSION + 1}, core speaks {API_VERSION}" in candidate.verdict.detail


def test_an_entry_point_has_its_backends_name(install: Installer) -> None:
    """Under another one it would make plans that name a backend which nobody can select."""
    install(fake=FakeBackend, alias=FakeBackend)
    assert load("fake").verdict.ok
    candidate = load("alias")
    assert (candidate.backend, candidate.verdict.reason) == (None, Reason.BROKEN)
    assert "its entry point is called alias, the backend fake" in candidate.verdict.detail


def test_known_packages_that_are_missing_are_named(install: Installer) -> None:
    install(reference=Reference)
    report = selection_report()
    assert reasons(report)["cuda"] is Reason.NOT_INSTALLED
    assert "pip install megamoe-cuda" in str(report)
    assert "pip install megamoe-rocm" in str(report)


def test_unknown_name_lists_what_is_installed(install: Installer) -> None:
    install(reference=Reference)
    with pytest.raises(BackendUnavailableError, match=r"tpu.*not_installed.*installed are reference"):
        select_backend("tpu")


def test_the_only_usable_gpu_backend_is_taken(install: Installer, caplog: pytest.LogCaptureFixture) -> None:
    install(gpu="H200", cuda=Usable, rocm=WithoutDevice, reference=Reference)
    with caplog.at_level(logging.INFO, logger="megamoe"):
        assert select_backend("auto", PROBLEM).name == "cuda"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert reasons(selection_report()) == {"cuda": Reason.OK, "rocm": Reason.NO_DEVICE, "reference": Reason.OK}


@pytest.mark.parametrize("gpu", [None, "H200"])
def test_a_backend_of_ones_own_comes_before_the_reference(install: Installer, gpu: str | None) -> None:
    install(gpu=gpu, rocm=WithoutDevice, fake=FakeBackend, reference=Reference)
    report = selection_report("auto", PROBLEM)
    assert (report.chosen, report.why) == ("fake", "the only usable backend but the reference")


def test_two_usable_ones_are_not_chosen_between(install: Installer) -> None:
    install(gpu="H200", cuda=Usable, fake=FakeBackend, reference=Reference)
    with pytest.raises(NoBackendError, match=r"several are usable \(cuda, fake\): name one or set MEGAMOE_BACKEND"):
        select_backend()


def test_without_a_gpu_the_reference_and_one_warning(install: Installer, caplog: pytest.LogCaptureFixture) -> None:
    install(cuda=broken_import, rocm=WithoutDevice, reference=Reference)
    assert select_backend("auto", PROBLEM).name == "reference"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no GPU" in caplog.text


def test_without_a_gpu_what_the_reference_does_not_run_is_an_error(install: Installer) -> None:
    install(cuda=broken_import, reference=Reference)
    with pytest.raises(NoBackendError, match=r"(?s)no GPU.*reference.*shape: hidden_size 2048 is above 1024"):
        select_backend("auto", replace(PROBLEM, hidden_size=2048))


@pytest.mark.parametrize(("name", "meant"), [("CUDA", "cuda"), ("Reference", "reference"), ("refrence", "reference")])
def test_a_misspelt_name_is_guessed(install: Installer, monkeypatch: pytest.MonkeyPatch, name: str, meant: str) -> None:
    install(cuda=Usable, reference=Reference)
    message = f"{name} can't be used .*did you mean {meant}. installed are cuda, reference"
    with pytest.raises(BackendUnavailableError, match=message):
        select_backend(name)
    monkeypatch.setenv("MEGAMOE_BACKEND", name)
    with pytest.raises(BackendUnavailableError, match=message):
        select_backend()


@pytest.mark.parametrize("name", [None, "", 5, PROBLEM], ids=["none", "empty", "number", "swapped"])
def test_what_is_no_name(install: Installer, name: Any) -> None:
    install(reference=Reference)
    with pytest.raises(ConfigError, match="unknown backend; got .*; expected auto or cuda or reference or rocm"):
        select_backend(name, PROBLEM)


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_what_is_no_problem_is_no_backends_fault(install: Installer, name: str) -> None:
    install(reference=Reference)
    with pytest.raises(ConfigError, match="this is no problem to plan; got int"):
        select_backend(name, 3)  # type: ignore[arg-type]


def test_a_gpu_is_never_left_idle_in_silence(install: Installer) -> None:
    install(gpu="NVIDIA L4", rocm=WithoutDevice, reference=Reference)
    with pytest.raises(NoBackendError) as caught:
        select_backend("auto", PROBLEM)
    report = str(caught.value)
    for part in (
        "NVIDIA L4",
        "reference_not_automatic",
        "no_device: no gfx950 GPU",
        "cuda [megamoe-cuda]: not_installed",
    ):
        assert part in report


def test_a_gpu_backend_that_does_not_support_the_problem(install: Installer) -> None:
    """Usable machine, wrong problem: an error with the reason, not the reference."""
    install(gpu="H200", cuda=Usable, reference=Reference)
    with pytest.raises(NoBackendError, match="shape: hidden_size 2048 is above 1024"):
        select_backend("auto", replace(PROBLEM, hidden_size=2048))


def test_formats_are_asked_before_sizes() -> None:
    backend = FakeBackend()
    assert backend.supports(PROBLEM).ok
    assert backend.supports(replace(PROBLEM, quant="a8w8")).reason is Reason.QUANT
    large = replace(PROBLEM, hidden_size=2048)
    assert backend.supports(large) == Verdict.no(Reason.SHAPE, "hidden_size 2048 is above 1024")
    assert backend.supports(replace(large, quant="a8w8")).reason is Reason.QUANT


def test_require_raises_the_reason() -> None:
    FakeBackend().require(PROBLEM)
    with pytest.raises(UnsupportedProblemError, match=r"fake does not support.*\(quant\).*quant:a8w8"):
        FakeBackend().require(replace(PROBLEM, quant="a8w8"))


def test_by_name(install: Installer, caplog: pytest.LogCaptureFixture) -> None:
    """Asked for by name the reference runs on a machine with a GPU too, without a warning."""
    install(gpu="H200", cuda=Usable, reference=Reference)
    assert select_backend("reference", PROBLEM).name == "reference"
    assert not caplog.records
    report = selection_report("reference")
    assert reasons(report)["cuda"] is Reason.NOT_ASKED_FOR
    assert report.why == "asked for by name"


def test_by_environment(install: Installer, monkeypatch: pytest.MonkeyPatch) -> None:
    install(gpu="H200", cuda=Usable, reference=Reference)
    monkeypatch.setenv("MEGAMOE_BACKEND", "reference")
    assert select_backend().name == "reference"
    assert select_backend("cuda").name == "cuda", "an explicit name goes before the variable"
    assert selection_report().why == "asked for by MEGAMOE_BACKEND"
    monkeypatch.setenv("MEGAMOE_BACKEND", "rocm")
    with pytest.raises(BackendUnavailableError, match="pip install megamoe-rocm"):
        select_backend()


def test_errors_by_name_tell_machine_from_problem(install: Installer) -> None:
    install(cuda=Usable, rocm=WithoutDevice)
    with pytest.raises(BackendUnavailableError, match=r"rocm can't be used \(no_device\): no gfx950 GPU"):
        select_backend("rocm", PROBLEM)
    with pytest.raises(UnsupportedProblemError, match=r"cuda can't be used \(quant\).*quant:a4w4"):
        select_backend("cuda", replace(PROBLEM, quant="a4w4"))


@pytest.mark.parametrize("name", ["auto", "cuda", "nonsense"])
def test_a_report_never_raises(install: Installer, name: str) -> None:
    install(gpu="H200", cuda=broken_import, rocm=WithoutDevice, reference=Reference)
    report: Any = selection_report(name, PROBLEM)
    assert report.chosen is None
    for candidate in report.candidates:
        assert candidate.verdict.detail or candidate.verdict.ok
        assert candidate.name in str(report)

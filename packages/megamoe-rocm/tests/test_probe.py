"""What the ROCm backend says about machines."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megamoe.backend import Reason
from megamoe_rocm.probe import (
    HIP_PYTHON,
    HIP_RUNTIME,
    MORI,
    TORCH_HIP,
    Machine,
    judge,
    kfd_targets,
    library_failures,
    look,
    probe,
)
from megamoe_rocm.rungs import Rung

GOOD = Machine(targets=("gfx950",) * 8, driver_access=True, nvidia=False)


def machine_root(root: Path, *gfx_target_versions: int) -> Path:
    """Files as the kernel driver would show them: a CPU node, then a node per GPU."""
    for node, version in enumerate((0, *gfx_target_versions)):
        folder = root / "sys/class/kfd/kfd/topology/nodes" / str(node)
        folder.mkdir(parents=True)
        text = f"cpu_cores_count {0 if version else 128}\nsimd_count {1024 if version else 0}\n"
        (folder / "properties").write_text(f"{text}gfx_target_version {version}\n")
    return root


@pytest.mark.parametrize(
    "version, target",
    [(90500, "gfx950"), (90402, "gfx942"), (90010, "gfx90a"), (110000, "gfx1100"), (120001, "gfx1201")],
)
def test_targets_are_named_as_compilers_name_them(tmp_path: Path, version: int, target: str) -> None:
    assert kfd_targets(machine_root(tmp_path, version, version)) == (target, target)


def test_a_machine_without_the_driver_has_no_targets(tmp_path: Path) -> None:
    assert look(tmp_path) == Machine(targets=(), driver_access=False, nvidia=False)


def test_a_whole_machine_is_usable() -> None:
    assert judge(GOOD).ok


@pytest.mark.parametrize(
    "machine, reason, says",
    [
        (replace(GOOD, targets=()), Reason.NO_DEVICE, "no AMD GPU"),
        (
            replace(GOOD, targets=()),
            Reason.NO_DEVICE,
            "needed are gfx950 GPUs (MI350 series), ROCm 7, a ROCm build",
        ),
        (replace(GOOD, targets=(), nvidia=True), Reason.NO_DEVICE, "megamoe-cuda"),
        (replace(GOOD, targets=("gfx942",)), Reason.WRONG_DEVICE, "e4m3fnuz"),
        (replace(GOOD, targets=("gfx1100",)), Reason.WRONG_DEVICE, "gfx1100 found"),
        (replace(GOOD, driver_access=False), Reason.NO_DEVICE, "render group"),
        (replace(GOOD, failures={HIP_RUNTIME: "cannot open"}), Reason.MISSING_LIBRARY, "install ROCm"),
        (replace(GOOD, failures={HIP_PYTHON: "ModuleNotFoundError"}), Reason.MISSING_LIBRARY, "hip-python"),
        (replace(GOOD, failures={TORCH_HIP: "built for CUDA"}), Reason.MISSING_LIBRARY, "not a ROCm build"),
        (replace(GOOD, failures={MORI: "ModuleNotFoundError"}), Reason.MISSING_LIBRARY, "megamoe-rocm[mori]"),
        (replace(GOOD, failures={MORI: "x", HIP_RUNTIME: "y"}), Reason.MISSING_LIBRARY, "install ROCm"),
    ],
    ids=lambda value: str(value) if isinstance(value, Reason) else "",
)
def test_each_lack_has_its_own_reason(machine: Machine, reason: Reason, says: str) -> None:
    verdict = judge(machine)
    assert (verdict.ok, verdict.reason) == (False, reason)
    assert says in verdict.detail


def test_libraries_that_are_missing_here_are_named_and_nothing_raises() -> None:
    """CI machines have no ROCm; where one has, the libraries that do load are not in the list."""
    assert set(library_failures()) <= {HIP_RUNTIME, HIP_PYTHON, MORI, TORCH_HIP}
    assert all(library_failures().values())


def test_amd_mori_without_rocm_raises_oserror_and_that_is_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mori").mkdir()
    (tmp_path / "mori/__init__.py").write_text("")
    (tmp_path / "mori/shmem.py").write_text("import ctypes\nctypes.CDLL('libno_such_rocm_library.so')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert library_failures()[MORI].startswith("OSError")
    finally:
        sys.modules.pop("mori", None)


def test_stand_ins_say_what_they_lack() -> None:
    """Here there is no NVIDIA GPU; and this process compiles its kernels, so Triton does not interpret them."""
    verdict = probe(Rung.NVIDIA)
    assert (verdict.ok, verdict.reason) == (False, Reason.NO_DEVICE)
    verdict = probe(Rung.INTERPRETER)
    assert (verdict.ok, verdict.reason) == (False, Reason.MISSING_LIBRARY)
    assert "TRITON_INTERPRET" in verdict.detail or "Triton is missing" in verdict.detail

"""Compiling for gfx950 without a GPU, and holding the result to promises."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from megamoe_rocm.aot import (
    BuildError,
    CodeObject,
    CodeObjectError,
    CompileOptions,
    Expectation,
    InspectionError,
    Parameter,
    check,
    compile_kernel,
    pointer,
    size,
)

pytestmark = pytest.mark.usefixtures("toolchain")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import aot_kernels

    return aot_kernels


def scale_kernel(kernels, **options) -> CodeObject:
    return compile_kernel(
        kernels.scale,
        parameters={"x": pointer("fp32"), "y": pointer("fp32"), "n": size(), "factor": Parameter(type="fp32")},
        constants={"B": 256},
        options=CompileOptions(**options),
    )


def test_what_is_read_back(kernels) -> None:
    code = scale_kernel(kernels, num_warps=2)
    assert code.name == "scale"
    assert code.resources.num_warps == 2
    assert code.resources.vgpr_spills == code.resources.scratch_bytes == 0
    assert 0 < code.resources.num_vgprs <= 16
    named = [(item.name, item.type, item.offset, item.num_bytes) for item in code.arguments if item.name and item.type]
    assert named == [("x", "*fp32", 0, 8), ("y", "*fp32", 8, 8), ("n", "i32", 16, 4), ("factor", "fp32", 20, 4)]
    assert code.descriptor.denormals_kept
    assert code.descriptor.round_to_nearest_even
    assert code.descriptor.workgroup_id_sgprs[0]
    assert code.descriptor.entry == code.instructions[0].address
    assert any(item.mnemonic == "s_endpgm" for item in code.instructions)
    assert code.occupancy.workgroups_per_cu == 16
    check(code, Expectation(scaled_mfmas=0, peer_stores=0, releases=0, acquires=0))


def test_the_same_source_gives_the_same_bytes(kernels) -> None:
    assert scale_kernel(kernels).sha256 == scale_kernel(kernels).sha256
    assert scale_kernel(kernels).sha256 != scale_kernel(kernels, num_warps=8).sha256


CALLS_PYTHON = """
import triton
import triton.language as tl

def number(_semantic=None):
    return tl.constexpr({number})

number.__triton_builtin__ = True

@triton.jit
def store_number(x):
    tl.store(x, number())
"""


def test_a_change_of_what_a_kernel_calls_meanwhile_is_seen(tmp_path: Path) -> None:
    """Triton's own cache would give the first one again: it knows the kernel's source only."""
    built = []
    for number in (3, 4):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "source.py").write_text(CALLS_PYTHON.format(number=number))
        spec = importlib.util.spec_from_file_location("source", folder / "source.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        built.append(compile_kernel(module.store_number, parameters={"x": pointer("i32")}).hsaco)
    assert built[0] != built[1]


def test_a_code_object_is_saved_and_loaded(kernels, tmp_path: Path) -> None:
    code = scale_kernel(kernels)
    code.save(tmp_path / "scale")
    again = CodeObject.load(tmp_path / "scale")
    assert (again.hsaco, again.arguments, again.resources) == (code.hsaco, code.arguments, code.resources)
    assert again.build == code.build


def test_other_bytes_than_described_are_refused(kernels, tmp_path: Path) -> None:
    scale_kernel(kernels).save(tmp_path / "scale")
    scale_kernel(kernels, num_warps=8).save(tmp_path / "other")
    (tmp_path / "scale.hsaco").write_bytes((tmp_path / "other.hsaco").read_bytes())
    with pytest.raises(CodeObjectError, match="not the file that"):
        CodeObject.load(tmp_path / "scale")


@pytest.mark.parametrize("drop, add", [("n", None), (None, "m")])
def test_parameters_must_fit_the_kernel(kernels, drop: str | None, add: str | None) -> None:
    parameters = {"x": pointer("fp32"), "y": pointer("fp32"), "n": size(), "factor": Parameter(type="fp32")}
    parameters.pop(drop, None)
    if add:
        parameters[add] = size()
    with pytest.raises(BuildError, match="parameters of scale"):
        compile_kernel(kernels.scale, parameters=parameters, constants={"B": 256})


def test_what_the_compiler_refuses_is_a_build_error(kernels) -> None:
    with pytest.raises(BuildError, match="refused does not compile for gfx950"):
        compile_kernel(kernels.refused, parameters={"x": pointer("fp32")})


def test_peer_stores_and_a_release_are_found(kernels) -> None:
    parameters = {"y": pointer("i32"), "flag": pointer("i32")}
    code = compile_kernel(kernels.publish, parameters=parameters, constants={"B": 1024})
    check(code, Expectation(peer_stores=1, releases=1, acquires=0))


def test_a_dropped_scope_and_a_dropped_fence_are_reported_together(kernels) -> None:
    parameters = {"y": pointer("i32"), "flag": pointer("i32")}
    code = compile_kernel(kernels.publish_without_release, parameters=parameters, constants={"B": 1024})
    with pytest.raises(InspectionError, match="peer stores: 0, expected 1; releases: 0, expected 1"):
        check(code, Expectation(peer_stores=1, releases=1))


def test_spills_are_refused(kernels) -> None:
    parameters = {"x": pointer("fp32"), "y": pointer("fp32")}
    code = compile_kernel(
        kernels.many_values,
        parameters=parameters,
        constants={"B": 128},
        options=CompileOptions(num_warps=1, waves_per_eu=8),
    )
    assert code.resources.vgpr_spills > 0
    with pytest.raises(InspectionError, match="vector register spills: [1-9]"):
        check(code, Expectation())


def test_stated_limits_are_held(kernels) -> None:
    code = scale_kernel(kernels)
    with pytest.raises(InspectionError, match="workgroups a compute unit: 8, at least 9"):
        check(code, Expectation(min_workgroups_per_cu=9))
    with pytest.raises(InspectionError, match="vector registers: [0-9]+, at most 1"):
        check(code, Expectation(max_vgprs=1))


def test_more_lds_than_a_compute_unit_has_is_refused(kernels) -> None:
    code = dataclasses.replace(scale_kernel(kernels), lds_bytes=163841)
    with pytest.raises(InspectionError, match="bytes of LDS: 163841, at most 163840"):
        check(code, Expectation())

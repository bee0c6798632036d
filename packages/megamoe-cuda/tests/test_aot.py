"""Compiling ahead of time: the list of kernels, the budget, and the command with the real compiler."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TextIO

import pytest
from typer.testing import CliRunner

from megamoe.errors import ConfigError
from megamoe.problem import Activation, MoEProblem, Transport
from megamoe_cuda.aot import builds, complaints, standard_builds
from megamoe_cuda.cli import app
from megamoe_cuda.driver import CudaDriverError, check
from megamoe_cuda.heuristics import AHEAD, M256, TILES
from megamoe_cuda.jit import compiler
from megamoe_cuda.jit.compiler import CompiledKernel
from megamoe_cuda.smem_budget import MAX_DYNAMIC_BYTES

SMALL = MoEProblem(
    hidden_size=512, intermediate_size=256, num_experts=8, top_k=2, num_max_tokens_per_rank=64, ep_size=2
)
KERNEL = next(builds(SMALL)).kernel
GOOD = CompiledKernel(
    config=KERNEL,
    cubin=b"code",
    registers=KERNEL.tile.registers_at_entry,
    spill_bytes=0,
    stack_bytes=0,
    dynamic_smem_bytes=MAX_DYNAMIC_BYTES,
    warnings=(),
)


def test_ci_compiles_every_tile_with_every_transport_and_activation() -> None:
    seen = {(b.kernel.tile.name, b.problem.transport, b.problem.activation) for b in standard_builds()}
    wanted = {(tile, transport, act) for tile in (*TILES, AHEAD.name) for transport in Transport for act in Activation}
    assert seen == wanted | {(M256.name, transport, Activation.SWIGLU) for transport in Transport}
    assert {b.kernel.num_virtual_ranks for b in standard_builds()} == {1, 8}


def test_no_kernel_is_listed_twice() -> None:
    kernels = [build.kernel for build in standard_builds()]
    assert len(set(kernels)) == len(kernels)


def test_virtual_ranks_share_the_sms() -> None:
    shares = {
        (b.kernel.num_virtual_ranks, b.kernel.ctas_per_rank) for b in builds(replace(SMALL, ep_size=8), virtual=True)
    }
    assert shares == {(8, 132 // 8)}
    with pytest.raises(ConfigError, match="more virtual ranks than SMs; got 8"):
        next(builds(replace(SMALL, ep_size=8), virtual=True, num_sms=7))


@pytest.mark.parametrize(
    "change, says",
    [
        ({"spill_bytes": 4}, "spills 4 bytes"),
        ({"registers": KERNEL.tile.registers_at_entry + 8}, "registers at entry"),
        ({"registers": KERNEL.tile.registers_at_entry - 8}, "registers at entry"),
        ({"dynamic_smem_bytes": MAX_DYNAMIC_BYTES + 1}, "shared memory"),
        ({"warnings": ("ptxas warning : (C7510) wgmma.mma_async instructions are serialized",)}, "serialized"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_excess_is_a_complaint(change: dict[str, object], says: str) -> None:
    assert complaints(GOOD) == []
    (complaint,) = complaints(replace(GOOD, **change))
    assert says in complaint


@pytest.mark.parametrize(
    "option, says",
    [("--mode=a4w4", "does not offer quant:a4w4"), ("--mode=fp8", "unknown quant"), ("--config=m48", "m48")],
)
def test_what_the_kernel_can_t_be_is_refused_before_anything_is_compiled(option: str, says: str) -> None:
    result = CliRunner().invoke(app, ["compile", "--hidden=512", option])
    assert result.exit_code == 2
    assert says in result.stderr


def test_options_of_a_layer_without_its_size_do_not_compile_the_standard_list() -> None:
    result = CliRunner().invoke(app, ["compile", "--mode=bf16", "--top-k=8"])
    assert result.exit_code == 2
    assert "got --mode, --top-k; add its --hidden" in result.stderr


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("log", "fails", "message"),
    [
        ("kernel.cu(7): error: x is undefined", True, r"does not compile: NVRTC_ERROR(?s:.)*kernel.cu\(7\): error: x"),
        ("ptxas info: 168 registers", False, r"no line like 'Used \(\\\\d\+\) registers'(?s:.)*ptxas info: 168"),
    ],
    ids=["refused", "another-ptxas"],
)
def test_what_a_compiler_says_stands_in_the_error(
    monkeypatch: pytest.MonkeyPatch, log: str, fails: bool, message: str
) -> None:
    let_the_compiler_say(monkeypatch, log, fails=fails)
    with pytest.raises(compiler.KernelCompileError, match=message):
        compiler.compile_kernel(KERNEL)


def test_serialised_wgmmas_count_although_ptxas_calls_them_information(monkeypatch: pytest.MonkeyPatch) -> None:
    serialised = "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    facts = "ptxas info    : Used 168 registers, 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    let_the_compiler_say(monkeypatch, f"{facts}\n{serialised} due to something\n")
    assert compiler.compile_kernel(KERNEL).warnings == (f"{serialised} due to something",)


def let_the_compiler_say(monkeypatch: pytest.MonkeyPatch, log: str, *, fails: bool = False) -> None:
    class Program:
        def __init__(self, *_: object) -> None: ...

        def compile(self, kind: str, *, logs: TextIO) -> SimpleNamespace:
            logs.write(log)
            if fails:
                raise RuntimeError("NVRTC_ERROR_COMPILATION")
            return SimpleNamespace(code=b"cubin")

    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.core", SimpleNamespace(Program=Program, ProgramOptions=lambda **_: None))
    monkeypatch.setattr(compiler, "compiler_version", lambda: compiler.CACHING_NVRTC)


def test_a_driver_call_that_fails_names_its_status() -> None:
    assert [check(result) for result in ((0,), (0, 5), (0, 5, 6))] == [None, 5, (5, 6)]
    with pytest.raises(CudaDriverError, match="a CUDA driver call failed; got 700"):
        check((700, None))


def compile_small(*options: str) -> list[str]:
    sizes = {"hidden": 512, "intermediate": 256, "experts": 8, "top-k": 2, "ep": 2, "tokens": 64}
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    result = CliRunner().invoke(app, ["compile", *arguments, *options])
    assert result.exit_code in (0, 1), result.output
    return result.output.splitlines()


def test_compiled_kernels_travel_to_a_machine_without_the_compiler_run(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.core", reason="needs the extra compile-cu12 or compile-cu13")
    first = compile_small()
    files = sorted(cache_dir.iterdir())
    assert files
    written = [file.stat().st_mtime_ns for file in files]
    assert compile_small() == first
    assert [file.stat().st_mtime_ns for file in files] == written, "a cached kernel was compiled again"
    bundle = tmp_path / "bundle.zip"
    assert CliRunner().invoke(app, ["cache", "export", str(bundle)]).exit_code == 0
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert f"{len(files)} kernels added" in CliRunner().invoke(app, ["cache", "import", str(bundle)]).output
    listing = CliRunner().invoke(app, ["cache", "info"]).output
    assert "a8w8 m64 H512 I256 E8 top-2 capacity 64 EP2 on 132 SMs each bf16 swiglu" in listing
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == [file.name for file in files]


def test_every_option_reaches_the_kernel(cache_dir: Path) -> None:
    pytest.importorskip("cuda.core", reason="needs the extra compile-cu12 or compile-cu13")
    compile_small("--config=m64")
    compile_small("--config=m64", "--transport=fp8_blockwise_1x32")
    limited = compile_small("--config=m64", "--activation=swiglu_oai", "--swiglu-limit=0.7")  # 0.7: no float
    assert not any("BAD" in line for line in limited)
    compile_small("--config=m64", "--virtual-ranks")
    compile_small("--config=m128")
    assert len(list(cache_dir.iterdir())) == 5

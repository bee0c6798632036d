"""Real code objects, compiled by Triton and executed: GEMMs, a quantiser, hand-overs between workgroups and ranks."""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np
import pytest

from megamoe_rocm.aot import CodeObject, CompileOptions, Expectation, check, compile_kernel, pointer, size
from megamoe_rocm.isa import Machine, Program
from megamoe_rocm.isa.mutation import Report, delete_each, explain, sites
from megamoe_rocm.isa.numbers import E2M1, E4M3, E8M0, to_e2m1

pytestmark = pytest.mark.usefixtures("toolchain")

MAX_STEPS = 400_000


@cache
def gemm(a_format: str, rows: int = 64, columns: int = 64, nonkdim: int = 16) -> CodeObject:
    import isa_kernels

    return compile_kernel(
        isa_kernels.scaled_gemm,
        parameters={
            "a": pointer("u8" if a_format == "e2m1" else "fp8e4nv"),
            "a_scale": pointer("u8"), "w": pointer("u8"), "w_scale": pointer("u8"), "c": pointer("fp32"),
            "N": size(divisibility=16), "Kb": size(divisibility=16),
        },
        constants={"A_FORMAT": a_format, "BM": rows, "BN": columns, "BK": 256},
        options=CompileOptions(matrix_instr_nonkdim=nonkdim),
    )  # fmt: skip


@cache
def quantiser() -> CodeObject:
    import isa_kernels

    return compile_kernel(
        isa_kernels.quantize_mxfp4,
        parameters={
            "x": pointer("bf16"), "q": pointer("u8"), "scales": pointer("u8"), "rows": size(),
            "H": size(divisibility=16),
        },
        constants={"BLOCKS": 8},
    )  # fmt: skip


@cache
def hand_over(drain: bool) -> CodeObject:
    import isa_kernels

    names = ("x", "y", "flag", "out")
    return compile_kernel(
        isa_kernels.hand_over, parameters=dict.fromkeys(names, pointer("i32")), constants={"B": 1024, "DRAIN": drain}
    )


@cache
def exchange(drain: bool) -> CodeObject:
    import isa_kernels

    parameters = {"x": pointer("i32"), "peers": pointer("i64"), "flags": pointer("i64"), "out": pointer("i32")}
    return compile_kernel(
        isa_kernels.exchange,
        parameters={**parameters, "rank": size(), "epoch": size()},
        constants={"B": 1024, "DRAIN": drain},
    )


@cache
def loaded(code: object) -> Program:
    return Program.load(code)


def program_of(build: object, *arguments: object) -> Program:
    return _programs(build, arguments)


@cache
def _programs(build: object, arguments: tuple[object, ...]) -> Program:
    return Program.load(build(*arguments))


def dequantised(packed: np.ndarray, scales: np.ndarray, a_format: str) -> np.ndarray:
    if a_format == "e2m1":
        values = np.stack([E2M1[packed & 15], E2M1[packed >> 4]], axis=-1).reshape(len(packed), -1)
    else:
        values = E4M3[packed]
    return values * np.repeat(E8M0[scales], 32, axis=1)


def run_gemm(program: Program, a_format: str, m: int, n: int, k: int, tile: int, seed: int) -> float:
    """Largest error relative to the largest result."""
    rng = np.random.default_rng(seed)
    a = rng.integers(0, 256, (m, k // 2 if a_format == "e2m1" else k), np.uint8)
    a[(a & 0x7F) == 0x7F] = 0  # no NaN among e4m3
    w = rng.integers(0, 256, (n, k // 2), np.uint8)
    a_scale, w_scale = rng.integers(120, 135, (m, k // 32), np.uint8), rng.integers(120, 135, (n, k // 32), np.uint8)
    machine = Machine(seed=seed)
    c = machine.buffer(4 * m * n, name="c")
    arguments = {
        "a": machine.buffer(a, name="a"), "a_scale": machine.buffer(a_scale, name="a_scale"),
        "w": machine.buffer(w, name="w"), "w_scale": machine.buffer(w_scale, name="w_scale"),
        "c": c, "N": n, "Kb": k // 2,
    }  # fmt: skip
    machine.launch(program, grid=(m // tile, n // tile, 1), arguments=arguments)
    machine.run(max_steps=MAX_STEPS)
    expected = dequantised(a, a_scale, a_format) @ dequantised(w, w_scale, "e2m1").T
    return float(np.abs(c.read(np.float32).reshape(m, n) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("a_format", ["e2m1", "e4m3"])
@pytest.mark.parametrize("nonkdim", [16, 32])
def test_scaled_gemm(a_format: str, nonkdim: int) -> None:
    program = program_of(gemm, a_format, 64, 64, nonkdim)
    for seed, shape in enumerate([(64, 64, 256), (128, 64, 512)]):
        assert run_gemm(program, a_format, *shape, tile=64, seed=seed) < 2e-7


@pytest.mark.stress
def test_a_larger_gemm() -> None:
    assert run_gemm(program_of(gemm, "e2m1"), "e2m1", 512, 512, 1024, tile=64, seed=3) < 3e-7


def test_the_gemms_code_object_keeps_its_promises() -> None:
    # A 64x64x256 step over four waves: (64/16)(64/16)(256/128)/4 MFMAs each; the loop and its last trip.
    found = check(
        gemm("e2m1"), Expectation(scaled_mfmas=16, loop_scaled_mfmas=8, peer_stores=0, releases=0, acquires=0)
    )
    assert found.workgroups_per_cu >= 4


@pytest.mark.parametrize("rows, columns", [(5, 320), (3, 256)])
def test_quantise_to_mxfp4(rows: int, columns: int) -> None:
    rng = np.random.default_rng(rows)
    x = (rng.standard_normal((rows, columns)) * 8).astype(ml_dtypes.bfloat16)
    x[0, :32] = 0
    x[1, 32:64] = ml_dtypes.bfloat16(6.0)
    machine = Machine(seed=rows)
    q, scales = machine.buffer(rows * columns // 2), machine.buffer(rows * columns // 32)
    arguments = {"x": machine.buffer(x.view(np.uint16)), "q": q, "scales": scales, "rows": rows, "H": columns}
    machine.launch(program_of(quantiser), grid=(rows + 1, -(-columns // 256), 1), arguments=arguments)
    machine.run(max_steps=MAX_STEPS)
    blocks = x.astype(np.float64).reshape(rows, -1, 32)
    amax = np.abs(blocks).max(axis=-1)
    exponent = np.where(amax > 0, np.ceil(np.log2(np.maximum(amax, 1e-30) / 6)) + 127, 0)
    np.testing.assert_array_equal(scales.read().reshape(rows, -1), exponent)
    codes = to_e2m1(blocks / 2.0 ** (exponent[..., None] - 127)).reshape(rows, -1, 2)
    np.testing.assert_array_equal(q.read().reshape(rows, -1), codes[..., 0] | codes[..., 1] << 4)


def run_hand_over(program: Program, seed: int) -> bool:
    x = np.random.default_rng(seed).integers(0, 1000, 1024, np.int32)
    machine = Machine(seed=seed)
    buffers = {
        "x": machine.buffer(x),
        "y": machine.buffer(4096),
        "flag": machine.buffer(4),
        "out": machine.buffer(4096),
    }
    machine.launch(program, grid=2, arguments=buffers)
    machine.run(max_steps=100_000)
    return bool((buffers["out"].read(np.int32) == 2 * (x + 1)).all())


def run_exchange(program: Program, seed: int) -> bool:
    xs = np.random.default_rng(seed).integers(0, 1000, (2, 1024), np.int32)
    machine = Machine(num_ranks=2, seed=seed)
    inboxes = [machine.buffer(4096, rank=rank, name="inbox", peers=True) for rank in range(2)]
    flags = [machine.buffer(4, rank=rank, name="flag", peers=True) for rank in range(2)]
    outs = []
    for rank in range(2):
        tables = [np.array([item.address for item in table], np.int64) for table in (inboxes, flags)]
        arguments = {
            "x": machine.buffer(xs[rank], rank=rank),
            "peers": machine.buffer(tables[0], rank=rank),
            "flags": machine.buffer(tables[1], rank=rank),
            "out": machine.buffer(4096, rank=rank, name="out"),
        }
        outs.append(arguments["out"])
        machine.launch(program, grid=1, rank=rank, arguments={**arguments, "rank": rank, "epoch": 1})
    machine.run(max_steps=100_000)
    moved = [machine.stored_bytes.get(pair) for pair in ((0, 1), (1, 0))]
    return moved == [4096, 4096] and all((out.read(np.int32) == xs.sum(axis=0)).all() for out in outs)


def test_a_flag_between_workgroups() -> None:
    check(hand_over(True), Expectation(releases=0, agent_releases=1, agent_acquires=1))
    assert all(run_hand_over(program_of(hand_over, True), seed) for seed in range(12))


def test_a_flag_and_peer_stores_between_ranks() -> None:
    check(exchange(True), Expectation(peer_stores=1, releases=1, acquires=1))
    assert all(run_exchange(program_of(exchange, True), seed) for seed in range(12))


def test_a_flag_does_not_cover_stores_that_other_waves_did_not_wait_for() -> None:
    """The barrier before the release makes no other wave's stores complete: some schedule shows it."""
    assert not all(run_hand_over(program_of(hand_over, False), seed) for seed in range(24))
    assert not all(run_exchange(program_of(exchange, False), seed) for seed in range(24))


def report_of(report: Report) -> Report:
    print(report.table())
    return report


@pytest.mark.parametrize("a_format", ["e2m1", "e4m3"])
def test_deletions_in_a_gemm(a_format: str) -> None:
    program = program_of(gemm, a_format)

    def subject(mutant: Program, seed: int) -> bool:
        return run_gemm(mutant, a_format, 64, 64, 768, tile=64, seed=seed) < 2e-7

    report = report_of(delete_each(program, subject, sites(program), seeds=(0, 1), reasons=explain(program)))
    assert report.share_noticed >= 0.95, report.table()


@pytest.mark.parametrize("build, run", [(hand_over, run_hand_over), (exchange, run_exchange)])
def test_deletions_in_hand_overs(build: object, run: object) -> None:
    program = program_of(build, True)
    report = report_of(delete_each(program, run, sites(program), seeds=range(40), reasons=explain(program)))
    assert not report.unexplained, report.table()

"""Waits that end without their flag: gfx950 code, executed under many timings (rung 5)."""

from __future__ import annotations

import numpy as np
import pytest
import triton
import triton.language as tl

from megamoe_rocm.aot import compile_kernel, pointer
from megamoe_rocm.aot.compiler import size
from megamoe_rocm.isa import Machine, Program
from megamoe_rocm.kernels.flags import wait_for_ranks

pytestmark = pytest.mark.usefixtures("toolchain")

SEEDS = 30
PATIENCE = 2  # units of 1024 instructions
WAVES, LANES = 4, 64


@triton.jit
def wait(flags, abort, status, patience, WAVES: tl.constexpr, LANES: tl.constexpr):
    wait_for_ranks(flags, abort, 5, 2, patience, status, 0, 3, 8, "memrealtime", WAVES, LANES)


def program(kernel: object) -> Program:
    parameters = {name: pointer("i32", below_2gib=False) for name in ("flags", "abort", "status")}
    constants = {"WAVES": WAVES, "LANES": LANES}
    return Program.load(compile_kernel(kernel, parameters=parameters | {"patience": size()}, constants=constants))


def run(code: Program, seed: int, *, abort: int = 0) -> list[int]:
    """`status` after a wait for rank 1, whose flag stays down."""
    machine = Machine(num_ranks=1, seed=seed)
    flags, given_up, status = (machine.buffer(1024, rank=0, name=name) for name in ("flags", "abort", "status"))
    flags.write(np.array([5, 4], np.int32))
    given_up.write(np.array([0, abort], np.int32))
    status.write(np.zeros(256, np.int32))
    arguments = {"flags": flags, "abort": given_up, "status": status, "patience": PATIENCE}
    machine.launch(code, grid=1, rank=0, arguments=arguments)
    machine.run(max_steps=100_000)
    return status.read(np.int32).tolist()


def test_all_waves_leave_a_wait_whose_time_is_over() -> None:
    code = program(wait)
    assert {tuple(run(code, seed)[:8]) for seed in range(SEEDS)} == {(1, 0, 1, 3, 5, 1, 4, 5)}


def test_a_wait_ends_at_once_where_its_peer_has_given_up() -> None:
    code = program(wait)
    assert {tuple(run(code, seed, abort=5)[:8]) for seed in range(SEEDS)} == {(2, 0, 1, 3, 5, 1, 4, 5)}

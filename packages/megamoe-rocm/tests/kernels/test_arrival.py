"""Why every wave arrives for itself: gfx950 code of a release, executed under many timings (rung 5)."""

from __future__ import annotations

import numpy as np
import pytest
import triton
import triton.language as tl

from megamoe_rocm.aot import compile_kernel, pointer
from megamoe_rocm.isa import Machine, Program
from megamoe_rocm.kernels.flags import arrive

pytestmark = pytest.mark.usefixtures("toolchain")

SIZE = 1024  # ints, four waves of 64 lanes with 16 bytes each
SEEDS = 60
POINTERS = {name: pointer("i32", below_2gib=False) for name in ("x", "flag", "out")}


@triton.jit
def produce(x, flag, EVERY_WAVE: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, at + 1, cache_modifier=".wt")
    if EVERY_WAVE:
        arrive(flag, 1, 4, "sys")
    else:
        tl.atomic_add(flag, 4, sem="release", scope="sys")


@triton.jit
def consume(x, flag, out, SIZE: tl.constexpr):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 4:
        pass
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at))


def num_wrong(*, every_wave: bool) -> int:
    """Timings of `SEEDS` under which the other rank reads something else than what was stored before the release."""
    producer = Program.load(
        compile_kernel(
            produce,
            parameters={name: POINTERS[name] for name in ("x", "flag")},
            constants={"EVERY_WAVE": every_wave, "SIZE": SIZE},
        )
    )
    consumer = Program.load(compile_kernel(consume, parameters=POINTERS, constants={"SIZE": SIZE}))
    wrong = 0
    for seed in range(SEEDS):
        machine = Machine(num_ranks=2, seed=seed)
        x = machine.buffer(4 * SIZE, rank=1, name="x", peers=True)
        flag = machine.buffer(16, rank=1, name="flag", peers=True)
        out = machine.buffer(4 * SIZE, rank=1, name="out")
        machine.launch(producer, grid=1, rank=0, arguments={"x": x, "flag": flag})
        machine.launch(consumer, grid=1, rank=1, arguments={"x": x, "flag": flag, "out": out})
        machine.run(max_steps=200_000)
        wrong += not np.array_equal(out.read(np.int32), np.arange(1, SIZE + 1))
    return wrong


def test_an_arrival_of_every_wave_covers_the_stores_of_all() -> None:
    assert num_wrong(every_wave=True) == 0


def test_a_release_by_one_wave_does_not() -> None:
    """Triton 3.9.0 has a scalar atomic executed by the first wave, after a barrier that drains no stores."""
    assert num_wrong(every_wave=False) > 0

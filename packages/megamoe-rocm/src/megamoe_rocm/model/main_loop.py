"""How busy a code object's main loop keeps the matrix units: its instructions, played on one compute unit.

Waves issue in order and share what the unit has one of. A 16x16x128 MFMA takes 16 cycles with FP4 operands and 32 with
FP8 ones, which is the data sheet's peak. Bandwidths of the vector cache (64 bytes a clock) and of LDS (128), and the
latencies, are assumptions.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megamoe_rocm.aot.code_object import CodeObject
from megamoe_rocm.aot.disassembly import Instruction
from megamoe_rocm.aot.inspection import is_scaled_mfma, is_vector_memory, main_loop
from megamoe_rocm.aot.occupancy import SIMDS_PER_CU

ISSUE = 4  # cycles of a wave's instruction on its SIMD
CACHE_BYTES, LDS_BYTES = 64, 128  # a clock and compute unit; assumed
LDS_LATENCY = 100  # cycles; assumed
LATENCIES = (600, 1200)  # cycles of a load from memory, best and worse; assumed
TRIPS, WARM = 8, 2  # trips of the loop that are played, and those before the clock starts
COUNTERS = re.compile(r"(vmcnt|lgkmcnt)\((\d+)\)")
LANES = 64


@dataclass
class WaveState:
    """One wave in the loop."""

    simd: int
    group: int
    now: float
    at: int = 0
    trips: int = 0


def utilisation(code: CodeObject, *, fp4: bool, latency: int) -> float:
    """Share of the time that the matrix units of a full compute unit are busy, in the code object's main loop.

    Args:
        code: a persistent stage.
        fp4: whether both operands are FP4.
        latency: cycles from a load's issue to its data.
    """
    player = _Player(main_loop(code.instructions), mfma=16 if fp4 else 32, latency=latency)
    waves = code.resources.num_warps
    return player.play(groups=code.occupancy.workgroups_per_cu, waves=waves)


class _Player:
    def __init__(self, loop: Sequence[Instruction], *, mfma: int, latency: int) -> None:
        self.loop, self.mfma, self.latency = loop, mfma, latency
        self.matrix = [0.0] * SIMDS_PER_CU  # when each is free
        self.vector = [0.0] * SIMDS_PER_CU
        self.lds = self.cache = 0.0
        self.busy, self.started = 0.0, None

    def play(self, *, groups: int, waves: int) -> float:
        states = [
            WaveState(simd=index % SIMDS_PER_CU, group=group, now=float(group * waves + index))
            for group in range(groups)
            for index in range(waves)
        ]
        vm: list[deque[float]] = [deque() for _ in states]
        lds: list[deque[float]] = [deque() for _ in states]
        waiting: dict[int, list[WaveState]] = {}
        running = list(states)
        start, busy_before, total = 0.0, 0.0, 0.0
        while running:
            state = min(running, key=lambda item: item.now)
            index = states.index(state)
            item = self.loop[state.at]
            if item.mnemonic == "s_barrier":
                group = waiting.setdefault(state.group, [])
                group.append(state)
                running.remove(state)
                if len(group) == waves:
                    moment = max(other.now for other in group)
                    for other in waiting.pop(state.group):
                        other.now = moment
                        self._advance(other)
                        if other.trips < TRIPS:
                            running.append(other)
                continue
            self._issue(item, state, vm[index], lds[index])
            self._advance(state)
            if state.trips == WARM and not start:
                start, busy_before = state.now, self.busy
            if state.trips >= TRIPS:
                running.remove(state)
            total = max(total, *self.matrix)
        return (self.busy - busy_before) / SIMDS_PER_CU / (total - start)

    def _advance(self, state: WaveState) -> None:
        state.at += 1
        if state.at == len(self.loop):
            state.at, state.trips = 0, state.trips + 1

    def _issue(self, item: Instruction, state: WaveState, vm: deque[float], lds: deque[float]) -> None:
        name = item.mnemonic
        if is_scaled_mfma(item):
            begin = max(state.now, self.matrix[state.simd])
            self.matrix[state.simd] = begin + self.mfma
            self.busy += self.mfma
            state.now = begin + ISSUE
        elif is_vector_memory(item):
            num_bytes = LANES * _bytes_of(item)
            self.cache = max(state.now, self.cache) + num_bytes / CACHE_BYTES
            vm.append(self.cache + self.latency)
            if "lds" in item.modifiers:
                self.lds = max(state.now, self.lds) + num_bytes / LDS_BYTES
            state.now += ISSUE
        elif name.startswith("ds_"):
            self.lds = max(state.now, self.lds) + LANES * _bytes_of(item) / LDS_BYTES
            lds.append(self.lds + LDS_LATENCY)
            state.now += ISSUE
        elif name == "s_waitcnt":
            allowed = {counter: int(value) for counter, value in COUNTERS.findall(item.text)}
            for counter, queue in (("vmcnt", vm), ("lgkmcnt", lds)):
                while len(queue) > allowed.get(counter, len(queue)):
                    state.now = max(state.now, queue.popleft())
        elif name.startswith("v_"):
            begin = max(state.now, self.vector[state.simd])
            self.vector[state.simd] = state.now = begin + ISSUE
        else:
            state.now += ISSUE


def _bytes_of(item: Instruction) -> int:
    """Bytes a lane that a load or an LDS access moves; at least a word's time."""
    if item.mnemonic.startswith("ds_"):
        width = re.search(r"_b(\d+)", item.mnemonic)
        return int(width[1]) // 8 if width else 4
    width = re.search(r"dwordx(\d)", item.mnemonic)
    return 4 * int(width[1]) if width else 4

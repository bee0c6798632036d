"""Execute single instructions on one wave, from their text: no compiler and no disassembler is needed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from megamoe_rocm.aot.disassembly import Instruction, split_operands
from megamoe_rocm.isa import Machine
from megamoe_rocm.isa.instructions import decode, registers_touched
from megamoe_rocm.isa.wave import Wave
from megamoe_rocm.isa.workgroup import LocalMemory, Workgroup

LANE = np.arange(64, dtype=np.uint32)


def instruction(text: str, *, address: int = 0, words: tuple[int, ...] = (0,)) -> Instruction:
    """An instruction as the disassembler would give it, without its encoding."""
    mnemonic, _, rest = text.partition(" ")
    operands, modifiers = split_operands(rest)
    return Instruction(
        address=address, mnemonic=mnemonic, operands=operands, modifiers=modifiers, words=words, text=text
    )


def lone_group(*, waves: int = 1, machine: Machine | None = None, lds_bytes: int = 8192, granule: int = 4) -> Workgroup:
    """A workgroup that no launch knows of."""
    machine = machine or Machine()
    lds = LocalMemory(num_bytes=lds_bytes, granule=granule, content=np.zeros(lds_bytes, np.uint8))
    program = SimpleNamespace(code=SimpleNamespace(name="lone"), describe=str)
    group = Workgroup(machine=machine, program=program, rank=0, coordinates=(0, 0, 0), lds=lds)
    for index in range(waves):
        group.waves.append(Wave(group, index, np.zeros((512, 64), np.uint32)))
    return group


def lone_wave(**options) -> Wave:
    """The only wave of a workgroup; all registers are zero."""
    return lone_group(**options).waves[0]


def run(wave: Wave, *texts: str) -> None:
    """Execute instructions in order, without branches."""
    with np.errstate(all="ignore"):
        for text in texts:
            decode(instruction(text), {0: 0})(wave)


def touches_pending(wave: Wave, text: str) -> bool:
    """Whether an instruction would use a register whose load is outstanding."""
    return bool(wave.pending & registers_touched(instruction(text)))


def f32(*values: float) -> np.ndarray:
    """FP32 values as bit patterns."""
    return np.array(values, np.float32).view(np.uint32)


def set_f32(wave: Wave, register: int, *values: float) -> None:
    """Values into the first lanes of a vector register, the last into all others."""
    wave.vf[register] = values[-1]
    wave.vf[register, : len(values)] = values


def set_u32(wave: Wave, register: int, *values: int) -> None:
    """Bit patterns into the first lanes of a vector register, the last into all others."""
    wave.v[register] = values[-1]
    wave.v[register, : len(values)] = values

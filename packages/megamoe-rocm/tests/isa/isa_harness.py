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


def lone_group(
    *,
    waves: int = 1,
    machine: Machine | None = None,
    lds_bytes: int = 8192,
    granule: int = 4,
    started: dict | None = None,
) -> Workgroup:
    """A workgroup that no launch knows of."""
    machine = machine or Machine()
    lds = LocalMemory(num_bytes=lds_bytes, granule=granule, content=np.zeros(lds_bytes, np.uint8))
    program = SimpleNamespace(code=SimpleNamespace(name="lone"), describe=str)
    group = Workgroup(machine=machine, program=program, rank=0, coordinates=(0, 0, 0), lds=lds, started=started or {})
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


def program(*lines: str, num_warps: int = 1, lds_bytes: int = 0, arguments: tuple[tuple[str, str, int], ...] = ()):
    """A program from text: instructions of four bytes each, and labels such as `again:` that branches name.

    s[0:1] is the kernarg segment, s2 the workgroup's id; `arguments` are name, type and offset.
    """
    from megamoe_rocm.aot.code_object import KernelArgument, KernelDescriptor, Resources
    from megamoe_rocm.isa.program import Program

    texts = [line for line in lines if not line.endswith(":")]
    labels, at = {}, 0
    for line in lines:
        if line.endswith(":"):
            labels[line[:-1]] = at
        else:
            at += 1
    instructions = []
    for at, text in enumerate(texts):
        target = labels.get(text.split()[-1])
        simm16 = (target - at - 1) & 0xFFFF if target is not None else 0
        instructions.append(instruction(text, address=4 * at, words=(simm16,)))
    positions = {item.address: at for at, item in enumerate(instructions)}
    sizes = {"i64": 8, "i32": 4, "fp32": 4}
    code = SimpleNamespace(
        name="handmade",
        arguments=tuple(
            KernelArgument(name=name, type=kind, offset=offset, num_bytes=sizes.get(kind, 8), kind="by_value")
            for name, kind, offset in arguments
        ),
        descriptor=KernelDescriptor(
            entry=0, kernarg_bytes=64, rsrc1=0, rsrc2=2 << 1 | 1 << 7, rsrc3=0, properties=1 << 3, preload=0
        ),
        resources=Resources(
            num_vgprs=32, num_agprs=0, num_sgprs=32, vgpr_spills=0, sgpr_spills=0, scratch_bytes=0, lds_bytes=lds_bytes,
            num_warps=num_warps,
        ),
    )  # fmt: skip
    return Program(
        code=code,
        instructions=tuple(instructions),
        steps=tuple(decode(item, positions) for item in instructions),
        touched=tuple(registers_touched(item) for item in instructions),
        entry=0,
        lds_granule=4,
    )

"""A code object, decoded: one function per instruction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from megamoe_rocm.aot.code_object import PRELOAD_PROLOGUE_BYTES, CodeObject
from megamoe_rocm.aot.disassembly import Instruction
from megamoe_rocm.isa.address_space import Buffer
from megamoe_rocm.isa.errors import LaunchArgumentsError, UnsupportedInstructionError
from megamoe_rocm.isa.instructions import decode, lds, registers_touched, vector
from megamoe_rocm.isa.operands import Step
from megamoe_rocm.isa.wave import Wave

# KERNEL_CODE_PROPERTIES: user SGPRs in the order in which they are set up, and how many each takes.
USER_SGPRS = (
    ("private_segment_buffer", 4), ("dispatch_ptr", 2), ("queue_ptr", 2), ("kernarg_segment_ptr", 2),
    ("dispatch_id", 2), ("flat_scratch_init", 2), ("private_segment_size", 1),
)  # fmt: skip
SCALARS = {
    "i1": "u1",
    "i8": "i1",
    "u8": "u1",
    "i16": "i2",
    "u16": "u2",
    "i32": "i4",
    "u32": "u4",
    "i64": "i8",
    "u64": "u8",
}
FLOATS = {"fp16": "f2", "fp32": "f4", "fp64": "f8"}

Argument = Buffer | int | float


@dataclass(frozen=True, kw_only=True)
class Program:
    """An executable kernel.

    Args:
        code: the code object that was read.
        instructions: its instructions.
        steps: for each, the function that executes it; returns None to go on, an index to go there, or `~index` to go
            there after others had a turn.
        touched: for each, the registers that it uses, as a bit set.
        entry: index of the first instruction.
        lds_granule: bytes of its narrowest LDS access.
    """

    code: CodeObject
    instructions: tuple[Instruction, ...] = field(repr=False)
    steps: tuple[Step, ...] = field(repr=False)
    touched: tuple[int, ...] = field(repr=False)
    entry: int
    lds_granule: int

    @classmethod
    def load(cls, code: CodeObject) -> Program:
        """Decode a code object, from its bytes.

        Raises:
            UnsupportedInstructionError: it has an instruction without semantics here, or starts in a floating-point
                mode that is not modelled.
        """
        descriptor = code.descriptor
        if not (descriptor.denormals_kept and descriptor.round_to_nearest_even):
            raise UnsupportedInstructionError(
                f"{code.name} does not keep denormals or does not round to nearest even", got=hex(descriptor.rsrc1)
            )
        if code.resources.scratch_bytes:
            raise UnsupportedInstructionError(f"{code.name} uses scratch", got=code.resources.scratch_bytes, expected=0)
        instructions = code.instructions
        positions = {item.address: at for at, item in enumerate(instructions)}
        # With kernarg preloading the hardware skips the prologue that would load them.
        skip = PRELOAD_PROLOGUE_BYTES if descriptor.preload_dwords else 0
        widths = [lds.narrowest_access(vector.base_name(item.mnemonic)) for item in instructions]
        return cls(
            code=code,
            instructions=instructions,
            steps=tuple(decode(item, positions) for item in instructions),
            touched=tuple(registers_touched(item) for item in instructions),
            entry=positions[descriptor.entry + skip],
            lds_granule=min(4, *(width for width in widths if width is not None), 4),
        )

    def without(self, index: int) -> tuple[Program, Callable[[], bool]]:
        """The same program with one instruction doing nothing, and a function that says whether it was ever reached."""
        steps, touched = list(self.steps), list(self.touched)
        reached: list[Wave] = []

        def nothing(wave: Wave) -> None:
            if not reached:
                reached.append(wave)

        steps[index], touched[index] = nothing, 0
        return replace(self, steps=tuple(steps), touched=tuple(touched)), lambda: bool(reached)

    def kernarg(
        self, arguments: Mapping[str, Argument], grid: tuple[int, int, int]
    ) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The kernarg segment's bytes.

        Args:
            arguments: every parameter of the kernel, by name; a buffer stands for its address.
            grid: workgroups in each dimension.

        Raises:
            LaunchArgumentsError: one is missing, unknown or does not fit.
        """
        names = [item.name for item in self.code.arguments if item.name and not item.kind.startswith("hidden_")]
        if set(names) != set(arguments):
            raise LaunchArgumentsError(f"arguments of {self.code.name}", got=sorted(arguments), expected=sorted(names))
        segment = np.zeros(-(-self.code.descriptor.kernarg_bytes // 16) * 16, np.uint8)
        hidden = _hidden(grid, self.code.resources.num_warps)
        for item in self.code.arguments:
            value: Argument = (
                hidden.get(item.kind, 0) if item.kind.startswith("hidden_") else arguments.get(item.name, 0)
            )
            raw = _encode(item.name, item.type, item.num_bytes, value)
            segment[item.offset : item.offset + item.num_bytes] = np.frombuffer(raw, np.uint8)
        return segment

    def describe(self, index: int) -> str:
        """An instruction, for messages."""
        return str(self.instructions[index]) if index < len(self.instructions) else "beyond the end"

    def user_sgprs(self, kernarg_address: int, segment: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Iterable[int]:
        """Initial values of the user SGPRs; unmapped addresses for what the interpreter does not have."""
        descriptor = self.code.descriptor
        values: list[int] = []
        for bit, (name, count) in enumerate(USER_SGPRS):
            if descriptor.properties >> bit & 1:
                value = kernarg_address if name == "kernarg_segment_ptr" else 0
                values += [value >> shift & 0xFFFFFFFF for shift in range(0, 32 * count, 32)]
        first = descriptor.preload_first_dword
        values += segment.view(np.uint32)[first : first + descriptor.preload_dwords].tolist()
        return values[: descriptor.num_user_sgprs]


def _hidden(grid: tuple[int, int, int], num_warps: int) -> dict[str, int]:
    counts = {f"hidden_block_count_{axis}": count for axis, count in zip("xyz", grid)}
    sizes = {"hidden_group_size_x": 64 * num_warps, "hidden_group_size_y": 1, "hidden_group_size_z": 1}
    return {**counts, **sizes, "hidden_grid_dims": 1 + (grid[1] > 1 or grid[2] > 1) + (grid[2] > 1)}


def _encode(name: str, kind: str, num_bytes: int, value: Argument) -> bytes:
    if isinstance(value, Buffer):
        if num_bytes != 8:
            raise LaunchArgumentsError(
                f"a buffer for the argument {name}", got=value, expected=kind or f"{num_bytes} bytes"
            )
        return value.address.to_bytes(8, "little")
    form = FLOATS.get(kind) or SCALARS.get(kind) or f"u{num_bytes}"
    try:
        return (
            np.array(value).astype(f"<{form}", casting="same_kind").tobytes()
            if form[0] == "f"
            else _integer(value, form)
        )
    except (OverflowError, TypeError) as error:
        raise LaunchArgumentsError(f"a value for the argument {name}", got=value, expected=kind) from error


def _integer(value: int | float, form: str) -> bytes:
    if isinstance(value, float):
        raise TypeError("a float for an integer")
    return int(value).to_bytes(int(form[1:]), "little", signed=form[0] == "i")

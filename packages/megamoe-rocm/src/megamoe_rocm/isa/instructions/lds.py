"""LDS instructions.

Source: AMD CDNA3 and CDNA4 ISA documents, "Data share operations" and "DS instructions". They execute in order and are
counted by LGKMCNT. The record of who uses which bytes between barriers is `megamoe_rocm.isa.workgroup`'s.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megamoe_rocm.aot.disassembly import Instruction
from megamoe_rocm.isa.accesses import Access
from megamoe_rocm.isa.instructions.atomics import OPERATIONS
from megamoe_rocm.isa.operands import Step, allow_modifiers, integer_modifier, parse, unsupported
from megamoe_rocm.isa.wave import LANES, Array, Wave
from megamoe_rocm.isa.workgroup import LocalMemory

U32 = np.uint32
LANE = np.arange(LANES)

# mnemonic -> bytes a lane, and where they go: "" whole registers, `i` sign-extended, `lo`/`hi` half of a register.
READS: dict[str, tuple[int, str]] = {
    "ds_read_b32": (4, ""), "ds_read_b64": (8, ""), "ds_read_b96": (12, ""), "ds_read_b128": (16, ""),
    "ds_read_u8": (1, ""), "ds_read_i8": (1, "i"), "ds_read_u16": (2, ""), "ds_read_i16": (2, "i"),
    "ds_read_u8_d16": (1, "lo"), "ds_read_u8_d16_hi": (1, "hi"),
    "ds_read_u16_d16": (2, "lo"), "ds_read_u16_d16_hi": (2, "hi"),
}  # fmt: skip
WRITES: dict[str, tuple[int, str]] = {
    "ds_write_b8": (1, ""), "ds_write_b16": (2, ""), "ds_write_b32": (4, ""), "ds_write_b64": (8, ""),
    "ds_write_b96": (12, ""), "ds_write_b128": (16, ""),
    "ds_write_b8_d16_hi": (1, "hi"), "ds_write_b16_d16_hi": (2, "hi"),
}  # fmt: skip
# mnemonic -> bytes of each of the two, and by how many bytes their offsets count.
READS2 = {"ds_read2_b32": (4, 4), "ds_read2_b64": (8, 8), "ds_read2st64_b32": (4, 256), "ds_read2st64_b64": (8, 512)}
WRITES2 = {
    "ds_write2_b32": (4, 4),
    "ds_write2_b64": (8, 8),
    "ds_write2st64_b32": (4, 256),
    "ds_write2st64_b64": (8, 512),
}
ATOMICS = {
    f"ds_{name}{returning}_{kind}": (operation, f"{kind}", bool(returning))
    for name, operation, kind in (
        ("add", "add", "u32"), ("sub", "sub", "u32"), ("min", "smin", "i32"), ("max", "smax", "i32"),
        ("min", "umin", "u32"), ("max", "umax", "u32"),
        ("and", "and", "b32"), ("or", "or", "b32"), ("xor", "xor", "b32"),
    )
    for returning in ("", "_rtn")
}  # fmt: skip
LANE_MOVES = frozenset(("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32"))
MNEMONICS = frozenset((*READS, *WRITES, *READS2, *WRITES2, *ATOMICS, *LANE_MOVES))


def narrowest_access(mnemonic: str) -> int | None:
    """Bytes a lane of an LDS access; None for instructions that touch no LDS memory."""
    if mnemonic in ATOMICS:
        return 4
    for table in (READS, WRITES, READS2, WRITES2):
        if mnemonic in table:
            return int(table[mnemonic][0])
    return None


def decode(item: Instruction, name: str) -> Step:
    """The function that executes an LDS instruction."""
    if name in READS:
        return _read(item, [integer_modifier(item, "offset")], *READS[name])
    if name in READS2:
        size, unit = READS2[name]
        return _read(item, _offsets2(item, unit), size, "")
    if name in WRITES:
        return _write(item, [integer_modifier(item, "offset")], *WRITES[name])
    if name in WRITES2:
        size, unit = WRITES2[name]
        return _write(item, _offsets2(item, unit), size, "")
    if name in ATOMICS:
        return _atomic(item, *ATOMICS[name])
    return _move(item, name)


def _offsets2(item: Instruction, unit: int) -> list[int]:
    return [unit * integer_modifier(item, name) for name in ("offset0", "offset1")]


def active_addresses(wave: Wave, register: int, offset: int) -> Array:
    """LDS addresses of the active lanes, int64."""
    base: Array = wave.v[register] if wave.full else wave.v[register, wave.lanes]
    addresses: Array = base.astype(np.int64) + offset
    return addresses


def load(lds: LocalMemory, addresses: Array, num_bytes: int) -> Array:
    """`[lane, word]` uint32; a part of a word is zero-extended."""
    if num_bytes % 4 == 0 and not (np.bitwise_or.reduce(addresses, initial=0) & 3):
        words: Array = lds.words[(addresses >> 2)[:, None] + np.arange(num_bytes // 4)]
        return words
    raw = np.zeros((len(addresses), -(-num_bytes // 4) * 4), np.uint8)
    raw[:, :num_bytes] = lds.data[addresses[:, None] + np.arange(num_bytes)]
    return raw.view(U32)


def store(lds: LocalMemory, addresses: Array, values: Array, num_bytes: int) -> None:
    """Write `[lane, word]` uint32."""
    if num_bytes % 4 == 0 and not (np.bitwise_or.reduce(addresses, initial=0) & 3):
        lds.words[(addresses >> 2)[:, None] + np.arange(num_bytes // 4)] = values
    else:
        raw = np.ascontiguousarray(values).view(np.uint8)[:, :num_bytes]
        lds.data[addresses[:, None] + np.arange(num_bytes)] = raw


def _changes(lds: LocalMemory, addresses: Array, values: Array, num_bytes: int) -> bool:
    """Whether a store changes any byte."""
    mask = U32((1 << 8 * num_bytes) - 1) if num_bytes < 4 else U32(0xFFFFFFFF)
    return bool((load(lds, addresses, num_bytes) != (values & mask)).any())


def put(wave: Wave, target: int, values: Array, lanes: Array | None, num_bytes: int, form: str) -> None:
    """Loaded `[lane, word]` into registers: whole, sign-extended (`i`), or one half (`lo`, `hi`)."""
    if form == "i":
        sign = U32(1 << (8 * num_bytes - 1))
        values = (values ^ sign) - sign
    if form in ("lo", "hi"):
        half = 1 if form == "hi" else 0
        where = (LANE if lanes is None else lanes) * 2 + half
        wave.v16[target, where] = values[:, 0]
    elif lanes is None:
        wave.v[target : target + values.shape[1]] = values.T
    else:
        wave.v[target : target + values.shape[1], lanes] = values.T


def _enqueue(wave: Wave, registers: int, again: Callable[[], None] | None) -> None:
    wave.lgkm.append(Access(registers=registers, lds_again=again))
    wave.pending |= registers


def _read(item: Instruction, offsets: list[int], num_bytes: int, form: str) -> Step:
    allow_modifiers(item, "offset", "offset0", "offset1")
    target, register = parse(item.operands[0]), parse(item.operands[1]).index
    words = -(-num_bytes // 4)

    def step(wave: Wave) -> None:
        lds, lanes = wave.group.lds, None if wave.full else np.flatnonzero(wave.lanes)
        spans = []
        where = [active_addresses(wave, register, offset) for offset in offsets]  # before a register is overwritten
        for at, addresses in enumerate(where):
            lds.check(addresses, num_bytes)
            spans.append(lds.spans(addresses, num_bytes))
            lds.note_read(wave.index, spans[-1])
            put(wave, target.index + at * words, load(lds, addresses, num_bytes), lanes, num_bytes, form)

        def again() -> None:
            for span in spans:
                lds.note_read(wave.index, span)

        _enqueue(wave, target.registers, again)

    return step


def _write(item: Instruction, offsets: list[int], num_bytes: int, form: str) -> Step:
    allow_modifiers(item, "offset", "offset0", "offset1")
    register, sources = parse(item.operands[0]).index, [parse(text).index for text in item.operands[1:]]
    words, shift = -(-num_bytes // 4), U32(16 if form == "hi" else 0)

    def step(wave: Wave) -> None:
        lds, spans = wave.group.lds, []
        for offset, source in zip(offsets, sources, strict=True):
            addresses = active_addresses(wave, register, offset)
            lds.check(addresses, num_bytes)
            spans.append(lds.spans(addresses, num_bytes))
            values = (wave.v[source : source + words] >> shift).T
            values = values if wave.full else values[wave.lanes]
            lds.note_write(wave.index, spans[-1], changes=_changes(lds, addresses, values, num_bytes))
            store(lds, addresses, values, num_bytes)

        def again() -> None:
            for span in spans:
                lds.note_write(wave.index, span)

        _enqueue(wave, 0, again)

    return step


def _atomic(item: Instruction, operation: str, kind: str, returning: bool) -> Step:
    allow_modifiers(item, "offset")
    operands = [parse(text) for text in item.operands]
    target = operands.pop(0) if returning else None
    register, source, offset = operands[0].index, operands[1].index, integer_modifier(item, "offset")
    function = OPERATIONS[operation]

    def step(wave: Wave) -> None:
        lds, lanes = wave.group.lds, np.flatnonzero(wave.lanes)
        addresses = active_addresses(wave, register, offset)
        lds.check(addresses, 4)
        # Atomics of several waves on one word are no race: they are recorded as neither read nor write.
        old = np.zeros(len(lanes), U32)
        for at, (address, lane) in enumerate(zip(addresses.tolist(), lanes.tolist())):
            old[at] = lds.words[address >> 2]
            lds.words[address >> 2] = function(int(old[at]), int(wave.v[source, lane]), 0, 32)
        if target is not None:
            wave.v[target.index, lanes] = old
        _enqueue(wave, target.registers if target is not None else 0, None)

    return step


def _move(item: Instruction, name: str) -> Step:
    """Moves between lanes through the LDS crossbar; no memory is touched. Inactive lanes give 0."""
    allow_modifiers(item, "offset")
    target = parse(item.operands[0])
    if name == "ds_swizzle_b32":
        source = parse(item.operands[1]).index
        origins = swizzled_lanes(item, item.words[0] & 0xFFFF)  # printed as one of several macros
    else:
        register, source = parse(item.operands[1]).index, parse(item.operands[2]).index
        offset = integer_modifier(item, "offset")

    def step(wave: Wave) -> None:
        data = np.where(wave.lanes, wave.v[source], U32(0))
        if name == "ds_swizzle_b32":
            result = data[origins]
        elif name == "ds_bpermute_b32":
            result = data[((wave.v[register] + U32(offset)) >> 2) & 63]
        else:
            result = np.zeros(LANES, U32)
            result[((wave.v[register, wave.lanes] + U32(offset)) >> 2) & 63] = wave.v[source, wave.lanes]
        wave.write_vector(target.index, result)
        _enqueue(wave, target.registers, None)

    return step


def swizzled_lanes(item: Instruction, pattern: int) -> Array:
    """For each lane, the lane that DS_SWIZZLE_B32 reads."""
    if pattern & 0x8000:
        if pattern & 0x7F00:
            raise unsupported(item, "no semantics for rotating or FFT swizzles")
        quad: Array = np.array([pattern >> shift & 3 for shift in (0, 2, 4, 6)])
        return LANE // 4 * 4 + quad[LANE % 4]
    keep, put_in, flip = pattern & 31, pattern >> 5 & 31, pattern >> 10 & 31
    return LANE // 32 * 32 + (((LANE % 32 & keep) | put_in) ^ flip)

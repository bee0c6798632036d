"""Global memory: scalar loads, buffer and global loads, stores and atomics, and loads straight into LDS.

Source: AMD CDNA3 and CDNA4 ISA documents, "Scalar memory operations", "Vector memory operations" (buffer resource,
range checking, memory buffer load to LDS) and "Flat memory instructions". Buffers are raw: stride 0, no swizzle.

A buffer access beyond NUM_RECORDS reads zeros and writes nothing, as on the device; compilers build masks on that. An
access within NUM_RECORDS that is not wholly inside one registered buffer faults, as does any global access that is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megamoe_rocm.aot.disassembly import Instruction
from megamoe_rocm.aot.inspection import scope
from megamoe_rocm.isa.accesses import Access, issue, overwrite
from megamoe_rocm.isa.address_space import Lanes, resolve
from megamoe_rocm.isa.errors import MemoryFault, UndefinedFault
from megamoe_rocm.isa.instructions import lds as local
from megamoe_rocm.isa.instructions.atomics import OPERATIONS
from megamoe_rocm.isa.operands import Operand, Step, allow_modifiers, fetch_scalar, integer_modifier, parse, unsupported
from megamoe_rocm.isa.wave import LANES, M0, SGPR_BIT, Array, Wave

LANE = np.arange(LANES)
CACHE_BITS = ("sc0", "sc1", "nt")

# What follows `buffer_load_` or `global_load_` -> bytes a lane, and where they go (as for LDS reads).
LOADS: dict[str, tuple[int, str]] = {
    "dword": (4, ""), "dwordx2": (8, ""), "dwordx3": (12, ""), "dwordx4": (16, ""),
    "ubyte": (1, ""), "sbyte": (1, "i"), "ushort": (2, ""), "sshort": (2, "i"),
    "ubyte_d16": (1, "lo"), "ubyte_d16_hi": (1, "hi"), "short_d16": (2, "lo"), "short_d16_hi": (2, "hi"),
}  # fmt: skip
STORES: dict[str, tuple[int, str]] = {
    "dword": (4, ""), "dwordx2": (8, ""), "dwordx3": (12, ""), "dwordx4": (16, ""),
    "byte": (1, ""), "short": (2, ""), "byte_d16_hi": (1, "hi"), "short_d16_hi": (2, "hi"),
}  # fmt: skip
LDS_LOADS = {"dword": 4, "dwordx3": 12, "dwordx4": 16, "ubyte": 1, "ushort": 2}
SCALAR_LOADS = {f"s_load_{name}": count for name, count in (
    ("dword", 1), ("dwordx2", 2), ("dwordx4", 4), ("dwordx8", 8), ("dwordx16", 16),
)}  # fmt: skip
TIMES = frozenset(("s_memtime", "s_memrealtime"))
MNEMONICS = frozenset((
    *SCALAR_LOADS, *TIMES,
    *(f"{unit}_load_{name}" for unit in ("buffer", "global") for name in LOADS),
    *(f"{unit}_store_{name}" for unit in ("buffer", "global") for name in STORES),
    *(f"{unit}_atomic_{name}{wide}" for unit in ("buffer", "global") for name in OPERATIONS for wide in ("", "_x2")),
    *(f"global_load_lds_{name}" for name in LDS_LOADS),
))  # fmt: skip

Addresses = Callable[[Wave], tuple[Array, "Array | None"]]


@dataclass(frozen=True, kw_only=True)
class Form:
    """Operands of a vector memory instruction, by role.

    Args:
        data: register that is loaded, stored or given to an atomic; None for loads into LDS.
        result: of a global atomic that returns the old value.
        addresses: wave -> addresses of all lanes (int64), and which are within range (None for all).
    """

    data: Operand | None
    result: Operand | None
    addresses: Addresses


def returns_in_order(item: Instruction) -> bool:
    """Whether it loads whole registers, which happens after every earlier load; also as an atomic's result."""
    unit, _, rest = item.mnemonic.partition("_")
    if unit not in ("buffer", "global"):
        return False
    if rest.startswith("atomic_"):
        return unit == "global" and "sc0" in item.modifiers
    whole = LOADS.get(rest.removeprefix("load_"), (0, "lo"))[1] not in ("lo", "hi")
    return rest.startswith("load_") and whole and "lds" not in item.modifiers


def decode(item: Instruction, name: str) -> Step:
    """The function that executes a global memory instruction."""
    if name in SCALAR_LOADS:
        return _scalar_load(item, SCALAR_LOADS[name])
    if name in TIMES:
        return _time(item)
    unit, _, rest = name.partition("_")
    kind, _, width = rest.partition("_")
    to_lds = "lds" in item.modifiers or width.startswith("lds_")
    width = width.removeprefix("lds_")
    form = _global_form(item, kind, to_lds) if unit == "global" else _buffer_form(item, kind, to_lds)
    if to_lds:
        return _load_to_lds(item, form, LDS_LOADS[width])
    if kind == "load":
        return _load(form, *LOADS[width], scope(item))
    if kind == "store":
        return _store(form, *STORES[width], scope(item))
    return _atomic(item, form, width.removesuffix("_x2"), 8 if width.endswith("_x2") else 4, unit)


def _global_form(item: Instruction, kind: str, to_lds: bool) -> Form:
    allow_modifiers(item, "offset", *CACHE_BITS)
    operands = list(item.operands)
    result = parse(operands.pop(0)) if kind == "atomic" and "sc0" in item.modifiers else None
    data = None
    if kind == "load" and not to_lds:
        data = parse(operands.pop(0))
    elif kind in ("store", "atomic"):
        data = parse(operands.pop(1))
    vector, base = operands
    register, offset = parse(vector).index, integer_modifier(item, "offset")
    if base == "off":

        def addresses(wave: Wave) -> tuple[Array, Array | None]:
            low, high = wave.v[register].astype(np.int64), wave.v[register + 1].astype(np.int64)
            return (high << 32) + low + offset, None

    else:
        scalar = fetch_scalar(parse(base), 64)

        def addresses(wave: Wave) -> tuple[Array, Array | None]:
            return wave.v[register].astype(np.int64) + _signed64(scalar(wave) + offset), None

    return Form(data=data, result=result, addresses=addresses)


def _signed64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _buffer_form(item: Instruction, kind: str, to_lds: bool) -> Form:
    allow_modifiers(item, "offset", "offen", "lds", *CACHE_BITS)
    operands = list(item.operands)
    data = None if to_lds else parse(operands.pop(0))
    if len(operands) == 2:  # a load to LDS without a vector offset prints none
        operands.insert(0, "off")
    vector, resource, scalar = operands
    first, offset, bytes_wide = parse(resource).index, integer_modifier(item, "offset"), _bytes_of(item)
    register = parse(vector).index if "offen" in item.modifiers else None
    base_offset = fetch_scalar(parse(scalar), 32)

    def addresses(wave: Wave) -> tuple[Array, Array | None]:
        base, records = wave.read64(first) & 0xFFFFFFFFFFFF, wave.read32(first + 2)
        if wave.read32(first + 1) >> 16:
            raise UndefinedFault(f"a buffer resource with a stride or swizzle: {wave.read32(first + 1):#010x}")
        start = wave.v[register].astype(np.int64) + offset if register is not None else np.full(LANES, offset)
        shift = base_offset(wave)
        inside = start < records - shift
        if (inside & (start + bytes_wide > records - shift)).any():
            raise UndefinedFault("a lane's bytes that straddle NUM_RECORDS")
        return start + (base + shift), None if inside.all() else inside

    result = data if kind == "atomic" and "sc0" in item.modifiers else None
    return Form(data=data, result=result, addresses=addresses)


def _bytes_of(item: Instruction) -> int:
    _, kind, width = item.mnemonic.split("_", 2)
    if kind == "atomic":
        return 8 if width.endswith("_x2") else 4
    return (STORES if kind == "store" else LOADS)[width][0]


def _active(wave: Wave, inside: Array | None) -> Array | None:
    if inside is None:
        return None if wave.full else wave.lanes
    return inside & wave.lanes


def _resolve(wave: Wave, form: Form, num_bytes: int) -> tuple[tuple[Lanes, ...], Array | None]:
    addresses, inside = form.addresses(wave)
    active = _active(wave, inside)
    if num_bytes >= 4 and (addresses if active is None else addresses[active]).size:
        misaligned = (addresses & 3) != 0
        if (misaligned if active is None else misaligned & active).any():
            raise MemoryFault(f"an access of {num_bytes} bytes that is not aligned to 4")
    parts = resolve(wave.group.machine.memory, wave.group.rank, addresses, active, num_bytes)
    outside = None if inside is None else np.flatnonzero(~inside & wave.lanes)
    return tuple(parts), outside


def _load(form: Form, num_bytes: int, kind: str, at_scope: str) -> Step:
    assert form.data is not None
    target, registers = form.data.index, form.data.registers
    words = -(-num_bytes // 4)

    def step(wave: Wave) -> None:
        parts, outside = _resolve(wave, form, num_bytes)
        if wave.pending & registers:
            overwrite(wave, registers)

        def effect() -> None:
            for part in parts:
                local.put(wave, target, wave.group.cache.load(part, at_scope), part.lanes, num_bytes, kind)
            if outside is not None:
                local.put(wave, target, np.zeros((len(outside), words), np.uint32), outside, num_bytes, kind)

        issue(wave, Access(registers=registers, effect=effect, lanes=parts))

    return step


def _store(form: Form, num_bytes: int, kind: str, at_scope: str) -> Step:
    assert form.data is not None
    source, words, shift = form.data.index, -(-num_bytes // 4), np.uint32(16 if kind == "hi" else 0)

    def step(wave: Wave) -> None:
        parts, _ = _resolve(wave, form, num_bytes)
        # Data leave the registers at issue; they reach memory later.
        values = (wave.v[source : source + words] >> shift).T
        contents = [values if part.lanes is None else values[part.lanes] for part in parts]
        wave.group.machine.count_store(wave.group.rank, parts)

        def effect() -> None:
            for part, content in zip(parts, contents):
                wave.group.cache.store(part, content, at_scope)

        issue(wave, Access(effect=effect, lanes=parts, stores=True))

    return step


def _atomic(item: Instruction, form: Form, operation: str, num_bytes: int, unit: str) -> Step:
    if unit == "buffer" and operation == "cmpswap":
        raise unsupported(item, "no semantics for a buffer compare-and-swap")
    assert form.data is not None
    data, function, width, words = form.data.index, OPERATIONS[operation], 8 * num_bytes, num_bytes // 4
    result, system = form.result, "sc1" in item.modifiers
    registers = result.registers if result is not None else 0

    def step(wave: Wave) -> None:
        parts, _ = _resolve(wave, form, num_bytes)
        for part in parts:
            if part.buffer.rank != wave.group.rank and not system:
                raise UndefinedFault(f"an atomic of agent scope on {part.buffer}, memory of another rank")
        given = _wide(wave.v[data : data + words])
        compare = _wide(wave.v[data + words : data + 2 * words]) if operation == "cmpswap" else given

        def effect() -> None:
            for part in parts:
                wave.group.cache.touch(part)
                part.buffer.about_to_change()
                lanes = LANE if part.lanes is None else part.lanes
                for lane, offset in zip(lanes.tolist(), part.offsets.tolist()):
                    memory = part.buffer.words[offset >> 2 : (offset >> 2) + words]
                    old = int(_wide(memory[:, None])[0])
                    new = function(old, int(given[lane]), int(compare[lane]), width)
                    memory[:] = [new >> shift & 0xFFFFFFFF for shift in range(0, width, 32)]
                    if result is not None:
                        for at in range(words):
                            wave.v[result.index + at, lane] = old >> 32 * at & 0xFFFFFFFF

        if wave.pending & registers:
            overwrite(wave, registers)
        issue(wave, Access(registers=registers, effect=effect, lanes=parts, stores=True))

    return step


def _wide(rows: Array) -> Array:
    """`[word, lane]` uint32 as one integer a lane; a copy."""
    wide: Array = rows[0].astype(np.uint64)
    return wide | rows[1].astype(np.uint64) << np.uint64(32) if len(rows) == 2 else wide


def _load_to_lds(item: Instruction, form: Form, num_bytes: int) -> Step:
    """Lane l's data go to LDS byte M0 + instruction offset + size * l."""
    offset, width, at_scope = integer_modifier(item, "offset"), max(num_bytes, 4), scope(item)

    def step(wave: Wave) -> None:
        parts, outside = _resolve(wave, form, num_bytes)
        memory, base = wave.group.lds, wave.read32(M0) + offset
        written = np.flatnonzero(wave.lanes)
        addresses = base + written * width
        memory.check(addresses, width)
        spans = memory.spans(addresses, width)
        memory.note_write(wave.index, spans, in_flight=True)

        def effect() -> None:
            for part in parts:
                lanes = LANE if part.lanes is None else part.lanes
                local.store(memory, base + lanes * width, wave.group.cache.load(part, at_scope), width)
            if outside is not None:
                local.store(memory, base + outside * width, np.zeros((len(outside), width // 4), np.uint32), width)

        retire = lambda: memory.note_landed(wave.index, spans)  # noqa: E731
        issue(wave, Access(effect=effect, lanes=parts, retire=retire))

    return step


def _scalar_load(item: Instruction, count: int) -> Step:
    allow_modifiers(item, "offset")
    target, base = parse(item.operands[0]).index, fetch_scalar(parse(item.operands[1]), 64)
    offset = fetch_scalar(parse(item.operands[2]), 32, signed=parse(item.operands[2]).file == "c")
    registers = ((1 << count) - 1) << (target + SGPR_BIT)
    extra = integer_modifier(item, "offset")

    def step(wave: Wave) -> None:
        address = (base(wave) + offset(wave) + extra) & ~3
        buffer = wave.group.machine.memory.find(wave.group.rank, address, address + 4 * count)
        first = (address - buffer.address) >> 2
        wave.s[target : target + count] = wave.group.cache.load_scalar(buffer.address, first, count)
        wave.lgkm.append(Access(registers=registers, ordered=False))
        wave.pending |= registers

    return step


def _time(item: Instruction) -> Step:
    """S_MEMTIME: instructions that all waves have executed, and some more: a clock does not begin with a kernel."""
    target = parse(item.operands[0])

    def step(wave: Wave) -> None:
        wave.write64(target.index, wave.group.machine.clock)
        wave.lgkm.append(Access(registers=target.registers, ordered=False))
        wave.pending |= target.registers

    return step

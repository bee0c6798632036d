"""Data between lanes and within registers: DPP, SDWA, permlane, readlane.

Source: AMD CDNA3 ISA document, "SDWA" and "DPP" (data parallel primitives); CDNA4 ISA, V_PERMLANE16_SWAP_B32 and
V_PERMLANE32_SWAP_B32.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from megamoe_rocm.aot.disassembly import Instruction
from megamoe_rocm.isa.errors import UndefinedFault
from megamoe_rocm.isa.operands import (
    Fetch,
    Operand,
    Step,
    allow_modifiers,
    fetch_scalar,
    fetch_vector,
    integer_modifier,
    modifier_list,
    parse,
    unsupported,
)
from megamoe_rocm.isa.wave import LANES, Array, Wave, lanes_of

SDWA_MODIFIERS = ("dst_sel", "dst_unused", "src0_sel", "src1_sel")
DPP_CONTROLS = (
    "quad_perm", "row_shl", "row_shr", "row_ror", "row_mirror", "row_half_mirror", "row_bcast", "row_newbcast",
    "wave_shl", "wave_rol", "wave_shr", "wave_ror",
)  # fmt: skip
DPP_MODIFIERS = (*DPP_CONTROLS, "row_mask", "bank_mask", "bound_ctrl")
LANE = np.arange(LANES)

SELECT = re.compile(r"(BYTE|WORD)_(\d)$|DWORD$")


def selection(text: str) -> tuple[int, int]:
    """First bit and width that an SDWA selection names."""
    match = SELECT.match(text)
    assert match is not None, text
    if match[1] is None:
        return 0, 32
    width = 8 if match[1] == "BYTE" else 16
    return int(match[2]) * width, width


def fetch_selected(item: Instruction, position: int, operand: Operand, kind: str) -> Fetch:
    """An SDWA source: a byte, a word or all of a register, zero- or sign-extended to the kind."""
    shift, width = selection(item.modifiers[f"src{position}_sel"])
    if kind[0] == "f" and width != int(kind[1:]):
        raise unsupported(item, "no semantics for a part of a float")
    if operand.negate or operand.absolute:
        raise unsupported(item, "no semantics for float modifiers with SDWA")
    raw = fetch_vector(Operand(file=operand.file, index=operand.index, value=operand.value), "u32")
    form = {"u": np.uint32, "i": np.int32, "f": np.float32}[kind[0]] if kind.endswith("32") else np.dtype(f"{kind[0]}2")
    mask, sign = np.uint32((1 << width) - 1), np.uint32(1 << (width - 1))

    def fetch(wave: Wave) -> Array:
        value = (raw(wave) >> np.uint32(shift)) & mask
        if operand.extend:
            value = (value ^ sign) - sign
        return value.view(form) if kind.endswith("32") else value.astype(np.uint16).view(form)

    return fetch


def write_selected(item: Instruction, index: int) -> Callable[[Wave, Array], None]:
    """An SDWA destination: part of a register; the rest is zeroed, sign-filled or kept."""
    shift, width = selection(item.modifiers["dst_sel"])
    unused = item.modifiers.get("dst_unused", "UNUSED_PAD")
    if unused == "UNUSED_SEXT":
        raise unsupported(item, "no semantics for UNUSED_SEXT")
    mask = np.uint32(((1 << width) - 1) << shift)

    def write(wave: Wave, value: Array) -> None:
        bits = value.view(np.uint32) if value.dtype.itemsize == 4 else value.view(np.uint16).astype(np.uint32)
        placed = (bits << np.uint32(shift)) & mask
        wave.write_vector(index, placed | (wave.v[index] & ~mask) if unused == "UNUSED_PRESERVE" else placed)

    return write


def is_dpp(item: Instruction) -> bool:
    """Whether source 0 comes from other lanes."""
    return any(name in item.modifiers for name in DPP_CONTROLS)


def dpp_lanes(item: Instruction) -> Array:
    """For each lane, the lane whose source 0 it gets, or -1 outside of what the control covers."""
    row, column = LANE // 16, LANE % 16
    if "quad_perm" in item.modifiers:
        order: Array = np.array(modifier_list(item, "quad_perm", ""))
        return LANE // 4 * 4 + order[LANE % 4]
    if "row_mirror" in item.modifiers:
        return row * 16 + 15 - column
    if "row_half_mirror" in item.modifiers:
        return LANE // 8 * 8 + 7 - LANE % 8
    if "row_shl" in item.modifiers:
        other = column + integer_modifier(item, "row_shl")
        return np.where(other < 16, row * 16 + other, -1)
    if "row_shr" in item.modifiers:
        other = column - integer_modifier(item, "row_shr")
        return np.where(other >= 0, row * 16 + other, -1)
    if "row_ror" in item.modifiers:
        return row * 16 + (column - integer_modifier(item, "row_ror")) % 16
    if "row_newbcast" in item.modifiers:
        return row * 16 + integer_modifier(item, "row_newbcast")
    if item.modifiers.get("row_bcast") == "15":
        return np.where(row > 0, row * 16 - 1, -1)  # the last lane of a row, to the row after it
    if item.modifiers.get("row_bcast") == "31":
        return np.where(row >= 2, 31, -1)
    if "wave_shl" in item.modifiers:
        return np.where(LANE < 63, LANE + 1, -1)
    if "wave_shr" in item.modifiers:
        return LANE - 1
    raise unsupported(item, "an unknown lane control")


def fetch_moved(item: Instruction, fetch: Fetch) -> Fetch:
    """Source 0 moved between lanes; lanes without a source get 0."""
    source = dpp_lanes(item)
    outside, source = source < 0, source.clip(0)

    def moved(wave: Wave) -> Array:
        value = np.broadcast_to(fetch(wave), (LANES,))[source]
        value[outside | ~lanes_of(wave.exec_mask)[source]] = 0
        return value

    return moved


def with_dpp_mask(item: Instruction, step: Step) -> Step:
    """Run a step with lanes switched off that the row and bank masks exclude, or, without bound_ctrl, lack a source."""
    source = dpp_lanes(item)
    row_mask, bank_mask = integer_modifier(item, "row_mask", 0xF), integer_modifier(item, "bank_mask", 0xF)
    chosen = ((row_mask >> (LANE // 16)) & 1) & ((bank_mask >> (LANE % 16 // 4)) & 1) == 1
    outside, source, bounded = source < 0, source.clip(0), "bound_ctrl" in item.modifiers

    def masked(wave: Wave) -> None:
        lanes, full = wave.lanes, wave.full
        usable = chosen if bounded else chosen & ~outside & lanes[source]
        wave.lanes, wave.full = lanes & usable, False
        step(wave)
        wave.lanes, wave.full = lanes, full

    return masked


def _read_first_lane(item: Instruction) -> Step:
    """V_READFIRSTLANE_B32: of the lowest active lane; of lane 0 if none is."""
    target, source = parse(item.operands[0]).index, fetch_vector(parse(item.operands[1]), "u32")

    def step(wave: Wave) -> None:
        mask = wave.exec_mask
        lane = (mask & -mask).bit_length() - 1 if mask else 0
        value = source(wave)
        wave.write32(target, int(value[lane if value.size > 1 else 0]))

    return step


def _read_lane(item: Instruction) -> Step:
    """V_READLANE_B32: of one lane, active or not."""
    target, source = parse(item.operands[0]).index, fetch_vector(parse(item.operands[1]), "u32")
    lane = fetch_scalar(parse(item.operands[2]), 32)
    return lambda wave: wave.write32(target, int(source(wave)[lane(wave) & 63]))


def _write_lane(item: Instruction) -> Step:
    """V_WRITELANE_B32: a scalar into one lane, active or not."""
    target = parse(item.operands[0]).index
    value, lane = fetch_scalar(parse(item.operands[1]), 32), fetch_scalar(parse(item.operands[2]), 32)

    def step(wave: Wave) -> None:
        wave.v[target, lane(wave) & 63] = value(wave)

    return step


def _swap(rows: int) -> Callable[[Instruction], Step]:
    """V_PERMLANE16_SWAP_B32 and V_PERMLANE32_SWAP_B32: odd groups of `rows` lanes of the first operand for even groups
    of the second."""
    odd = (LANE // rows) % 2 == 1

    def build(item: Instruction) -> Step:
        first, second = (parse(text).index for text in item.operands)

        def step(wave: Wave) -> None:
            if not wave.full:
                raise UndefinedFault(f"a lane swap with EXEC {wave.exec_mask:#018x}")
            upper = wave.v[first, odd]
            wave.v[first, odd] = wave.v[second, ~odd]
            wave.v[second, ~odd] = upper

        return step

    return build


TABLE: dict[str, Callable[[Instruction], Step]] = {
    "v_readfirstlane_b32": _read_first_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_permlane16_swap_b32": _swap(16),
    "v_permlane32_swap_b32": _swap(32),
}
MNEMONICS = frozenset(TABLE)


def decode(item: Instruction, name: str) -> Step:
    """The function that executes a move between lanes."""
    allow_modifiers(item)
    return TABLE[name](item)

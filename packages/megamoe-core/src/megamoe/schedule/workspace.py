"""The workspace of one rank: arrays, offsets, bytes. Kernel constants and host allocations both come from here.

Two sections in one address range. The symmetric one comes first, at the same offsets on all ranks: peers reach it
through a table of base pointers. The local one is private to the rank and may lie in ordinary device memory.
Row strides are multiples of 16 bytes (bulk copies), arrays start at multiples of 1024 (TMA tiles with a 128-byte
swizzle keep their pattern). `docs/memory-model.md` explains what each array is for; protocol.REGIONS says who may touch
it when.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from megamoe.errors import ConfigError, WorkspaceError
from megamoe.schedule.protocol import A2, COMBINE, INPUT, POOL, ROUTE_COUNTS, ROUTE_ENTRIES, Join, Region
from megamoe.schedule.tiles import ceil_div, round_up
from megamoe.schedule.waves import Ring

ARRAY_ALIGNMENT = 1024  # bytes; a TMA tile with a 128-byte swizzle repeats every 1024
ROW_ALIGNMENT = 16  # bytes; size and address granule of cp.async.bulk and of TMA strides
WORD = 4  # bytes of a flag
ENTRY_BYTES = 8  # int32 token * top_k + slot, FP32 router weight
META_BYTES = 16  # int32 source rank, int32 token * top_k + slot, FP32 router weight, padded to one 16-byte store
FP8_TRANSPORT_BLOCK = 32  # columns that one E8M0 byte of fp8_blockwise_1x32 covers


class Section(StrEnum):
    """Which part of the workspace an array is in."""

    SYMMETRIC = "symmetric"
    LOCAL = "local"


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """Bytes of one activation row: elements of `element_bits`, a scale of `scale_bytes` per `scale_block` elements.

    `scale_bytes` is 0 for a format without scales.
    """

    element_bits: int
    scale_block: int = 1
    scale_bytes: int = 0

    def payload_bytes(self, num_columns: int) -> int:
        """Stride of a payload row, bytes."""
        return round_up(ceil_div(num_columns * self.element_bits, 8), ROW_ALIGNMENT)

    def scales_bytes(self, num_columns: int) -> int:
        """Stride of a row of scales, bytes; 0 without scales."""
        return round_up(ceil_div(num_columns, self.scale_block) * self.scale_bytes, ROW_ALIGNMENT)


ACTIVATION_ROWS: Mapping[str, RowFormat] = {
    "bf16": RowFormat(element_bits=16),
    "a8w8": RowFormat(element_bits=8, scale_block=128, scale_bytes=4),
    "a8w4": RowFormat(element_bits=8, scale_block=32, scale_bytes=1),
    "a8w4:fp8_1x128": RowFormat(element_bits=8, scale_block=128, scale_bytes=4),
    "a4w4": RowFormat(element_bits=4, scale_block=32, scale_bytes=1),
}
"""Rows of the input and of A2, by quant mode; `a8w4` is MXFP8 unless its other activation format is named."""


def combine_row_bytes(transport: str, hidden_size: int) -> int:
    """Stride of one row on its way home, bytes. With fp8_blockwise_1x32: H payload bytes, then H / 32 scale bytes.

    Raises:
        ConfigError: an unknown transport.
    """
    if transport == "bf16":
        return round_up(2 * hidden_size, ROW_ALIGNMENT)
    if transport == "fp8_blockwise_1x32":
        return round_up(hidden_size + ceil_div(hidden_size, FP8_TRANSPORT_BLOCK), ROW_ALIGNMENT)
    raise ConfigError("unknown transport", got=transport, expected="bf16 or fp8_blockwise_1x32")


@dataclass(frozen=True, kw_only=True)
class Array:
    """One array: `num_rows` rows of `row_bytes` (the stride) at `offset` bytes from the start of the workspace.

    `dims` are the extents that make up `num_rows`, outermost first; `region` is the protocol's name for what it holds,
    None for flags and status words.
    """

    name: str
    section: Section
    region: Region | None
    dims: tuple[int, ...]
    row_bytes: int
    offset: int

    @property
    def num_rows(self) -> int:
        """Product of `dims`."""
        rows = 1
        for extent in self.dims:
            rows *= extent
        return rows

    @property
    def shape(self) -> str:
        """Extents and row stride, for people."""
        return f"{' x '.join(map(str, self.dims))} x {self.row_bytes} B"

    @property
    def num_bytes(self) -> int:
        """Bytes in use, without the padding to the next array."""
        return self.num_rows * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class WorkspaceLayout:
    """Where everything is. Frozen and hashable: a part of the plan."""

    arrays: tuple[Array, ...]

    @cached_property
    def _by_name(self) -> dict[str, Array]:
        return {array.name: array for array in self.arrays}

    def __getitem__(self, name: str) -> Array:
        """The array called `name`.

        Raises:
            WorkspaceError: there is none.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise WorkspaceError("no such array in this workspace", got=name, expected=list(self._by_name)) from None

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def with_local(self, name: str, dims: tuple[int, ...], row_bytes: int) -> WorkspaceLayout:
        """This layout with one more array, of a backend's own, at the end of the local section."""
        offset = round_up(self.num_bytes, ARRAY_ALIGNMENT)
        array = Array(name=name, section=Section.LOCAL, region=None, dims=dims, row_bytes=row_bytes, offset=offset)
        return WorkspaceLayout(arrays=(*self.arrays, array))

    def offset(self, name: str) -> int:
        """Byte offset of array `name` from the start of the workspace."""
        return self[name].offset

    @property
    def symmetric_bytes(self) -> int:
        """Bytes of the symmetric section; the local one starts there."""
        return _end(array for array in self.arrays if array.section is Section.SYMMETRIC)

    @property
    def local_bytes(self) -> int:
        """Bytes of the local section."""
        return self.num_bytes - self.symmetric_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole workspace of one rank."""
        return _end(self.arrays)

    def breakdown(self) -> list[tuple[str, str, str, int]]:
        """Rows of a table: array, section, shape, bytes (padding to the next array included)."""
        ends = [array.offset for array in self.arrays[1:]] + [self.num_bytes]
        return [
            (array.name, str(array.section), array.shape, end - array.offset)
            for array, end in zip(self.arrays, ends, strict=True)
        ]

    def check_size(self, num_bytes: int) -> None:
        """Raise WorkspaceError if a workspace of `num_bytes`, handed in by the caller, is too small."""
        if num_bytes < self.num_bytes:
            raise WorkspaceError(
                "the workspace is too small", got=f"{num_bytes} bytes", expected=f"{self.num_bytes} bytes"
            )


def plan_workspace(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_local_experts: int,
    ep_size: int,
    num_max_tokens_per_rank: int,
    top_k: int,
    activation: RowFormat,
    transport: str,
    rings: tuple[Ring, ...],
    num_ctas: int = 0,
) -> WorkspaceLayout:
    """Lay out the workspace of one rank.

    Args:
        hidden_size: H.
        intermediate_size: I, after the activation.
        num_local_experts: experts of the rank.
        ep_size: ranks.
        num_max_tokens_per_rank: capacity.
        top_k: picks per token.
        activation: rows of the input and of A2, `ACTIVATION_ROWS[mode]`.
        transport: "bf16" or "fp8_blockwise_1x32".
        rings: one per tile height that a call of this session may choose. They share the memory: the ring takes the
            rows of the largest, the counters those of the one with the most blocks.
        num_ctas: CTAs whose two roles meet through memory (`counts_loaded`); 0 where they meet at a CTA barrier.

    Raises:
        ConfigError: no ring, or an unknown transport.
    """
    if not rings:
        raise ConfigError("a workspace needs at least one ring")
    ring_rows = max(ring.num_rows for ring in rings)
    num_counters = 3 * max(ring.max_blocks for ring in rings) + len(Join) + num_ctas  # protocol.PARITY_FLAGS in order
    capacity = num_max_tokens_per_rank
    layout = _Builder()

    layout.start(Section.SYMMETRIC)
    layout.add("input_payload", INPUT, (capacity,), activation.payload_bytes(hidden_size))
    layout.add("input_scales", INPUT, (capacity,), activation.scales_bytes(hidden_size))
    layout.add("route_entries", ROUTE_ENTRIES, (ep_size, capacity * top_k), ENTRY_BYTES)
    layout.add("route_counts", ROUTE_COUNTS, (ep_size, num_local_experts), WORD)
    layout.add("combine", COMBINE, (top_k, capacity), combine_row_bytes(transport, hidden_size))
    layout.add("counts_published", None, (ep_size,), WORD)
    layout.add("rank_finished", None, (ep_size,), WORD)
    layout.add("abort", None, (ep_size,), WORD)  # a rank that fails stores a non-zero word at its index on all ranks

    layout.start(Section.LOCAL)
    layout.add("pool_payload", POOL, (ring_rows,), activation.payload_bytes(hidden_size))
    layout.add("pool_scales", POOL, (ring_rows,), activation.scales_bytes(hidden_size))
    layout.add("pool_meta", POOL, (ring_rows,), META_BYTES)
    layout.add("a2_payload", A2, (ring_rows,), activation.payload_bytes(intermediate_size))
    layout.add("a2_scales", A2, (ring_rows,), activation.scales_bytes(intermediate_size))
    layout.add("counters", None, (2, num_counters), WORD)
    layout.add("dropped_ids", None, (1,), WORD)  # ids outside [-1, num_experts), summed over calls
    return WorkspaceLayout(arrays=tuple(layout.arrays))


def _end(arrays: Iterable[Array]) -> int:
    """Where the next array after `arrays` starts."""
    return max((round_up(array.offset + array.num_bytes, ARRAY_ALIGNMENT) for array in arrays), default=0)


class _Builder:
    """Places arrays one after the other."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.section = Section.SYMMETRIC

    def start(self, section: Section) -> None:
        self.section = section

    def add(self, name: str, region: Region | None, dims: tuple[int, ...], row_bytes: int) -> None:
        """Append an array, unless the format has no bytes for it (scales of bf16)."""
        if row_bytes:
            offset = _end(self.arrays[-1:])
            self.arrays.append(
                Array(name=name, section=self.section, region=region, dims=dims, row_bytes=row_bytes, offset=offset)
            )

"""The sections of a cubin, which is an ELF64 file."""

from __future__ import annotations

import struct
from typing import NamedTuple

_SECTION = struct.Struct("<IIQQQQIIQQ")


class Section(NamedTuple):
    """Where a section lies in the file, in bytes. One that only reserves memory has no contents."""

    offset: int
    num_bytes: int


def sections(elf: bytes) -> dict[str, Section]:
    """Sections of an ELF64 file by name."""
    offset, entry_bytes, count, names_index = (
        *struct.unpack_from("<Q", elf, 0x28),
        *struct.unpack_from("<HHH", elf, 0x3A),
    )
    headers = [_SECTION.unpack_from(elf, offset + i * entry_bytes) for i in range(count)]
    names = elf[headers[names_index][4] :]
    return {
        names[name : names.index(b"\0", name)].decode(): Section(start, size)
        for name, _, _, _, start, size, *_ in headers
    }

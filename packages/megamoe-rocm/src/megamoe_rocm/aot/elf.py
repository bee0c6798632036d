"""The little of ELF64 that reading an AMD code object takes.

Source: System V ABI, chapters "Object Files" and "Note Section"; little-endian, 64-bit only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from megamoe_rocm.aot.errors import CodeObjectError

SHT_SYMTAB, SHT_NOTE = 2, 7
EM_AMDGPU = 224
HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
NOTE = struct.Struct("<III")


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section: where it lies in memory and its bytes in the file."""

    name: str
    type: int
    address: int
    data: bytes
    link: int


@dataclass(frozen=True, kw_only=True)
class Symbol:
    """One symbol of the symbol table."""

    name: str
    address: int
    num_bytes: int


class Elf:
    """A parsed code object.

    Args:
        data: the file's bytes.

    Raises:
        CodeObjectError: not a 64-bit little-endian ELF file for AMD GPUs.
    """

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01" or len(data) < HEADER.size:
            raise CodeObjectError("not a 64-bit little-endian ELF file", got=data[:6].hex() or "no bytes")
        header = HEADER.unpack_from(data)
        machine, offset, size, count, names = header[2], header[6], header[11], header[12], header[13]
        if machine != EM_AMDGPU:
            raise CodeObjectError("an ELF file for another machine", got=machine, expected=f"{EM_AMDGPU} (AMD GPU)")
        try:
            raw = [SECTION.unpack_from(data, offset + i * size) for i in range(count)]
            strings = self._content(data, raw[names])
        except (struct.error, IndexError) as error:
            raise CodeObjectError("an ELF file whose section table is cut off", got=f"{len(data)} bytes") from error
        self.sections = tuple(
            Section(
                name=_string(strings, entry[0]),
                type=entry[1],
                address=entry[3],
                data=self._content(data, entry),
                link=entry[6],
            )
            for entry in raw
        )

    @staticmethod
    def _content(data: bytes, entry: tuple[int, ...]) -> bytes:
        return data[entry[4] : entry[4] + entry[5]]

    def section(self, name: str) -> Section:
        """The section called `name`."""
        for section in self.sections:
            if section.name == name:
                return section
        raise CodeObjectError(f"no section {name}", got=[section.name for section in self.sections])

    def symbols(self) -> tuple[Symbol, ...]:
        """All named symbols."""
        found: list[Symbol] = []
        for section in self.sections:
            if section.type == SHT_SYMTAB:
                strings = self.sections[section.link].data
                for name, _, _, _, value, size in SYMBOL.iter_unpack(section.data):
                    if name:
                        found.append(Symbol(name=_string(strings, name), address=value, num_bytes=size))
        return tuple(found)

    def notes(self) -> Iterator[tuple[str, int, bytes]]:
        """All notes: owner, type, content."""
        for section in self.sections:
            at = 0
            while section.type == SHT_NOTE and at < len(section.data):
                name_size, size, kind = NOTE.unpack_from(section.data, at)
                at += NOTE.size
                owner = section.data[at : at + name_size].rstrip(b"\0").decode()
                at += -(-name_size // 4) * 4
                yield owner, kind, section.data[at : at + size]
                at += -(-size // 4) * 4


def _string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()

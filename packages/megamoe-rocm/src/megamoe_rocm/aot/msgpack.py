"""Decoding of MessagePack, in which code objects keep their metadata. Source: the MessagePack specification."""

from __future__ import annotations

import struct
from typing import Any

from megamoe_rocm.aot.errors import CodeObjectError

NUMBERS = {
    0xCA: ">f", 0xCB: ">d",
    0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
SIMPLE = {0xC0: None, 0xC2: False, 0xC3: True}
# First byte -> how its length is stored, for strings, bytes, arrays and maps.
LENGTHS = {
    0xD9: ">B",
    0xDA: ">H",
    0xDB: ">I",
    0xC4: ">B",
    0xC5: ">H",
    0xC6: ">I",
    0xDC: ">H",
    0xDD: ">I",
    0xDE: ">H",
    0xDF: ">I",
}


def decode(data: bytes) -> Any:
    """The value that `data` starts with; what follows is ignored.

    Raises:
        CodeObjectError: cut off, or of a type that AMD metadata does not use.
    """
    try:
        return _value(data, 0)[0]
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise CodeObjectError("code object metadata that is cut off", got=f"{len(data)} bytes") from error


def _value(data: bytes, at: int) -> tuple[Any, int]:
    first = data[at]
    at += 1
    if first <= 0x7F:
        return first, at
    if first >= 0xE0:
        return first - 0x100, at
    if first <= 0x8F:
        return _map(data, at, first & 0x0F)
    if first <= 0x9F:
        return _array(data, at, first & 0x0F)
    if first <= 0xBF:
        return _string(data, at, first & 0x1F)
    if first in SIMPLE:
        return SIMPLE[first], at
    if first in NUMBERS:
        form = struct.Struct(NUMBERS[first])
        return form.unpack_from(data, at)[0], at + form.size
    if first in LENGTHS:
        form = struct.Struct(LENGTHS[first])
        length = form.unpack_from(data, at)[0]
        at += form.size
        if first <= 0xC6:
            return data[at : at + length], at + length
        if first <= 0xDB:
            return _string(data, at, length)
        return _array(data, at, length) if first <= 0xDD else _map(data, at, length)
    raise CodeObjectError("code object metadata with an unknown MessagePack type", got=hex(first))


def _string(data: bytes, at: int, length: int) -> tuple[str, int]:
    return data[at : at + length].decode(), at + length


def _array(data: bytes, at: int, length: int) -> tuple[list[Any], int]:
    items = []
    for _ in range(length):
        item, at = _value(data, at)
        items.append(item)
    return items, at


def _map(data: bytes, at: int, length: int) -> tuple[dict[Any, Any], int]:
    pairs = {}
    for _ in range(length):
        key, at = _value(data, at)
        pairs[key], at = _value(data, at)
    return pairs, at

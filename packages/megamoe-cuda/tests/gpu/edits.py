"""Edits of the kernel's headers, made in a copy of them: seeded faults, and variants that show something."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megamoe_cuda.jit import codegen, compiler, store


@dataclass(frozen=True, kw_only=True)
class Edit:
    """`old` becomes `new` in the header `file`, at its only place."""

    file: str
    old: str
    new: str


def edited_headers(edits: Iterable[Edit], directory: Path, name: str = "edit") -> Path:
    """A copy, in `directory`, of the headers that this process compiles from, with `edits` made in it.

    Raises:
        SystemExit: the place of an edit is not there any more, or not the only one.
    """
    headers = directory / "include"
    shutil.copytree(codegen.INCLUDE_DIR, headers)
    for edit in edits:
        path = headers / "megamoe" / edit.file
        text = path.read_text()
        if text.count(edit.old) != 1:
            raise SystemExit(f"{name}: {edit.file} has its place {text.count(edit.old)} times")
        path.write_text(text.replace(edit.old, edit.new))
    return headers


def use_headers(headers: Path) -> None:
    """Compile from `headers` in this process."""
    for module in (codegen, compiler, store):
        module.INCLUDE_DIR = headers  # type: ignore[attr-defined]
    store.headers.cache_clear()


def spin(nanoseconds: int) -> str:
    """A statement that holds up the thread for so long."""
    return f"for (const uint64_t start = Watchdog::now_ns(); Watchdog::now_ns() - start < {nanoseconds};) {{\n}}\n"

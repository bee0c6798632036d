"""Compiled kernels on disk.

An entry's key is a digest of everything that the machine code depends on: sources with all that they include, options,
architecture, compiler version and the constants of the plan. So an entry never has to be invalidated, and entries of
several versions live side by side.

    Atomic       an entry is written to a temporary file and renamed; a reader sees a whole entry or none. Where several
                 processes compile the same kernel at once, the last rename wins.
    Fails closed a truncated, altered or foreign file is not loaded: its checksum or key does not match, and the kernel
                 is compiled again and written over it.
    Read-only    where the directory can't be written, kernels are still loaded from it, and those that are missing are
                 compiled for this process only, with one warning.
    Fleet        `export_bundle` writes all entries to one file; `import_bundle` checks and unpacks it elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamoe.errors import ConfigError

logger = logging.getLogger("megamoe.cuda")

MAGIC = b"megamoe kernel, format 1\n"
SUFFIX = ".kernel"
_KEY = re.compile(r"[0-9a-f]{64}")  # a SHA-256


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One compiled kernel.

    Args:
        code: the cubin.
        info: what the compiler said about it (registers, spills, ...), and what it was compiled for; JSON values.
    """

    code: bytes
    info: Mapping[str, Any]


def kernel_key(*, sources: Mapping[str, str], options: Sequence[str], arch: str, compiler: str) -> str:
    """Digest of all that a kernel's machine code depends on, 64 hexadecimal digits.

    Args:
        sources: include name -> text, of the entry, which holds the plan's constants, and of every header.
        options: compiler options in order.
        arch: for example `sm_90a`.
        compiler: name and version.
    """
    identity = {"sources": dict(sources), "options": list(options), "arch": arch, "compiler": compiler}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


class KernelCache:
    """Entries in one directory. Safe to use from several threads and processes at once."""

    def __init__(self, directory: Path) -> None:
        """Use `directory`; it is made when the first entry is stored."""
        self.directory = directory
        self._warned = False

    def path(self, key: str) -> Path:
        """File of the entry `key`."""
        return self.directory / f"{key}{SUFFIX}"

    def load(self, key: str) -> Entry | None:
        """The entry `key`, or None where it is absent or damaged."""
        try:
            data = self.path(key).read_bytes()
        except OSError:
            return None
        entry = decode(data, key)
        if entry is None:
            logger.warning("the cached kernel %s is damaged and will be compiled again", self.path(key))
        return entry

    def store(self, key: str, entry: Entry) -> bool:
        """Write the entry; returns whether it could be written. Never raises for a directory that can't be."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _write_atomically(self.path(key), encode(key, entry))
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "compiled kernels can't be kept in %s (%s); every process compiles its own. "
                    "Set MEGAMOE_CACHE_DIR to a writable directory, or import a bundle there",
                    self.directory,
                    error,
                )
            return False
        return True

    def get(self, key: str, compile_kernel: Callable[[], Entry]) -> Entry:
        """The entry `key`, compiled and stored if it is not there."""
        entry = self.load(key)
        if entry is None:
            entry = compile_kernel()
            self.store(key, entry)
        return entry

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Keys and entries that are whole, in order of their keys."""
        for path in sorted(self.directory.glob(f"*{SUFFIX}")):
            entry = self.load(path.stem)
            if entry is not None:
                yield path.stem, entry

    def export_bundle(self, bundle: Path) -> int:
        """Write all whole entries to one file, a zip archive; returns their number."""
        count = 0
        with tempfile.NamedTemporaryFile(dir=bundle.parent, suffix=".tmp", delete=False) as file:
            try:
                with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                    for key, entry in self.entries():
                        archive.writestr(f"{key}{SUFFIX}", encode(key, entry))
                        count += 1
                _publish(file.name, bundle)
            except BaseException:
                os.unlink(file.name)
                raise
        return count

    def import_bundle(self, bundle: Path) -> int:
        """Unpack a bundle; every entry is checked before any is written. Returns their number.

        Raises:
            ConfigError: the file is no bundle, or holds a damaged entry.
            OSError: the directory can't be written.
        """
        try:
            with zipfile.ZipFile(bundle) as archive:
                members = {name: archive.read(name) for name in archive.namelist()}
        except (OSError, zipfile.BadZipFile) as error:
            raise ConfigError(
                "this is no bundle of kernels",
                got=f"{bundle} ({error})",
                expected="a file of `megamoe-cuda cache export`",
            ) from error
        for name, data in members.items():
            key = name.removesuffix(SUFFIX)
            # A name that is no key could lead out of the directory.
            if name == key or not _KEY.fullmatch(key) or decode(data, key) is None:
                raise ConfigError(
                    "the bundle holds a damaged entry", got=name, hint="export it again; nothing was imported"
                )
        self.directory.mkdir(parents=True, exist_ok=True)
        for name, data in members.items():
            _write_atomically(self.directory / name, data)
        return len(members)


def encode(key: str, entry: Entry) -> bytes:
    """File of an entry: magic, SHA-256 of the rest, one line of JSON, code."""
    header = json.dumps({"key": key, "num_code_bytes": len(entry.code), "info": dict(entry.info)}, sort_keys=True)
    body = header.encode() + b"\n" + entry.code
    return _prefix(body) + body


def decode(data: bytes, key: str) -> Entry | None:
    """The entry in `data`, or None if it is not whole, or not that of `key`."""
    body = data[len(_prefix(b"")) :]
    if data != _prefix(body) + body:
        return None
    header_line, _, code = body.partition(b"\n")
    header = json.loads(header_line)
    if header["key"] != key or header["num_code_bytes"] != len(code):
        return None
    return Entry(code=code, info=header["info"])


def _prefix(body: bytes) -> bytes:
    return MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n"


def _write_atomically(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            _publish(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _publish(temporary: str, path: Path) -> None:
    # A temporary file is readable by its owner only; a cache may be shared by the users of a machine.
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)

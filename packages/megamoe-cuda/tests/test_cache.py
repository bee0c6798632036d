"""The cache of compiled kernels: keys, damage, concurrent writers, read-only directories, bundles."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megamoe.errors import ConfigError
from megamoe_cuda.jit.cache import MAGIC, Entry, KernelCache, decode, encode, kernel_key

ENTRY = Entry(code=bytes(range(256)) * 300, info={"registers": 168, "spill_bytes": 0})
IDENTITY: dict[str, Any] = {
    "sources": {"entry.cuh": '#include "a.cuh"', "a.cuh": "int a;"},
    "options": ["-O3", "-std=c++17"],
    "arch": "sm_90a",
    "compiler": "nvrtc 13.0",
}


def key_of(**changes: Any) -> str:
    return kernel_key(**(IDENTITY | changes))


@pytest.mark.parametrize(
    "change",
    [
        {"sources": {"entry.cuh": '#include "a.cuh"', "a.cuh": "int b;"}},
        {"sources": {"entry.cuh": '#include "a.cuh"', "b.cuh": "int a;"}},
        {"options": ["-std=c++17", "-O3"]},
        {"arch": "sm_90"},
        {"compiler": "nvrtc 13.1"},
    ],
    ids=str,
)
def test_everything_that_the_code_depends_on_is_in_the_key(change: dict[str, Any]) -> None:
    assert key_of(**change) != key_of()
    assert key_of() == key_of(sources=dict(reversed(IDENTITY["sources"].items())))


def test_an_entry_comes_back_whole(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "made" / "on" / "demand")
    assert cache.load(key_of()) is None
    assert cache.store(key_of(), ENTRY)
    assert cache.load(key_of()) == ENTRY
    assert [path.name for path in cache.directory.iterdir()] == [cache.path(key_of()).name], "temporary files are left"


def test_a_kernel_is_compiled_once(tmp_path: Path) -> None:
    calls = []

    def compile_kernel() -> Entry:
        calls.append(1)
        return ENTRY

    for _ in range(2):
        assert KernelCache(tmp_path).get(key_of(), compile_kernel) == ENTRY
    assert len(calls) == 1


@pytest.mark.parametrize("length", [0, 1, len(MAGIC) + 10, len(MAGIC) + 65, len(MAGIC) + 200, -1])
def test_a_truncated_entry_is_compiled_again(tmp_path: Path, length: int) -> None:
    cache = KernelCache(tmp_path)
    cache.store(key_of(), ENTRY)
    cache.path(key_of()).write_bytes(cache.path(key_of()).read_bytes()[:length])
    assert cache.load(key_of()) is None
    assert cache.get(key_of(), lambda: ENTRY) == ENTRY
    assert cache.load(key_of()) == ENTRY, "the damaged file was not replaced"


def test_a_flipped_bit_anywhere_is_noticed() -> None:
    data = encode(key_of(), Entry(code=b"code", info={}))
    for position in range(len(data)):
        altered = bytearray(data)
        altered[position] ^= 0x10
        assert decode(bytes(altered), key_of()) is None, f"byte {position}"


def test_an_entry_renamed_to_another_key_is_not_loaded(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    other = key_of(arch="sm_90")
    cache.store(key_of(), ENTRY)
    shutil.copy(cache.path(key_of()), cache.path(other))
    assert cache.load(other) is None


def _store_and_load(directory: Path, rounds: int, barrier: Any, bad: Any) -> None:
    cache = KernelCache(directory)
    barrier.wait()
    for _ in range(rounds):
        cache.store(key_of(), ENTRY)
        if cache.load(key_of()) != ENTRY:
            bad.value += 1


def test_two_processes_write_the_same_entry_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, bad = context.Barrier(2), context.Value("i", 0)
    writers = [context.Process(target=_store_and_load, args=(tmp_path, 200, barrier, bad)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert bad.value == 0, "a reader saw a partial entry"
    assert list(tmp_path.glob("*.tmp")) == []


@pytest.fixture
def read_only_dir() -> Iterator[Path]:
    """A directory with one entry that this process may not write to, also where the tests run as root."""
    directory = Path(tempfile.mkdtemp())
    KernelCache(directory).store(key_of(), ENTRY)
    directory.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # nobody; root may write anywhere
    try:
        yield directory
    finally:
        os.seteuid(user)
        directory.chmod(0o755)
        shutil.rmtree(directory)


def test_a_read_only_directory_still_serves(read_only_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = KernelCache(read_only_dir)
    assert cache.load(key_of()) == ENTRY
    missing = [key_of(arch="sm_90"), key_of(arch="sm_100")]
    for key in missing:
        assert cache.get(key, lambda: ENTRY) == ENTRY
    assert "MEGAMOE_CACHE_DIR" in caplog.text
    assert len(caplog.records) == 1, "one warning, not one per kernel"


def test_a_bundle_carries_a_cache_to_another_machine(tmp_path: Path) -> None:
    here, there = KernelCache(tmp_path / "here"), KernelCache(tmp_path / "there")
    keys = sorted([key_of(), key_of(arch="sm_90")])
    for key in keys:
        here.store(key, ENTRY)
    here.path("0" * 64).write_bytes(b"damaged")
    assert here.export_bundle(tmp_path / "bundle.zip") == 2
    assert there.import_bundle(tmp_path / "bundle.zip") == 2
    assert list(there.entries()) == [(key, ENTRY) for key in keys]


def test_a_damaged_bundle_is_refused_whole(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.zip"
    good, bad = key_of(), key_of(arch="sm_90")
    with zipfile.ZipFile(bundle, "w") as archive:
        archive.writestr(f"{good}.kernel", encode(good, ENTRY))
        archive.writestr(f"{bad}.kernel", encode(bad, ENTRY)[:-1])
    cache = KernelCache(tmp_path / "cache")
    with pytest.raises(ConfigError, match="damaged entry"):
        cache.import_bundle(bundle)
    assert list(cache.entries()) == []
    bundle.write_bytes(b"not a zip")
    with pytest.raises(ConfigError, match="no bundle"):
        cache.import_bundle(bundle)


def test_a_bundle_cannot_write_outside_the_cache(tmp_path: Path) -> None:
    outside = f"../{key_of()}"
    with zipfile.ZipFile(tmp_path / "bundle.zip", "w") as archive:
        archive.writestr(f"{outside}.kernel", encode(outside, ENTRY))
    with pytest.raises(ConfigError, match="damaged entry"):
        KernelCache(tmp_path / "cache").import_bundle(tmp_path / "bundle.zip")
    assert not (tmp_path / f"{key_of()}.kernel").exists()

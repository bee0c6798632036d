"""Code objects built ahead of time: a folder of them with a manifest, written by `megamoe-rocm compile`.

A code object is found by what it was compiled for: kernel, parameters, constants, options, the versions of Triton and
of this package. The folder inside this package, if there is one, ships with its wheel.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megamoe_rocm import __version__
from megamoe_rocm.aot.code_object import CodeObject
from megamoe_rocm.aot.compiler import TRITON_VERSION, compile_kernel
from megamoe_rocm.aot.errors import CodeObjectError, ToolchainError
from megamoe_rocm.kernels.launch import Launch
from megamoe_rocm.kernels.signature import options, parameters

PACKAGED = Path(__file__).parent / "code_objects"
MANIFEST = "manifest.json"
COMPILE_HINT = "build them with `megamoe-rocm compile`, which needs Triton but no GPU"


def compile_launch(launch: Launch) -> CodeObject:
    """The code object of a launch, compiled with the Triton that is installed."""
    return compile_kernel(
        launch.kernel, parameters=parameters(launch), constants=launch.constants, options=options(launch)
    )


def code_key(launch: Launch) -> str:
    """Name of a launch's code object: the kernel, and a hash of everything that it is compiled for."""
    made_for = {
        "kernel": launch.kernel.__name__,
        "parameters": {name: asdict(item) for name, item in parameters(launch).items()},
        "constants": {name: str(value) for name, value in launch.constants.items()},
        "options": asdict(options(launch)),
        "triton": TRITON_VERSION,
        "megamoe-rocm": __version__,
    }
    digest = hashlib.sha256(json.dumps(made_for, sort_keys=True).encode()).hexdigest()
    return f"{launch.kernel.__name__}-{digest[:16]}"


@dataclass(frozen=True, kw_only=True)
class CodeStore:
    """A folder of code objects.

    Args:
        folder: it.
        hashes: SHA-256 of each code object, by `code_key`.
    """

    folder: Path
    hashes: Mapping[str, str]

    @classmethod
    def open(cls, folder: Path = PACKAGED) -> CodeStore:
        """Read a folder's manifest.

        Raises:
            CodeObjectError: there is none, or it is another version's.
        """
        try:
            manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        except OSError as error:
            raise CodeObjectError("no code objects", got=str(folder), hint=COMPILE_HINT) from error
        versions = {"megamoe-rocm": __version__, "triton": TRITON_VERSION}
        if manifest["versions"] != versions:
            raise CodeObjectError(
                "code objects of other versions", got=manifest["versions"], expected=versions, hint=COMPILE_HINT
            )
        return cls(folder=folder, hashes={key: entry["sha256"] for key, entry in manifest["code_objects"].items()})

    def find(self, launch: Launch) -> CodeObject:
        """The code object of a launch.

        Raises:
            CodeObjectError: it is not there, or not the one that the manifest names.
        """
        key = code_key(launch)
        if key not in self.hashes:
            raise CodeObjectError(f"no code object for this {launch.kernel.__name__}", got=key, hint=COMPILE_HINT)
        code = CodeObject.load(self.folder / key)
        if code.sha256 != self.hashes[key]:
            raise CodeObjectError(
                f"{key}.hsaco is not the one in the manifest", got=code.sha256, expected=self.hashes[key]
            )
        return code


def build(
    folder: Path, launches: Iterable[Launch], *, on_code: Callable[[str, CodeObject], None] | None = None
) -> CodeStore:
    """Compile launches into a folder: code objects, what is known of each beside it, and last the manifest.

    Args:
        folder: made if it is missing; a manifest that is there is replaced.
        launches: what to compile.
        on_code: called with each key and code object.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    entries: dict[str, dict[str, Any]] = {}
    for launch in launches:
        key, code = code_key(launch), compile_launch(launch)
        code.save(folder / key)
        entries[key] = {"sha256": code.sha256, "num_bytes": len(code.hsaco), "constants": code.build["constants"]}
        if on_code is not None:
            on_code(key, code)
    versions = {"megamoe-rocm": __version__, "triton": TRITON_VERSION}
    (folder / MANIFEST).write_text(json.dumps({"versions": versions, "code_objects": entries}, indent=1) + "\n")
    return CodeStore(folder=folder, hashes={key: entry["sha256"] for key, entry in entries.items()})


def find_or_compile(launch: Launch) -> CodeObject:
    """The packaged code object of a launch; where none was packaged, or it is not among them, it is compiled.

    Raises:
        ToolchainError: it can't be: Triton is missing, or another version.
        BuildError: it does not compile.
    """
    try:
        return CodeStore.open().find(launch)
    except CodeObjectError as missing:
        try:
            return compile_launch(launch)
        except ToolchainError as error:
            raise ToolchainError(
                f"{missing.message}, nor can it be compiled here: {error.message}",
                got=error.got,
                expected=error.expected,
                hint=error.hint,
            ) from error

"""Finding tensors in safetensors files, and reading them with every way to fail named."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megamoe.errors import CheckpointError

INDEX_SUFFIX = ".safetensors.index.json"

# Names of dtypes in a safetensors header; those of weights, scales and biases.
DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True, kw_only=True)
class TensorFiles:
    """Which file holds each tensor. Picklable; holds no file open.

    Args:
        where: tensor name -> file.
        config: contents of the `config.json` beside the files, empty without one.
    """

    where: Mapping[str, Path]
    config: Mapping[str, Any]

    @classmethod
    def find(cls, paths: str | Path | Sequence[str | Path]) -> TensorFiles:
        """Take in one or several safetensors files, index files, or directories of a checkpoint.

        A directory's `*.safetensors.index.json` is used if it has one, and all its `*.safetensors` otherwise.

        Raises:
            CheckpointError: nothing there, a file that can't be read, or a tensor in two files.
        """
        if isinstance(paths, str | Path):
            paths = [paths]
        if not paths:
            raise CheckpointError("no checkpoint was named", expected="safetensors files, an index file or a directory")
        where: dict[str, Path] = {}
        for path in map(Path, paths):
            for name, file in _tensors_of(path):
                if where.setdefault(name, file) != file:
                    raise CheckpointError(
                        f"tensor {name} is in two files",
                        got=f"{where[name]} and {file}",
                        hint="name the files of one checkpoint only",
                    )
        return cls(where=where, config=_read_config(Path(paths[0])))

    @contextmanager
    def open(self) -> Iterator[TensorReader]:
        """Map files as they are needed, until the block ends.

        Pages of a mapping count as memory of the process once they were touched; leaving the block gives them back.
        """
        with ExitStack() as stack:
            yield TensorReader(self.where, stack)


class TensorReader:
    """Reads tensors from files that stay mapped while it lives."""

    def __init__(self, where: Mapping[str, Path], stack: ExitStack) -> None:
        self.where = where
        self._stack = stack
        self._handles: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.where

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, read from the header only.

        Raises:
            CheckpointError: no such tensor.
        """
        return tuple(self._slice(name).get_shape())

    def read(
        self,
        name: str,
        *,
        shape: Sequence[int],
        dtypes: Sequence[torch.dtype],
        index: int | None = None,
    ) -> Tensor:
        """One tensor, or entry `index` of its first dimension; a view of the mapped file: copy what is to last.

        Args:
            name: tensor.
            shape: what it must have, the first dimension included.
            dtypes: what it may be.
            index: entry to take.

        Raises:
            CheckpointError: missing, another shape or dtype, or an unreadable file.
        """
        header = self._slice(name)
        got = tuple(header.get_shape())
        if got != tuple(shape):
            raise CheckpointError(
                f"tensor {name} in {self.where[name]} has the wrong shape",
                got=got,
                expected=tuple(shape),
                hint="the layer's other tensors and config.json give the expected sizes; the file is of another model "
                "or was converted wrongly",
            )
        dtype = DTYPES.get(header.get_dtype())
        if dtype not in dtypes:
            raise CheckpointError(
                f"tensor {name} in {self.where[name]} has the wrong dtype",
                got=header.get_dtype(),
                expected=" or ".join(key for key, value in DTYPES.items() if value in dtypes),
                hint="convert the checkpoint to one of the formats that megamoe.checkpoint lists",
            )
        tensor: Tensor = header[:] if index is None else header[index : index + 1][0]
        return tensor

    def _slice(self, name: str) -> Any:
        path = self.where.get(name)
        if path is None:
            raise CheckpointError(
                f"tensor {name} is not in the checkpoint",
                got=f"{len(self.where)} other tensors in {_files(self.where.values())}",
                hint="name all files of the checkpoint, or its index file",
            )
        if path not in self._handles:
            self._handles[path] = self._stack.enter_context(_open(path))
        try:
            return self._handles[path].get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"the index says that {path} holds tensor {name}, but it does not",
                got=str(error),
                hint="the shard belongs to another checkpoint or the index is stale: download both again",
            ) from error


def _tensors_of(path: Path) -> Iterator[tuple[str, Path]]:
    if path.is_dir():
        inside = sorted(path.glob(f"*{INDEX_SUFFIX}")) or sorted(path.glob("*.safetensors"))
        if not inside:
            raise CheckpointError(
                f"directory {path} holds no checkpoint", expected=f"*.safetensors, or an index file *{INDEX_SUFFIX}"
            )
        for file in inside:
            yield from _tensors_of(file)
    elif path.name.endswith(".json"):
        yield from _read_index(path)
    else:
        with _open(path) as handle:
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                yield name, path


def _open(path: Path) -> Any:
    """A safetensors handle, the file's header checked against its length.

    Raises:
        CheckpointError: missing, unreadable, truncated or no safetensors file.
    """
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint file {path} does not exist", hint="check the path") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file",
            got=f"{path.stat().st_size} bytes: {error}",
            hint="it is truncated, corrupt, or of another format: compare its size with the source's and copy it again",
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"checkpoint file {path} can't be read", got=error, hint="check its permissions"
        ) from error


def _read_index(path: Path) -> Iterator[tuple[str, Path]]:
    weight_map = _read_json(path, "the checkpoint's index").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(
            f"{path} is not the index of a checkpoint",
            got="no weight_map",
            expected='{"weight_map": {tensor name: file name}}',
        )
    for name, file in weight_map.items():
        yield name, path.parent / file


def _read_config(path: Path) -> Mapping[str, Any]:
    directory = path if path.is_dir() else path.parent
    file = directory / "config.json"
    if not file.exists():
        return {}
    config = _read_json(file, "the model's configuration")
    nested = config.get("text_config")  # multimodal models keep the language model's sizes one level down
    return nested if isinstance(nested, dict) else config


def _read_json(path: Path, what: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{what} {path} does not exist", hint="check the path") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{what} {path} can't be read", got=error, hint="copy it again from its source"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} {path} is not a JSON object", got=type(value).__name__, expected="an object")
    return value


def _files(paths: Iterable[Path]) -> str:
    """Up to three file names and how many more."""
    names = sorted({str(path) for path in paths})
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more

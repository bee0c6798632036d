"""Environment variables, read here and nowhere else. A value that is none of its kind raises ConfigError.

| variable | meaning | default |
|---|---|---|
| `MEGAMOE_BACKEND` | backend that `select_backend("auto")` takes | none: chosen by what is there |
| `MEGAMOE_TIMEOUT_S` | seconds that a wait for a peer may take | 300 |
| `MEGAMOE_DEBUG` | `1`: sessions opened then check ids on the host, an id outside [-1, num_experts) raises | `0` |
| `MEGAMOE_CACHE_DIR` | where compiled kernels are kept | `~/.cache/megamoe` |
| `MEGAMOE_RANKS_PER_GPU` | for rehearsals: ranks that may share a GPU, each a process | 1: sharing one is an error |
| `MEGAMOE_ROCM_DEVICE` | where megamoe-rocm runs: `gfx950`, or to rehearse `nvidia`, `interpreter`, `isa` | `gfx950` |
| `MEGAMOE_SGLANG_UNSUPPORTED` | `error` or `engine`: what SGLang does with a model that MegaMoE can't run | `error` |
| `MEGAMOE_SGLANG_TRANSPORT` | how rows travel home under SGLang | `bf16` |
| `MEGAMOE_SGLANG_MAX_TOKENS` | tokens of a call on each rank under SGLang | what SGLang's own settings allow |
| `MEGAMOE_SGLANG_METRICS` | `1`: rows per expert are counted under SGLang | `0` |
"""

from __future__ import annotations

import os
from pathlib import Path

from megamoe.errors import ConfigError

VARIABLES = (
    "MEGAMOE_BACKEND",
    "MEGAMOE_TIMEOUT_S",
    "MEGAMOE_DEBUG",
    "MEGAMOE_CACHE_DIR",
    "MEGAMOE_RANKS_PER_GPU",
    "MEGAMOE_ROCM_DEVICE",
    "MEGAMOE_SGLANG_UNSUPPORTED",
    "MEGAMOE_SGLANG_TRANSPORT",
    "MEGAMOE_SGLANG_MAX_TOKENS",
    "MEGAMOE_SGLANG_METRICS",
)
ROCM_DEVICES = ("gfx950", "nvidia", "interpreter", "isa")
DEFAULT_TIMEOUT_S = 300.0  # a rank whose kernels just compiled can be late by minutes


def given() -> dict[str, str]:
    """What is set under a name that begins with `MEGAMOE_`; nothing reads those that are not in `VARIABLES`."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("MEGAMOE_")}


def backend() -> str | None:
    """Name in `MEGAMOE_BACKEND`, or None."""
    return os.environ.get("MEGAMOE_BACKEND") or None


def timeout_s() -> float:
    """Seconds in `MEGAMOE_TIMEOUT_S`, a positive number; 300 where it is not set."""
    text = os.environ.get("MEGAMOE_TIMEOUT_S")
    if not text:
        return DEFAULT_TIMEOUT_S
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError("MEGAMOE_TIMEOUT_S is not a time", got=repr(text), expected="a positive number of seconds")
    return value


def debug() -> bool:
    """Whether `MEGAMOE_DEBUG` asks for checks that cost a synchronisation."""
    return _switch("MEGAMOE_DEBUG")


def _switch(name: str) -> bool:
    text = os.environ.get(name, "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"{name} is not a switch", got=repr(text), expected="0 or 1")
    return text == "1"


def ranks_per_gpu() -> int:
    """Ranks in `MEGAMOE_RANKS_PER_GPU`, a positive integer; docs/testing.md says what sharing a GPU can show."""
    return _count("MEGAMOE_RANKS_PER_GPU") or 1


def rocm_device() -> str | None:
    """Name in `MEGAMOE_ROCM_DEVICE`, one of `ROCM_DEVICES`, or None."""
    name = os.environ.get("MEGAMOE_ROCM_DEVICE") or None
    return None if name is None else _rocm_device("MEGAMOE_ROCM_DEVICE", name)


def set_rocm_device(name: str) -> None:
    """Set `MEGAMOE_ROCM_DEVICE`, and what it needs, for this process and those that it starts.

    Raises:
        ConfigError: `name` is none of `ROCM_DEVICES`.
    """
    os.environ["MEGAMOE_ROCM_DEVICE"] = _rocm_device("--device", name)
    if name == "interpreter":  # Triton reads it when a kernel is defined: before megamoe-rocm is asked anything
        os.environ["TRITON_INTERPRET"] = "1"


def _rocm_device(source: str, name: str) -> str:
    if name not in ROCM_DEVICES:
        raise ConfigError(f"{source} is no device of megamoe-rocm", got=repr(name), expected=" or ".join(ROCM_DEVICES))
    return name


def cache_dir() -> Path:
    """Directory of compiled kernels; it need not exist yet."""
    text = os.environ.get("MEGAMOE_CACHE_DIR")
    return Path(text) if text else Path.home() / ".cache" / "megamoe"


def sglang_unsupported() -> str:
    """Policy in `MEGAMOE_SGLANG_UNSUPPORTED`: a plugin of SGLang is given no arguments."""
    return os.environ.get("MEGAMOE_SGLANG_UNSUPPORTED") or "error"


def sglang_transport() -> str:
    """Transport in `MEGAMOE_SGLANG_TRANSPORT`."""
    return os.environ.get("MEGAMOE_SGLANG_TRANSPORT") or "bf16"


def sglang_max_tokens() -> int | None:
    """Tokens in `MEGAMOE_SGLANG_MAX_TOKENS`, a positive integer, or None."""
    return _count("MEGAMOE_SGLANG_MAX_TOKENS")


def _count(variable: str) -> int | None:
    """The positive integer in `variable`, or None where it is not set."""
    text = os.environ.get(variable)
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{variable} is not a count", got=repr(text), expected="a positive integer")
    return int(text)


def sglang_metrics() -> bool:
    """Whether `MEGAMOE_SGLANG_METRICS` asks for rows per expert."""
    return _switch("MEGAMOE_SGLANG_METRICS")

"""What the commands have in common: the consoles, errors as one message, numbers for people, late progress bars."""

from __future__ import annotations

import functools
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from megamoe.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    FormatError,
    InputError,
    LayoutError,
    MegaMoEError,
)

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

EXIT_FAILED = 1  # the run failed, or its result is wrong
EXIT_BAD_INPUT = 2  # nothing was run; as for a wrong option
BAD_INPUT = (BackendError, CheckpointError, ConfigError, FormatError, InputError, LayoutError)

PROGRESS_AFTER_S = 2.0

P = ParamSpec("P")
T = TypeVar("T")


class Debug:
    """Whether `--debug` asked for tracebacks; set once, before the command."""

    enabled = False


def command(fn: Callable[P, T]) -> Callable[P, T]:
    """A command whose errors, those of `megamoe.errors`, become an exit code and one message, or a traceback."""

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return fn(*args, **kwargs)
        except MegaMoEError as error:
            if Debug.enabled:
                traceback.print_exception(error)
            else:
                err.print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(EXIT_BAD_INPUT if isinstance(error, BAD_INPUT) else EXIT_FAILED) from error

    return run


def check_writable(path: Path, option: str) -> None:
    """Refuse, before the work is done, an output file that can't be written after it.

    Raises:
        ConfigError: the path is a directory, or in none that can be written to.
    """
    directory = path.absolute().parent
    if path.is_dir() or not os.access(path if path.exists() else directory, os.W_OK):
        raise ConfigError(f"{option} can't be written", got=path, expected="a file in a directory that exists")


def make_folder(folder: Path, option: str) -> None:
    """Make an output folder before the work whose results go there.

    Raises:
        ConfigError: it is a file, or in a folder that can't be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} can't be made ({error.strerror})", got=folder, expected="a folder") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} can't be written", got=folder, expected="a folder that can be written to")


def say(text: str) -> None:
    """Print a line with markup; long lines are left to the terminal to break."""
    out.print(text, soft_wrap=True)


def bytes_text(num_bytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """0.00123 -> "1.23 ms"."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


class RankProgress:
    """A bar for each rank, on stderr, shown only where the work takes longer than two seconds and someone looks."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
        self._tasks: dict[tuple[int, str], TaskID] = {}
        self._timer = threading.Timer(PROGRESS_AFTER_S, self._progress.start)
        self._timer.daemon = True

    def report(self, rank: int, message: tuple[str, int, int]) -> None:
        """Take in (what, done, total) of a rank."""
        what, done, total = message
        key = (rank, what)
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(f"rank {rank} {what}", total=total)
        self._progress.update(self._tasks[key], completed=done, visible=done < total)

    def __enter__(self) -> RankProgress:
        self._timer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()
        self._progress.stop()

"""Checkpoints for the command line, made by examples/make_checkpoint.py, and a way to call it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megamoe.cli import app

MAKE_CHECKPOINT = Path(__file__).parents[4] / "examples" / "make_checkpoint.py"


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """stdout as JSON."""
        value: dict[str, Any] = json.loads(self.stdout)
        return value


Call = Callable[..., Result]


@pytest.fixture
def megamoe(monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs `megamoe ARGS...` in this process; ranks are processes as ever."""
    monkeypatch.delenv("MEGAMOE_BACKEND", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args: object, exit_code: int | None = 0) -> Result:
        result = CliRunner().invoke(app, [str(arg) for arg in args])
        if exit_code is not None:
            assert result.exit_code == exit_code, (result.output, result.exception)
        return Result(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small checkpoint in each style: H=256, I=128, 8 experts, top-2, two shards."""
    spec = importlib.util.spec_from_file_location("make_checkpoint", MAKE_CHECKPOINT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    paths = {}
    for style in ("deepseek-v3", "mixtral", "gpt-oss"):
        paths[style] = tmp_path_factory.mktemp(style)
        sizes = ["--hidden", "256", "--intermediate", "128", "--experts", "8", "--top-k", "2", "--shards", "2"]
        script.main([str(paths[style]), "--style", style, *sizes])
    return paths

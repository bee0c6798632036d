"""Where an engine is installed, its benchmark client takes the options that the serving run passes."""

from __future__ import annotations

import ast
import importlib.util
import runpy
from pathlib import Path

import pytest

STAND_IN = Path(__file__).with_name("stand_in")
CLIENTS = {
    "sglang": ("sglang/bench_serving.py", ("benchmark/serving.py",)),
    "vllm": ("vllm/entrypoints/cli/main.py", ("benchmarks/serve.py", "benchmarks/datasets/datasets.py")),
    "lm_eval": ("lm_eval/__main__.py", ("_cli/run.py",)),
}


@pytest.mark.parametrize("package", CLIENTS)
def test_an_installed_client_takes_the_options_of_its_stand_in(package: str) -> None:
    """Read from its files: an engine may not be importable here."""
    stand_in, files = CLIENTS[package]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    names = runpy.run_path(str(STAND_IN / stand_in))
    taken = set().union(*(strings_of(Path(spec.origin).parent / file) for file in files))
    assert {*names["OPTIONS"], *names.get("SWITCHES", ())} <= taken


def strings_of(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}

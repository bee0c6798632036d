"""The code objects that the wheel ships are those of tests/code_objects.json, and all of them have been executed."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.usefixtures("toolchain")


@pytest.fixture(scope="module")
def store(toolchain: None, tmp_path_factory: pytest.TempPathFactory):
    import shipped

    return shipped.build_all(tmp_path_factory.mktemp("code"))


def test_what_is_built_is_what_the_file_says(store) -> None:
    """Another code object is red until `shipped.py` has executed it and written its hash."""
    import shipped

    assert dict(store.hashes) == json.loads(shipped.HASHES.read_text()), f"run {Path(shipped.__file__).name}"


def test_each_of_them_is_executed(layers: ModuleType, store) -> None:
    """In 24 calls, each held to the staged reference. Nothing is executed that is not among them."""
    import shipped

    from megamoe_rocm.isa.device import Programs

    programs, executed = Programs(store.find), set()
    for tile, problem, quantized in shipped.calls(layers):
        executed |= shipped.execute(layers, programs, tile, problem, quantized)
    assert executed == set(store.hashes.values())

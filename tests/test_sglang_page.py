"""docs/sglang.md promises to list what the adapter enters SGLang through."""

from __future__ import annotations

from pathlib import Path

import pytest

from megamoe.integrations import sglang as adapter

PAGE = (Path(__file__).parents[1] / "docs" / "sglang.md").read_text()


@pytest.mark.parametrize("upstream", adapter.HOOKED, ids=lambda upstream: upstream.name)
def test_every_hooked_name_is_on_the_page(upstream: adapter.Upstream) -> None:
    assert f"| `{upstream.name}` | hooked" in PAGE


def test_release_and_choice_are_on_the_page() -> None:
    assert f"`{adapter.SUPPORTED}`" in PAGE
    assert f"--moe-runner-backend {adapter.RUNNER}" in PAGE

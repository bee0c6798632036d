"""Each backend claims what tests/capabilities.toml lists, and every claim means something."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from megamoe.backend import Capability
from megamoe.registry import installed_backends, load

LISTED: dict[str, list[str]] = {
    name: table["capabilities"]
    for name, table in tomllib.loads(Path(__file__).with_name("capabilities.toml").read_text()).items()
}


def test_every_backend_of_the_repository_is_listed() -> None:
    assert set(LISTED) == set(installed_backends()), "install the three packages; list a new backend in the file"


@pytest.mark.parametrize("name", LISTED)
def test_claims_are_those_listed(name: str) -> None:
    backend = load(name).backend
    assert backend is not None, load(name).verdict.detail
    claimed, listed = {str(capability) for capability in backend.capabilities()}, set(LISTED[name])
    assert not listed - claimed, f"{name} no longer claims {sorted(listed - claimed)}"
    assert not claimed - listed, f"{name} claims {sorted(claimed - listed)}: list it in tests/capabilities.toml"


@pytest.mark.parametrize("name", LISTED)
def test_list_is_well_formed(name: str) -> None:
    assert set(LISTED[name]) <= {str(capability) for capability in Capability}
    assert len(set(LISTED[name])) == len(LISTED[name])


def test_the_reference_offers_all_but_graphs() -> None:
    """It is what others are compared with: a mode that it lacks could not be tested anywhere."""
    assert set(LISTED["reference"]) == {str(capability) for capability in Capability} - {"graph_capture"}

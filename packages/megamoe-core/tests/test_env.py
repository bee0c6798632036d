"""Environment variables: defaults, values, and values that make no sense."""

from pathlib import Path

import pytest

from megamoe import env
from megamoe.errors import ConfigError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEGAMOE_BACKEND", "MEGAMOE_TIMEOUT_S", "MEGAMOE_DEBUG", "MEGAMOE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_defaults() -> None:
    assert env.backend() is None
    assert env.timeout_s() == 300
    assert not env.debug()
    assert env.cache_dir() == Path.home() / ".cache" / "megamoe"


def test_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGAMOE_BACKEND", "cuda")
    monkeypatch.setenv("MEGAMOE_TIMEOUT_S", "0.5")
    monkeypatch.setenv("MEGAMOE_DEBUG", "1")
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    assert env.backend() == "cuda"
    assert env.timeout_s() == 0.5
    assert env.debug()
    assert env.cache_dir() == tmp_path


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_a_timeout_is_a_positive_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MEGAMOE_TIMEOUT_S", text)
    with pytest.raises(ConfigError, match=f"MEGAMOE_TIMEOUT_S.*{text}"):
        env.timeout_s()


@pytest.mark.parametrize("text", ["true", "no", "2"])
def test_debug_is_0_or_1(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """ "false" and "off" must not switch it on."""
    monkeypatch.setenv("MEGAMOE_DEBUG", text)
    with pytest.raises(ConfigError, match=f"MEGAMOE_DEBUG.*{text}.*0 or 1"):
        env.debug()


@pytest.mark.parametrize("text", ["", "0"])
def test_debug_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MEGAMOE_DEBUG", text)
    assert not env.debug()

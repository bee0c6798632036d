"""Environment variables: defaults, values, and values that make no sense."""

import os
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path

import pytest

from megamoe import env
from megamoe.errors import ConfigError
from megamoe.launch import RankContext

SGLANG = ("UNSUPPORTED", "TRANSPORT", "MAX_TOKENS")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BACKEND", "TIMEOUT_S", "DEBUG", "CACHE_DIR", "RANKS_PER_GPU", *(f"SGLANG_{name}" for name in SGLANG)):
        monkeypatch.delenv(f"MEGAMOE_{name}", raising=False)


def test_defaults() -> None:
    assert env.backend() is None
    assert env.timeout_s() == 300
    assert not env.debug()
    assert env.cache_dir() == Path.home() / ".cache" / "megamoe"
    assert env.rocm_device() is None
    assert env.ranks_per_gpu() == 1
    assert (env.sglang_unsupported(), env.sglang_transport(), env.sglang_max_tokens()) == ("error", "bf16", None)


def test_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGAMOE_BACKEND", "cuda")
    monkeypatch.setenv("MEGAMOE_TIMEOUT_S", "0.5")
    monkeypatch.setenv("MEGAMOE_DEBUG", "1")
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MEGAMOE_ROCM_DEVICE", "isa")
    assert env.rocm_device() == "isa"
    env.set_rocm_device("nvidia")
    assert (env.rocm_device(), os.environ["MEGAMOE_ROCM_DEVICE"]) == ("nvidia", "nvidia")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    env.set_rocm_device("isa")
    assert os.environ["TRITON_INTERPRET"] == "0"
    env.set_rocm_device("interpreter")
    assert (env.rocm_device(), os.environ["TRITON_INTERPRET"]) == ("interpreter", "1")
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


def test_options_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(SGLANG, ("engine", "fp8_blockwise_1x32", "4096")):
        monkeypatch.setenv(f"MEGAMOE_SGLANG_{name}", value)
    options = (env.sglang_unsupported(), env.sglang_transport(), env.sglang_max_tokens())
    assert options == ("engine", "fp8_blockwise_1x32", 4096)


@pytest.mark.parametrize("text", ["many", "0", "-5", "1.5"])
@pytest.mark.parametrize(
    "variable, read",
    [("MEGAMOE_SGLANG_MAX_TOKENS", env.sglang_max_tokens), ("MEGAMOE_RANKS_PER_GPU", env.ranks_per_gpu)],
)
def test_a_count_is_a_positive_integer(
    monkeypatch: pytest.MonkeyPatch, variable: str, read: Callable[[], object], text: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=f"{variable}.*{text}"):
        read()


def test_ranks_that_share_a_gpu_find_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pipe, _ = Pipe()
    ranks = [RankContext(rank=rank, world_size=4, name="n", directory=tmp_path, pipe=pipe) for rank in range(4)]
    assert [rank.gpu.index for rank in ranks] == [0, 1, 2, 3]
    monkeypatch.setenv("MEGAMOE_RANKS_PER_GPU", "2")
    assert [rank.gpu.index for rank in ranks] == [0, 0, 1, 1]

"""What of the adapter for SGLang needs no SGLang: releases, the guard of upstream names, options.

`tests/engines/sglang` holds it against SGLang's own classes.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megamoe.errors import ConfigError
from megamoe.integrations import sglang as megamoe_sglang
from megamoe.integrations import versions
from megamoe.integrations.sglang import HOOKED, RUNNER, SUPPORTED, UPSTREAM, Upstream, require_upstream
from megamoe.problem import Transport

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_importing_the_adapter_imports_no_engine() -> None:
    program = "import sys, megamoe.integrations.sglang; sys.exit('sglang' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], timeout=120, check=True)


def test_extra_and_entry_point_are_the_adapters() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert project["optional-dependencies"]["sglang"] == [f"sglang{SUPPORTED}"]
    assert project["entry-points"]["sglang.srt.plugins"] == {"megamoe": "megamoe.integrations.sglang:register"}


@pytest.mark.parametrize("release", ["0.5.22", "0.5.24", "0.6.0"])
def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    pytest.importorskip("packaging")
    monkeypatch.setattr(versions, "version", lambda _: release)
    with pytest.raises(ConfigError, match=f"got sglang {release}; expected sglang>=0.5.23,<0.5.24"):
        megamoe_sglang.register()
    assert megamoe_sglang._adapter is None
    assert megamoe_sglang.metrics() == []


def test_a_missing_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(distribution: str) -> str:
        raise versions.PackageNotFoundError(distribution)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(ConfigError, match=r'sglang is not installed.*pip install "megamoe-core\[sglang\]"'):
        megamoe_sglang.register()


def test_upstream_names_that_are_as_they_were() -> None:
    require_upstream(
        [
            Upstream(name="shutil.copyfileobj", parameters=("fsrc", "fdst", "length")),
            Upstream(name="textwrap.TextWrapper.fill", parameters=("self", "text")),
            Upstream(name="enum.Enum"),
        ]
    )


@pytest.mark.parametrize("name", ["shutil.copyfileobject", "textwrap.TextWrapper.filled", "no_such_module.thing"])
def test_an_upstream_name_that_is_gone_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"SGLang has no {name}.*report it"):
        require_upstream([Upstream(name=name)])


def test_an_upstream_name_with_other_parameters_is_named() -> None:
    with pytest.raises(ConfigError, match=r"textwrap.TextWrapper.fill takes.*got \(self, text\); expected \(self\)"):
        require_upstream([Upstream(name="textwrap.TextWrapper.fill", parameters=("self",))])


def test_one_name_is_hooked_and_none_is_listed_twice() -> None:
    assert [upstream.name.rpartition(".")[2] for upstream in HOOKED] == ["get_quant_method"]
    assert len({upstream.name for upstream in UPSTREAM}) == len(UPSTREAM)
    assert RUNNER != "megamoe"  # that one is SGLang's


def test_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_SGLANG_UNSUPPORTED", "engine")
    monkeypatch.setenv("MEGAMOE_SGLANG_TRANSPORT", "fp8_blockwise_1x32")
    monkeypatch.setenv("MEGAMOE_SGLANG_MAX_TOKENS", "512")
    assert not megamoe_sglang.options_from_environment().metrics
    monkeypatch.setenv("MEGAMOE_SGLANG_METRICS", "1")
    options = megamoe_sglang.options_from_environment()
    assert options.metrics
    assert (options.unsupported, options.transport) == ("engine", Transport.FP8_BLOCKWISE_1X32)
    assert options.num_max_tokens_per_rank == 512


@pytest.mark.parametrize("variable", ["UNSUPPORTED", "TRANSPORT"])
def test_an_option_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(f"MEGAMOE_SGLANG_{variable}", "perhaps")
    with pytest.raises(ConfigError, match="unknown .*perhaps"):
        megamoe_sglang.options_from_environment()

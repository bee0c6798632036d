"""What the adapters to serving engines share, and how they answer where the engine is missing or another release."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megamoe.errors import BackendUnavailableError, CapacityError, ConfigError, LayoutError, SessionError
from megamoe.formats import FP8_128X128
from megamoe.integrations import vllm as megamoe_vllm
from megamoe.integrations.engine_layer import EngineLayer, EngineOptions, Unsupported
from megamoe.integrations.sessions import SessionPool, session_for
from megamoe.problem import MoEProblem
from megamoe.registry import select_backend
from megamoe.symm import InprocGroup
from megamoe.tensors import Fp8BlockWeights
from megamoe.testing.data import make_weights, shard
from megamoe.testing.threads import on_ranks

PROBLEM = MoEProblem(
    hidden_size=256, intermediate_size=128, num_experts=4, top_k=2, num_max_tokens_per_rank=16, quant="a8w8"
)


def experts(seed: int) -> Fp8BlockWeights:
    g = torch.Generator().manual_seed(seed)
    w13 = FP8_128X128.quantize(0.1 * torch.randn(4, 256, 256, generator=g))
    w2 = FP8_128X128.quantize(0.1 * torch.randn(4, 256, 128, generator=g))
    assert w13.scales is not None
    assert w2.scales is not None
    return Fp8BlockWeights(
        layout="packed",
        w13_weight=w13.payload,
        w13_weight_scale=w13.scales,
        w2_weight=w2.payload,
        w2_weight_scale=w2.scales,
    )


@pytest.fixture
def pool() -> Iterator[SessionPool]:
    pool = SessionPool()
    yield pool
    pool.close()


@pytest.fixture
def layer(pool: SessionPool) -> EngineLayer:
    return opened(pool, experts(0))


def opened(pool: SessionPool, weights: Fp8BlockWeights) -> EngineLayer:
    return EngineLayer.open(pool, PROBLEM, weights, backend="reference", device=torch.device("cpu"))


def batch(num_tokens: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(7)
    ids = torch.rand(num_tokens, 4, generator=g).argsort(-1)[:, :2].int()
    return torch.randn(num_tokens, 256, generator=g).bfloat16(), ids, torch.rand(num_tokens, 2, generator=g)


def test_what_to_do_once_its_adapter_is_closed(pool: SessionPool, layer: EngineLayer) -> None:
    pool.close()
    with pytest.raises(SessionError, match="closed; its adapter closed it: load the model again"):
        layer(*batch())
    with pytest.raises(SessionError, match="closed; load the model again"):
        opened(pool, experts(0))


def test_a_layer_is_its_sessions_forward(pool: SessionPool, layer: EngineLayer) -> None:
    x, ids, weights = batch()
    expected = layer.session.forward(x, ids, weights, layer.weights)
    assert torch.equal(layer(x, ids, weights), expected)
    assert torch.equal(layer(x, ids, weights.bfloat16()), layer(x, ids, weights.bfloat16().float()))
    assert not layer(x, ids, weights, torch.tensor(4, dtype=torch.int32))[4:].any()
    assert layer.capacity == 16
    assert opened(pool, experts(1)).session is layer.session
    assert pool.problems() == (PROBLEM,)


def test_expert_tensors_have_the_names_of_the_checkpoint(layer: EngineLayer) -> None:
    assert set(layer.expert_tensors()) == {name for name, _ in experts(0).tensors()}
    assert all(tensor.shape[0] == 4 for tensor in layer.expert_tensors().values())


def test_an_engines_parameters_are_read_also_when_their_data_is_exchanged(
    pool: SessionPool, layer: EngineLayer
) -> None:
    x, ids, weights = batch()
    own = {name: nn.Parameter(tensor.clone(), requires_grad=False) for name, tensor in layer.expert_tensors().items()}
    reading = layer.reading(own)
    assert torch.equal(reading(x, ids, weights), layer(x, ids, weights))
    other = opened(pool, experts(1))
    for name, tensor in other.expert_tensors().items():
        own[name].data = tensor
    assert torch.equal(reading(x, ids, weights), other(x, ids, weights))
    assert not torch.equal(reading(x, ids, weights), layer(x, ids, weights))


@pytest.mark.parametrize("change", ["name", "shape", "dtype", "strides"])
def test_tensors_that_are_not_the_layers_are_refused(layer: EngineLayer, change: str) -> None:
    tensors = layer.expert_tensors()
    scale, payload = tensors.pop("w2_weight_scale"), tensors["w2_weight"]
    changed = {
        "name": {"w2_weight_scale_inv": scale},
        "shape": {"w2_weight_scale": scale[:3]},
        "dtype": {"w2_weight_scale": scale.double()},
        "strides": {"w2_weight_scale": scale, "w2_weight": payload.mT.contiguous().mT},
    }
    with pytest.raises(LayoutError, match="these tensors are not the layer's"):
        layer.reading(tensors | changed[change])


def test_it_is_one_operator_under_compile(layer: EngineLayer) -> None:
    compiled = torch.compile(lambda *arguments: layer(*arguments), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*batch()), layer(*batch()))


def test_layers_are_counted_one_by_one_also_under_compile(pool: SessionPool) -> None:
    """Two layers on one session: rows of each, and what the session dropped once."""
    first, second = (
        EngineLayer.open(pool, PROBLEM, experts(seed), backend="reference", device=torch.device("cpu"), counted_as=name)
        for seed, name in ((0, "layers.0"), (1, "layers.1"))
    )
    uncounted = opened(pool, experts(2))
    x, ids, weights = batch()
    ids[0] = torch.tensor([4, -1])
    rows = torch.bincount(ids[1:].flatten(), minlength=4)
    first(x, ids, weights)
    second(x[:0], ids[:0], weights[:0])
    uncounted(x, ids, weights)
    compiled = torch.compile(lambda *arguments: second(*arguments), fullgraph=True, backend="aot_eager")
    compiled(x, ids, weights)
    (metrics,) = pool.metrics()
    counted = {name: layer.tolist() for name, layer in metrics.rows_per_layer.items()}
    assert counted == {"layers.0": rows.tolist(), "layers.1": rows.tolist()}
    assert metrics.rows_per_expert.tolist() == (2 * rows).tolist()
    assert (metrics.calls, metrics.dropped_ids, metrics.timeouts) == (3, 3, 0)
    assert metrics.imbalance == pytest.approx(float(4 * rows.max() / rows.sum()))
    assert json.loads(json.dumps(metrics.as_dict()))["rows_per_layer"] == counted
    (nothing,) = pool.metrics()
    assert (nothing.calls, nothing.dropped_ids, nothing.imbalance) == (0, 0, 0)


def test_ranks_take_the_session_that_the_largest_batch_of_a_step_needs() -> None:
    """Two ranks, each with a session for decoding and one for prefill; which of them has the long batch changes."""
    prefill = replace(PROBLEM, ep_size=2, num_max_tokens_per_rank=64)
    decode = replace(prefill, num_max_tokens_per_rank=4)
    steps = [(3, 60), (2, 4), (60, 3), (0, 1), (0, 64)]

    def body(group: InprocGroup) -> list[int]:
        backend = select_backend("reference", prefill)
        sessions = [backend.open(backend.plan(problem), group) for problem in (prefill, decode)]
        weights = sessions[0].prepare(shard(make_weights(prefill, torch.device("cpu")), 2)[group.rank])
        taken = []
        for step in steps:
            call = batch(step[group.rank])
            told = group.all_gather(bytes([len(call[0])]), timeout_s=10, phase="largest batch")
            session = session_for(max(own[0] for own in told), sessions)
            y = session.forward(*call, weights)
            assert torch.equal(y, sessions[0].forward(*call, weights))
            taken.append(session.plan.problem.num_max_tokens_per_rank)
        with pytest.raises(CapacityError, match=r"got 65 tokens on a rank; expected at most \[4, 64\]"):
            session_for(65, sessions)
        for session in sessions:
            session.close()
        return taken

    assert on_ranks(2, body) == [[64, 4, 64, 4, 64]] * 2


def test_options_are_checked() -> None:
    options = EngineOptions(unsupported="engine")
    assert options.unsupported is Unsupported.ENGINE
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"backend": "cpu"}, "unknown backend"),
        ({"unsupported": "eager"}, "unknown unsupported; got 'eager'; expected error or engine"),
        ({"transport": "fp4"}, "unknown transport"),
        ({"num_max_tokens_per_rank": 0}, "num_max_tokens_per_rank is not a positive integer"),
        ({"metrics": 1}, "metrics is not a bool"),
    ]
    for given, message in wrong:
        with pytest.raises(ConfigError, match=message):
            EngineOptions(**given)


def test_the_reference_is_no_backend_for_a_gpu(pool: SessionPool) -> None:
    with pytest.raises(BackendUnavailableError, match="the reference backend computes on CPU"):
        EngineLayer.open(pool, PROBLEM, experts(0), backend="reference", device=torch.device("cuda"))


# -- vLLM, where it is not installed or another release ----------------------------------------------------------------


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """As if this release of vLLM was there, or none."""

    def answer(distribution: str) -> str:
        assert distribution == "vllm"
        if version is None:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return version

    monkeypatch.setattr("megamoe.integrations.versions.version", answer)


@pytest.mark.parametrize(
    ("version", "complaint"),
    [
        (None, "vllm is not installed; expected vllm>=0.33,<0.34"),
        ("0.32.1", "got vllm 0.32.1; expected vllm>=0.33,<0.34"),
        ("0.34.0rc1", "got vllm 0.34.0rc1"),
        ("1.0", "got vllm 1.0"),
    ],
)
def test_another_vllm_is_refused_by_name(
    version: str | None, complaint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The entry point says so in the log: what it raised would keep vLLM from starting any model."""
    installed(monkeypatch, version)
    with pytest.raises(ConfigError, match=r'pip install "megamoe-core\[vllm\]"') as error:
        megamoe_vllm.register()
    assert complaint in str(error.value)
    with caplog.at_level(logging.WARNING, logger="megamoe"):
        megamoe_vllm.plugin()
    assert f"--quantization megamoe is not available in vLLM: {error.value}" in caplog.text


def test_extras_and_entry_points_are_those_of_the_adapter() -> None:
    required = importlib.metadata.requires("megamoe-core") or []
    assert any(line.split(";")[0].replace(" ", "") == "vllm<0.34,>=0.33" for line in required), required
    assert megamoe_vllm.SUPPORTED == ">=0.33,<0.34"
    (entry,) = (e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "megamoe")
    assert entry.load() is megamoe_vllm.plugin


def test_loading_the_plugin_imports_no_engine() -> None:
    code = "import sys; from megamoe.integrations import vllm; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

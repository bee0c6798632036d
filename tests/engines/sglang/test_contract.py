"""The adapter against SGLang's own classes, installed without their kernels: `nox -s engines-sglang` runs these.

What it relies on is held by names and signatures, so that a release that changes one turns a test red.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe import expert_tensors
from megamoe.errors import (
    BackendUnavailableError,
    CapacityError,
    ConfigError,
    SessionError,
    UnsupportedProblemError,
)
from megamoe.integrations import sglang as megamoe_sglang
from megamoe.integrations.engine_layer import EngineLayer
from megamoe.integrations.sglang import RUNNER, SUPPORTED, UPSTREAM, require_upstream
from megamoe.problem import QuantMode
from megamoe.tensors import Fp8BlockWeights, PreparedWeights
from megamoe.testing.tolerances import ORACLE_GATES

pytest.importorskip("sglang", reason="`nox -s engines-sglang` installs it and runs these")

import sglang_ranks as made
from packaging.specifiers import SpecifierSet
from sglang.srt import plugins, runtime_context
from sglang.srt.arg_groups.arg_utils import field_names
from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES
from sglang.srt.arg_groups.overrides import model_config_of, resolving_view
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner import runner
from sglang.srt.layers.moe.topk import TopK, TopKOutputFormat
from sglang.srt.layers.moe.utils import MoeRunnerBackend, initialize_moe_config
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
from sglang_models import EXPERTS, HIDDEN, INTER, TOP_K, exact, experts, write_config

from megamoe.integrations import sglang_config
from megamoe.integrations.sglang_moe import MegaMoEMethod, RunnerCore

GATE = ORACLE_GATES[QuantMode.A8W8].rel_l2


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_config(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def server(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """SGLang's runtime in this process, with one rank and the plugin loaded by SGLang itself."""
    plugins.load_plugins()
    store = tmp_path_factory.mktemp("groups") / "store"
    made.start(made.server_args(path), f"file://{store}")
    yield
    made.stop()


@pytest.fixture
def layer() -> FusedMoE:
    return _loaded()


@pytest.fixture
def own_runner() -> Iterator[None]:
    """The server as one that didn't ask for MegaMoE has it."""
    flags = runtime_context.get_flags().moe
    ours, flags.runner_backend = flags.runner_backend, MoeRunnerBackend.TRITON
    yield
    flags.runner_backend = ours


def assert_near(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert (got.float() - expected).norm() <= GATE * expected.norm()


# -- what the adapter enters through --------------------------------------------------------------------------------


def test_release() -> None:
    assert version("sglang") == "0.5.23"
    assert SpecifierSet(SUPPORTED).contains(version("sglang"))


@pytest.mark.parametrize("upstream", UPSTREAM, ids=lambda upstream: upstream.name.removeprefix("sglang.srt."))
def test_what_the_adapter_relies_on(upstream: megamoe_sglang.Upstream) -> None:
    require_upstream([upstream])


@pytest.mark.parametrize("field", [*sglang_config.PLAIN, *sglang_config.READ, *sglang_config.DECLARED])
def test_fields_that_the_adapter_reads_or_declares(field: str) -> None:
    assert field in field_names(ServerArgs)


@pytest.mark.parametrize("field", sglang_config.PLAIN)
def test_a_plain_server_is_what_sglang_starts_by_default(field: str) -> None:
    assert getattr(ServerArgs(model_path="none"), field) == sglang_config.PLAIN[field][0]


def test_entry_point_is_found_and_loading_it_again_changes_nothing() -> None:
    found = [point for point in entry_points(group=plugins.GENERAL_PLUGINS_GROUP) if point.name == "megamoe"]
    assert [point.load() for point in found] == [megamoe_sglang.register]
    before = (list(MOE_RUNNER_BACKEND_CHOICES), {name: len(hooks) for name, hooks in HookRegistry._hooks.items()})
    found[0].load()()
    plugins._plugins_loaded = False
    plugins.load_plugins()
    assert before == (
        list(MOE_RUNNER_BACKEND_CHOICES),
        {name: len(hooks) for name, hooks in HookRegistry._hooks.items()},
    )
    assert MOE_RUNNER_BACKEND_CHOICES.count(RUNNER) == 1
    assert runner._CUSTOM_RUNNER_CORE_FACTORIES[RUNNER] is RunnerCore


def test_only_the_hooked_name_is_hooked() -> None:
    assert set(HookRegistry._hooks) == {upstream.name for upstream in megamoe_sglang.HOOKED}


def test_name_is_none_of_sglangs() -> None:
    assert RUNNER not in {member.value for member in MoeRunnerBackend}
    assert "megamoe" in MOE_RUNNER_BACKEND_CHOICES  # what "megamoe" would have meant


# -- opt-in ---------------------------------------------------------------------------------------------------------


def test_a_server_that_does_not_ask_is_as_it_was(path: str) -> None:
    args = made.server_args(path, moe_runner_backend="auto", tp_size=2, attn_dp_size=2)
    args.resolve_once()
    view = resolving_view(args)
    assert (view.moe_runner_backend, view.moe_a2a_backend, view.ep_size) == ("auto", "none", 1)
    assert not view.disable_shared_experts_fusion


@pytest.mark.usefixtures("own_runner")
def test_a_layer_of_such_a_server_is_as_it_was() -> None:
    layer = made.make_experts()
    assert type(layer.quant_method) is Fp8MoEMethod
    assert layer.runner_backend is MoeRunnerBackend.TRITON


# -- configuration --------------------------------------------------------------------------------------------------


def test_one_rank_needs_no_mode(path: str) -> None:
    args = made.server_args(path)
    args.resolve_once()
    view = resolving_view(args)
    assert (view.moe_runner_backend, view.moe_a2a_backend, view.ep_size) == (RUNNER, "none", 1)


def test_several_ranks_share_the_experts_and_keep_their_tokens(path: str) -> None:
    args = made.server_args(path, tp_size=2, attn_dp_size=2)
    args.resolve_once()
    view = resolving_view(args)
    assert (view.moe_runner_backend, view.moe_a2a_backend, view.ep_size) == (RUNNER, sglang_config.MODE, 2)
    assert view.disable_shared_experts_fusion


def test_redundant_experts_are_counted(path: str) -> None:
    args = made.server_args(path, tp_size=2, attn_dp_size=2, enable_eplb=True, ep_num_redundant_experts=2)
    args.resolve_once()
    view = resolving_view(args)
    assert (view.moe_a2a_backend, view.ep_size) == (sglang_config.MODE, 2)
    options = megamoe_sglang.EngineOptions()
    problem = sglang_config.problem_of_model(options, view, model_config_of(args))
    assert (problem.num_experts, problem.num_local_experts) == (EXPERTS + 2, (EXPERTS + 2) // 2)


def test_rules_for_prefill_graphs_see_the_mode(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang applies them before the mode is known; one of them turns such graphs off in it."""
    seen: list[str] = []
    monkeypatch.setattr(
        sglang_config,
        "apply_cuda_graph_compatibility",
        lambda args: seen.append(resolving_view(args).moe_a2a_backend),
    )
    made.server_args(path, tp_size=2, attn_dp_size=2).resolve_once()
    assert seen == [sglang_config.MODE]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "shared tokens": ({"tp_size": 2}, {}, "share their tokens.*attn_dp_size=1"),
    "another mode": ({"moe_a2a_backend": "deepep"}, {}, "moves the tokens itself.*deepep"),
    "speculation": ({"speculative_algorithm": "EAGLE"}, {}, "speculative decoding was not tried"),
    "overlap": ({"enable_two_batch_overlap": True, "tp_size": 2, "attn_dp_size": 2}, {}, "two-batch overlap"),
    "no quantisation": ({}, {"quantization_config": None}, "another format"),
    "other blocks": (
        {},
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]}},
        r"another format.*\[64, 64\]",
    ),
    "model": ({"tp_size": 2, "attn_dp_size": 2}, {"architectures": ["ErnieMoeForCausalLM"]}, "on several ranks"),
    "top_k": ({}, {"num_experts": 32, "num_experts_per_tok": 17}, "top_k is too large"),
    "size": ({}, {"hidden_size": 192}, "hidden_size"),
    "uneven": ({"tp_size": 2, "attn_dp_size": 2}, {"num_experts": 7}, "does not divide num_experts"),
}


def _refused_args(tmp_path: Path, case: str) -> ServerArgs:
    arguments, changes, _ = REFUSED[case]
    return made.server_args(write_config(tmp_path / "model", **changes), **arguments)


@pytest.mark.parametrize("case", REFUSED)
def test_what_megamoe_cannot_run_is_refused(tmp_path: Path, case: str) -> None:
    with pytest.raises((UnsupportedProblemError, ConfigError), match=REFUSED[case][2]):
        made_choice(_refused_args(tmp_path, case), "error")


@pytest.mark.parametrize("case", REFUSED)
def test_or_left_to_sglang_with_a_warning(tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    args = _refused_args(tmp_path, case)
    before = args.moe_a2a_backend
    with caplog.at_level(logging.WARNING, logger="megamoe"):
        made_choice(args, "engine")
    view = resolving_view(args)
    assert (view.moe_runner_backend, view.moe_a2a_backend) == ("auto", before)
    assert [record.message for record in caplog.records if "by itself, not by MegaMoE" in record.message]


def made_choice(args: ServerArgs, unsupported: str) -> None:
    """Both steps, without SGLang's own, which have opinions on such servers too."""
    options = megamoe_sglang.EngineOptions(unsupported=unsupported, num_max_tokens_per_rank=32)
    sglang_config.choose_runner(options, args, lambda _: None)
    sglang_config.choose_mode(options, args, lambda _: None)


def test_the_cpu_never_computes_for_a_gpu(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_BACKEND", "reference")
    args = made.server_args(path)
    args.device = "cuda"
    with pytest.raises(BackendUnavailableError, match="computes on CPU.*cuda"):
        made_choice(args, "error")


# -- layers ---------------------------------------------------------------------------------------------------------


def test_layer_has_the_names_shapes_and_types_of_sglang(layer: FusedMoE) -> None:
    assert {name: (tuple(p.shape), p.dtype) for name, p in layer.named_parameters()} == {
        "w13_weight": ((EXPERTS, 2 * INTER, HIDDEN), torch.float8_e4m3fn),
        "w13_weight_scale_inv": ((EXPERTS, 2 * INTER // 128, HIDDEN // 128), torch.float32),
        "w2_weight": ((EXPERTS, HIDDEN, INTER), torch.float8_e4m3fn),
        "w2_weight_scale_inv": ((EXPERTS, HIDDEN // 128, INTER // 128), torch.float32),
    }
    assert isinstance(layer.quant_method, MegaMoEMethod)
    assert isinstance(layer.quant_method.runner.runner_core, RunnerCore)
    assert layer.quant_method.runner.fused_func is None


def test_loader_puts_gate_rows_first(layer: FusedMoE) -> None:
    checkpoint = experts()
    gate, up = layer.w13_weight[3].float().chunk(2)
    assert torch.equal(gate, checkpoint["3.gate_proj.weight"].float())
    assert torch.equal(up, checkpoint["3.up_proj.weight"].float())
    assert torch.equal(layer.w2_weight[3].float(), checkpoint["3.down_proj.weight"].float())
    assert torch.equal(layer.w13_weight_scale_inv[3, 1:], checkpoint["3.up_proj.weight_scale_inv"])


def test_forward_is_what_the_experts_compute(layer: FusedMoE) -> None:
    x, ids, weights = made.routing(9, 0)
    assert_near(made.call(layer, x, ids, weights), exact(experts(), x, ids, weights))


def test_forward_has_the_bits_of_megamoe(layer: FusedMoE) -> None:
    x, ids, weights = made.routing(9, 0)
    opened = layer.quant_method.opened
    assert torch.equal(made.call(layer, x, ids, weights), opened.session.forward(x, ids, weights, opened.weights))


def test_shared_experts_that_sglang_fuses_on_one_rank_are_experts(layer: FusedMoE) -> None:
    """The shared expert is the last, and SGLang's router gives every token its id. Here it has expert 0's weights."""
    fused = made.make_experts(num_experts=EXPERTS + 1, top_k=TOP_K + 1, num_fused_shared_experts=1)
    for name, parameter in fused.named_parameters():
        loaded = getattr(layer, name).data
        parameter.data.copy_(torch.cat([loaded, loaded[:1]]))
    fused.quant_method.process_weights_after_loading(fused)
    x, ids, weights = made.routing(5, 0)
    ids, weights = (
        torch.nn.functional.pad(tensor, (0, 1), value=value) for tensor, value in ((ids, EXPERTS), (weights, 1))
    )
    expected = exact(experts(), x, torch.where(ids == EXPERTS, 0, ids), weights)
    assert_near(made.call(fused, x, ids, weights), expected)


def test_no_tokens(layer: FusedMoE) -> None:
    assert made.call(layer, *made.routing(0, 0)).shape == (0, HIDDEN)


def test_padding_rows_are_masked_by_the_router(layer: FusedMoE) -> None:
    """SGLang pads batches; its router gives rows past the count id -1, and MegaMoE computes nothing for them."""
    topk = TopK(top_k=TOP_K, layer_id=0, renormalize=True, use_grouped_topk=False)
    topk.bind_runner_backend(layer.runner_backend, routing_method_type=layer.routing_method_type)
    assert topk.topk_config.output_format is TopKOutputFormat.STANDARD
    x = made.routing(6, 0)[0]
    x[4:] = float("nan")
    logits = torch.randn(6, EXPERTS, generator=torch.Generator().manual_seed(1))
    chosen = topk.forward_native(x, logits, num_token_non_padded=torch.tensor(4))
    assert (chosen.topk_ids[4:] == -1).all()
    with torch.inference_mode():
        y = layer(x.clone(), chosen)
    assert_near(y[:4], exact(experts(), x[:4], chosen.topk_ids[:4], chosen.topk_weights[:4]))
    assert (y[4:] == 0).all()
    assert layer.quant_method.opened.session.receive_counts().sum() == 4 * TOP_K


def test_scaling_factor_is_left_to_the_model_where_sglang_does_so(
    layer: FusedMoE, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA runners apply it, elsewhere models do."""
    from megamoe.integrations import sglang_moe

    x, ids, weights = made.routing(5, 0)
    layer.moe_runner_config.routed_scaling_factor = 2.0
    plain = made.call(layer, x, ids, weights)
    monkeypatch.setattr(sglang_moe, "is_cuda", lambda: True)
    assert torch.equal(made.call(layer, x, ids, weights / 2), plain)


def test_layers_share_a_session(layer: FusedMoE) -> None:
    other = made.make_experts()
    made.load(other, experts(seed=1))
    assert other.quant_method.opened.session is layer.quant_method.opened.session
    x, ids, weights = made.routing(5, 0)
    assert_near(made.call(other, x, ids, weights), exact(experts(seed=1), x, ids, weights))
    assert_near(made.call(layer, x, ids, weights), exact(experts(), x, ids, weights))


def test_layers_are_counted_on_request(monkeypatch: pytest.MonkeyPatch, layer: FusedMoE) -> None:
    adapter = layer.quant_method._adapter
    monkeypatch.setattr(adapter, "options", replace(adapter.options, metrics=True))
    counted, x, ids, weights = _loaded(), *made.routing(5, 0)
    made.call(counted, x, ids, weights)
    made.call(layer, x, ids, weights)
    (metrics,) = megamoe_sglang.metrics()
    rows = torch.bincount(ids.flatten(), minlength=EXPERTS)
    assert {name: rows.tolist() for name in metrics.rows_per_layer} == {counted.layer_name: rows.tolist()}
    assert (metrics.calls, metrics.dropped_ids, metrics.timeouts) == (1, 0, 0)


def test_capacity_is_what_sglang_may_pass(layer: FusedMoE) -> None:
    assert layer.quant_method.opened.capacity == runtime_context.cutedsl_moe_max_num_tokens() == 32
    with pytest.raises(CapacityError):
        made.call(layer, *made.routing(33, 0))


def test_parameters_are_the_memory_that_megamoe_reads(layer: FusedMoE) -> None:
    """What SGLang's balancer gets from a model are slices of the parameters, the expert first."""
    read = {tensor.data_ptr() for tensor in expert_tensors(layer.quant_method.opened.weights).values()}
    assert {p.data_ptr() for p in layer.parameters()} == read
    x, ids, weights = made.routing(5, 0)
    before = made.call(layer, x, ids, weights)
    for parameter in layer.parameters():
        parameter.data[0], parameter.data[1] = parameter.data[1].clone(), parameter.data[0].clone()
    swapped = torch.arange(EXPERTS, dtype=torch.int32)
    swapped[:2] = torch.tensor([1, 0], dtype=torch.int32)
    assert torch.equal(made.call(layer, x, swapped[ids.long()], weights), before)
    assert not torch.equal(made.call(layer, x, ids, weights), before)


def test_so_they_are_where_a_backend_lays_weights_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU backends copy; the reference takes the tensors as they are, so it is made to copy here."""
    session_type = type(_opened(made.make_experts()).session)
    prepare = session_type._prepare

    def copying(session: Any, weights: Fp8BlockWeights) -> PreparedWeights:
        return prepare(session, replace(weights, **{name: tensor.clone() for name, tensor in weights.tensors()}))

    monkeypatch.setattr(session_type, "_prepare", copying)
    layer = made.make_experts()
    before = {p.data_ptr() for p in layer.parameters()}
    opened = _opened(layer)
    read = {tensor.data_ptr() for tensor in expert_tensors(opened.weights).values()}
    assert {p.data_ptr() for p in layer.parameters()} == read
    assert not read & before
    layer.w2_weight.data[:] = layer.w2_weight.data.flip(0)
    x, ids, weights = made.routing(5, 0)
    assert not torch.equal(made.call(layer, x, ids, weights), made.call(_loaded(), x, ids, weights))


def _loaded() -> FusedMoE:
    layer = made.make_experts()
    made.load(layer, experts())
    return layer


def _opened(layer: FusedMoE) -> EngineLayer:
    made.load(layer, experts())
    opened: EngineLayer = layer.quant_method.opened
    return opened


def test_prepared_experts_are_not_loaded_again(layer: FusedMoE) -> None:
    with pytest.raises(SessionError, match="can't be loaded again.*restart"):
        layer.quant_method.restore_weights_before_loading(layer)


def test_a_layer_without_weights_does_not_run() -> None:
    with pytest.raises(SessionError, match="load the model's weights first"):
        made.call(made.make_experts(), *made.routing(2, 0))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"activation": "gelu"}, "activation='gelu'.*silu"),
        ({"is_gated": False}, "is_gated=False"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input=True"),
        ({"gemm1_alpha": 1.702}, "gemm1_alpha=1.702"),
        ({"with_bias": True}, "with_bias=True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_experts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedProblemError, match=message):
        made.make_experts(**changes)


def test_a_clamp_is_passed_on() -> None:
    layer = made.make_experts(swiglu_limit=0.5)
    made.load(layer, experts())
    assert layer.quant_method.opened.session.plan.problem.swiglu_limit == 0.5


def test_unquantised_experts_of_such_a_server_are_refused() -> None:
    """SGLang's own method would run them with this rank's experts only, and nobody would add up the rest."""
    config = made.fp8_config(modules_to_not_convert=["model.layers.0.mlp.experts"])
    with pytest.raises(UnsupportedProblemError, match=r"layers.0.mlp.experts.*UnquantizedFusedMoEMethod"):
        made.make_experts(config)


def test_dense_layers_are_left_alone() -> None:
    from sglang.srt.layers.linear import ReplicatedLinear
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

    linear = ReplicatedLinear(HIDDEN, HIDDEN, bias=False, quant_config=made.fp8_config(), prefix="model.layers.0.gate")
    assert type(linear.quant_method) is Fp8LinearMethod


def test_a_hook_that_was_not_applied_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs a hook that fails and goes on: its own method then has no runner, and no silent result."""
    monkeypatch.setattr(Fp8Config, "get_quant_method", Fp8Config.get_quant_method.__wrapped__)
    layer = made.make_experts()
    assert type(layer.quant_method) is Fp8MoEMethod
    with pytest.raises(AttributeError):
        made.call(layer, *made.routing(2, 0))


def test_flags_follow_the_configuration() -> None:
    initialize_moe_config()
    assert runtime_context.get_flags().moe.runner_backend.value == RUNNER

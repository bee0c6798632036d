"""The adapter against vLLM's own classes, installed without their kernels: `nox -s engines-vllm` runs these.

What the adapter relies on is held by exact signatures and names, so that a release that changes one turns a test red.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

pytest.importorskip("vllm", reason="`nox -s engines-vllm` installs it and runs these")

import vllm_layers_of_tests as made
from vllm import envs
from vllm.config import OffloadConfig, ParallelConfig
from vllm.config.offload import UVAOffloadConfig
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.fused_moe import (
    FusedMoEConfig,
    FusedMoEExpertsModular,
    FusedMoEMethodBase,
    FusedMoEParallelConfig,
    MoEActivation,
)
from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.models.deepseek_v2 import DeepseekV2MoE
from vllm.model_executor.utils import replace_parameter, set_weight_attrs
from vllm.platforms import current_platform
from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm_layers_of_tests import EXPERTS, HIDDEN, INTER, MAX_TOKENS, PREFIX, TOP_K, Case

from megamoe.errors import BackendUnavailableError, CapacityError, ConfigError, SessionError, UnsupportedProblemError
from megamoe.integrations import vllm as megamoe_vllm
from megamoe.integrations import vllm_moe
from megamoe.launch import run_ranks
from megamoe.problem import QuantMode
from megamoe.reference.backend import ReferenceBackend
from megamoe.reference.oracle import oracle
from megamoe.reference.session import ReferenceSession
from megamoe.testing.tolerances import ORACLE_GATES


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One rank's engine, with vLLM's groups set up in this process."""
    megamoe_vllm.register()
    torch.set_num_threads(1)
    one = SimpleNamespace(rank=0, world_size=1, directory=tmp_path_factory.mktemp("group"))
    made_config = made.config()
    with made.joined(made_config, one):
        yield made_config


@pytest.fixture
def runner(engine: Any) -> Any:
    """A layer with its experts."""
    return made.load(made.build(engine), made.checkpoint())


def parameters(function: Any) -> list[str]:
    """Names of a function's parameters."""
    return list(inspect.signature(function).parameters)


# -- what is relied on -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (vllm_moe.MegaMoEConfig, fp8.Fp8Config),
        (vllm_moe.MegaMoEMethod, FusedMoEMethodBase),
        (vllm_moe.MegaMoEExperts, FusedMoEExpertsModular),
    ],
)
def test_overridden_methods_have_the_signatures_of_this_release(ours: type, theirs: type) -> None:
    overridden = [name for name in vars(ours) if not name.startswith("__") and hasattr(theirs, name)]
    assert len(overridden) > 2
    for name in overridden:
        mine, base = inspect.getattr_static(ours, name), inspect.getattr_static(theirs, name)
        assert type(mine) is type(base), name
        if callable(getattr(ours, name)):
            assert parameters(getattr(ours, name)) == parameters(getattr(theirs, name)), name


def test_nothing_else_is_abstract() -> None:
    assert FusedMoEMethodBase.__abstractmethods__ <= vars(vllm_moe.MegaMoEMethod).keys()
    assert FusedMoEExpertsModular.__abstractmethods__ <= vars(vllm_moe.MegaMoEExperts).keys()


def test_called_functions_have_the_signatures_of_this_release() -> None:
    assert parameters(quantization.register_quantization_config) == ["quantization"]
    assert parameters(replace_parameter) == ["layer", "param_name", "new_tensor"]
    assert parameters(set_weight_attrs) == ["weight", "weight_attrs"]
    assert parameters(FusedMoEKernel.__init__) == ["self", "prepare_finalize", "fused_experts"]
    assert {"prefix", "ignored_layers", "fused_mapping", "match_mode"} <= set(parameters(is_layer_skipped))
    assert {"w1_scale", "w2_scale", "block_shape"} <= set(parameters(fp8_w8a8_moe_quant_config))
    assert parameters(fp8.Fp8MoEMethod.create_weights) == parameters(vllm_moe.MegaMoEMethod.create_weights)
    assert parameters(parallel_state.get_ep_group) == []
    assert {"device_group", "rank_in_group", "world_size"} <= parallel_state.GroupCoordinator.__annotations__.keys()


def test_configurations_have_the_fields_that_are_read() -> None:
    assert {
        "num_experts", "experts_per_token", "hidden_dim", "intermediate_size", "intermediate_pad", "activation",
        "device", "in_dtype", "max_num_tokens", "has_bias", "is_lora_enabled", "skip_final_all_reduce", "swiglu_limit",
        "swiglu_alpha", "swiglu_beta", "moe_parallel_config",
    } <= {field.name for field in fields(FusedMoEConfig)}  # fmt: skip
    assert {"tp_size", "pcp_size", "dp_size", "ep_size", "sp_size", "use_ep", "all2all_backend"} <= {
        field.name for field in fields(FusedMoEParallelConfig)
    }
    assert "is_padding" in {field.name for field in fields(ForwardContext)}
    assert "worker_extension_cls" in {field.name for field in fields(ParallelConfig)}
    assert envs.VLLM_MOE_SKIP_PADDING is True


# -- the way in --------------------------------------------------------------------------------------------------------


def test_the_entry_point_can_be_loaded_twice(engine: Any) -> None:
    mine = [entry for entry in entry_points(group=DEFAULT_PLUGINS_GROUP) if entry.name == "megamoe"]
    assert [entry.value for entry in mine] == ["megamoe.integrations.vllm:plugin"]
    for _ in range(2):
        load_plugins_by_group(DEFAULT_PLUGINS_GROUP)["megamoe"]()
    assert quantization.QUANTIZATION_METHODS.count("megamoe") == 1
    assert (current_platform.supported_quantization or ["megamoe"]).count("megamoe") == 1
    assert quantization.get_quantization_config("megamoe") is vllm_moe.MegaMoEConfig


def test_a_name_of_another_plugin_is_left_alone(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_moe, "NAME", "fp8")
    with pytest.raises(ConfigError, match='"fp8" already is a quantization of vLLM'):
        vllm_moe.enter()
    assert quantization.get_quantization_config("fp8") is fp8.Fp8Config


def test_another_release_is_refused_by_name_and_the_plugin_only_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(megamoe_vllm, "SUPPORTED", ">=0.34,<0.35")
    with pytest.raises(ConfigError, match=r"got vllm 0\.33.*expected vllm>=0.34"):
        megamoe_vllm.register()
    with caplog.at_level(logging.WARNING):
        megamoe_vllm.plugin()
    assert "--quantization megamoe is not available in vLLM" in caplog.text


def model_directory(path: Path, quantization_config: dict[str, Any] | None) -> Path:
    """A folder that vLLM takes for a Qwen3-MoE checkpoint of two layers."""
    described: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": INTER, "moe_intermediate_size": INTER, "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 64, "vocab_size": 64, "max_position_embeddings": 64,
    }  # fmt: skip
    if quantization_config is not None:
        described["quantization_config"] = quantization_config
    (path / "config.json").write_text(json.dumps(described))
    return path


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def engine_config(path: Path, **arguments: Any) -> Any:
    return EngineArgs(model=str(path), skip_tokenizer_init=True, **arguments).create_engine_config()


def test_it_is_taken_by_one_option_and_never_without(engine: Any, tmp_path: Path) -> None:
    directory = model_directory(tmp_path, FP8)
    options = {"megamoe": {"unsupported": "engine"}}
    default = engine_config(directory)
    chosen = engine_config(directory, quantization="megamoe", additional_config=options)
    assert type(default.quant_config) is fp8.Fp8Config
    assert type(chosen.quant_config) is vllm_moe.MegaMoEConfig
    assert chosen.quant_config.get_name() == chosen.model_config.quantization == "megamoe"
    assert vars(chosen.quant_config) == vars(default.quant_config)
    assert vllm_moe.read_options(chosen.additional_config).unsupported == "engine"


def test_a_checkpoint_is_loaded_whole(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From safetensors by vLLM's own model loader; then each MoE block computes its own experts."""
    tensors = made.qwen3_moe_tensors()
    quantised = {name.rpartition(".")[0] for name in tensors if name.endswith("_scale_inv")}
    left_alone = sorted({name.rpartition(".")[0] for name, tensor in tensors.items() if tensor.dim() == 2} - quantised)
    directory = model_directory(tmp_path, FP8 | {"modules_to_not_convert": left_alone})
    save_file(tensors, directory / "model.safetensors")
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # a CPU build of torch has no such thing
    config = engine_config(directory, quantization="megamoe", enforce_eager=True, max_num_batched_tokens=64)
    with made.set_current_vllm_config(config):
        model = get_model(vllm_config=config)
    blocks = [layer.mlp for layer in model.model.layers]
    methods = {type(block.experts.routed_experts.quant_method) for block in blocks}
    assert methods == {vllm_moe.MegaMoEMethod}
    x, _ = made.tokens(7)
    for index, block in enumerate(blocks):
        got = made.run(config, lambda x, _, block=block: block(x), x, x)
        logits, _ = block.gate(x)
        weights, ids = block.experts.router.select_experts(x, logits)
        problem = block.experts.routed_experts.quant_method.problem
        assert problem.num_max_tokens_per_rank == 64
        assert torch.equal(got, direct(problem, x, ids, weights, seed=index))


@pytest.mark.parametrize(
    "stored",
    [None, FP8 | {"weight_block_size": None}, FP8 | {"weight_block_size": [64, 64]}, FP8 | {"quant_method": "mxfp4"}],
    ids=["bf16", "per tensor", "blocks of 64", "mxfp4"],
)
def test_other_checkpoints_are_refused(engine: Any, tmp_path: Path, stored: dict[str, Any] | None) -> None:
    with pytest.raises(ConfigError, match="--quantization megamoe does not take this checkpoint"):
        engine_config(model_directory(tmp_path, stored), quantization="megamoe")


def test_layers_that_the_checkpoint_left_alone_are_vllms(engine: Any) -> None:
    runner = made.build(engine, quant_config=made.quantization(ignored_layers=[PREFIX]))
    assert type(runner.routed_experts.quant_method).__name__ == "UnquantizedFusedMoEMethod"


# -- one layer ---------------------------------------------------------------------------------------------------------


def test_parameters_are_those_of_vllms_own_method(engine: Any) -> None:
    experts = made.build(engine).routed_experts
    assert type(experts.quant_method) is vllm_moe.MegaMoEMethod
    described = {name: (tuple(p.shape), p.dtype) for name, p in experts.named_parameters()}
    assert described == {
        "w13_weight": ((EXPERTS, 2 * INTER, HIDDEN), torch.float8_e4m3fn),
        "w13_weight_scale_inv": ((EXPERTS, 2, 2), torch.float32),
        "w2_weight": ((EXPERTS, HIDDEN, INTER), torch.float8_e4m3fn),
        "w2_weight_scale_inv": ((EXPERTS, 2, 1), torch.float32),
    }
    theirs = made.build(engine, quant_config=fp8.Fp8Config(weight_block_size=[128, 128])).routed_experts
    assert type(theirs.quant_method) is fp8.Fp8MoEMethod
    assert {name: (tuple(p.shape), p.dtype) for name, p in theirs.named_parameters()} == described
    for name, parameter in theirs.named_parameters():
        own = getattr(experts, name)
        assert getattr(own, "quant_method", None) == getattr(parameter, "quant_method", None), name
        assert own.weight_loader is not None


def test_the_loader_places_gate_up_and_down(engine: Any) -> None:
    tensors = made.checkpoint()
    runner = made.build(engine)
    list(runner.load_weights(tensors.items()))
    loaded, expected = runner.routed_experts, made.stored(tensors)
    for name, parameter in vllm_moe.PARAMETERS.items():
        assert torch.equal(getattr(loaded, parameter).float(), getattr(expected, name).float()), name
    assert torch.equal(loaded.w13_weight[5, :INTER].float(), tensors["5.gate_proj.weight"].float())
    assert torch.equal(loaded.w13_weight[5, INTER:].float(), tensors["5.up_proj.weight"].float())


def test_a_forward_through_the_runner_is_the_contract(engine: Any, runner: Any) -> None:
    x, logits = made.tokens(19)
    got = made.run(engine, runner, x, logits)
    weights, ids = runner.router.select_experts(x, logits)
    assert ids.dtype == torch.int32
    problem = runner.routed_experts.quant_method.problem
    assert (problem.ep_size, problem.num_experts, problem.quant) == (1, EXPERTS, QuantMode.A8W8)
    assert problem.num_max_tokens_per_rank == MAX_TOKENS
    assert torch.equal(got, direct(problem, x, ids, weights))
    expected = oracle(problem, x, ids, weights, [made.stored(made.checkpoint())])
    gate = ORACLE_GATES[QuantMode.A8W8]
    assert (got.float() - expected).norm() < gate.rel_l2 * expected.norm()
    assert ((got.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < gate.row_rel_l2


def direct(problem: Any, x: Tensor, ids: Tensor, weights: Tensor, seed: int = 0) -> Tensor:
    """What a session of one rank gives, without vLLM, for the experts of `checkpoint(seed)`."""
    backend = ReferenceBackend()
    with backend.open(backend.plan(replace(problem, ep_size=1))) as session:
        prepared = session.prepare(made.stored(made.checkpoint(seed)))
        result: Tensor = session.forward(x, ids, weights, prepared)
    return result


def test_the_kernel_object_says_that_nothing_is_left_to_do(engine: Any, runner: Any) -> None:
    method = runner.routed_experts.quant_method
    assert method.supports_internal_mk
    assert not runner.do_naive_dispatch_combine
    assert runner._fused_output_is_reduced
    assert not method.is_monolithic
    assert not method.mk_can_overlap_shared_experts
    assert method.topk_indices_dtype is None
    x, logits = made.tokens(4)
    weights, ids = runner.router.select_experts(x, logits)
    through_kernel = method.moe_kernel.apply(
        x, runner.routed_experts.w13_weight, runner.routed_experts.w2_weight, weights, ids,
        activation=MoEActivation.SILU, global_num_experts=EXPERTS, expert_map=None, apply_router_weight_on_input=False,
    )  # fmt: skip
    assert torch.equal(through_kernel, method.apply(runner.routed_experts, x, weights, ids, None, None))


@pytest.mark.parametrize("num_tokens", [0, 1, MAX_TOKENS])
def test_every_batch_up_to_the_largest(engine: Any, runner: Any, num_tokens: int) -> None:
    x, logits = made.tokens(num_tokens)
    assert made.run(engine, runner, x, logits).shape == (num_tokens, HIDDEN)


def test_a_larger_batch_is_an_error(engine: Any, runner: Any) -> None:
    with pytest.raises(CapacityError, match="got 25; expected at most num_max_tokens_per_rank = 24"):
        made.run(engine, runner, *made.tokens(MAX_TOKENS + 1))


def test_padding_rows_go_nowhere(engine: Any, runner: Any) -> None:
    x, logits = made.tokens(12)
    alone = made.run(engine, runner, x[:7], logits[:7])
    x[7:] = torch.nan
    got = made.run(engine, runner, x, logits, is_padding=torch.arange(12) >= 7)
    assert torch.equal(got[:7], alone)
    assert torch.equal(got[7:], torch.zeros(5, HIDDEN, dtype=torch.bfloat16))
    assert int(counts(runner).sum()) == 7 * TOP_K
    of_another_batch = made.run(engine, runner, *made.tokens(12), is_padding=torch.ones(5, dtype=torch.bool))
    assert torch.equal(of_another_batch, made.run(engine, runner, *made.tokens(12)))


def counts(runner: Any) -> Tensor:
    """Rows that each expert received in the last call."""
    received: Tensor = runner.routed_experts.quant_method._opened.session.receive_counts()
    return received


def test_layers_that_are_alike_share_a_session(engine: Any) -> None:
    first, second = (
        made.load(made.build(engine, prefix=f"model.layers.{i}.mlp.experts"), made.checkpoint(i)) for i in (0, 1)
    )
    sessions = {id(layer.routed_experts.quant_method._opened.session) for layer in (first, second)}
    assert len(sessions) == 1
    x, logits = made.tokens(6)
    assert not torch.equal(made.run(engine, first, x, logits), made.run(engine, second, x, logits))


def test_a_clamped_activation_reaches_the_problem(engine: Any) -> None:
    runner = made.build(engine, swiglu_limit=10.0)
    assert runner.routed_experts.quant_method.problem.swiglu_limit == 10.0


def test_before_its_weights_are_loaded_a_layer_says_so(engine: Any) -> None:
    with pytest.raises(SessionError, match="model.layers.0.mlp.experts has no weights yet"):
        made.run(engine, made.build(engine), *made.tokens(2))


def test_a_deepseek_block_with_shared_experts_and_a_scaled_output(engine: Any) -> None:
    """vLLM's own MoE block: its gate and shared experts around the operation."""
    described = SimpleNamespace(
        hidden_size=HIDDEN, moe_intermediate_size=INTER, n_routed_experts=EXPERTS, n_shared_experts=1,
        hidden_act="silu", num_experts_per_tok=TOP_K, norm_topk_prob=True, n_group=4, topk_group=2,
        scoring_func="sigmoid", topk_method="noaux_tc", routed_scaling_factor=2.5,
    )  # fmt: skip
    prefix = "model.layers.3.mlp"
    left_alone = [f"{prefix}.shared_experts.{name}" for name in ("gate_up_proj", "down_proj")]
    quant_config = made.quantization(ignored_layers=left_alone)
    torch.manual_seed(0)
    with made.set_current_vllm_config(engine), made.default_dtype(torch.bfloat16):
        block = DeepseekV2MoE(described, engine.parallel_config, quant_config, prefix=prefix)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if "routed_experts" not in name:
                parameter.normal_(std=0.1)
    list(block.experts.load_weights(made.checkpoint().items()))
    for module in block.modules():  # as vLLM's model loader does
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)
    x, _ = made.tokens(9)
    got = made.run(engine, lambda x, _: block(x), x, x)
    logits, _ = block.gate(x)
    weights, ids = block.experts.router.select_experts(x, logits)
    routed = direct(block.experts.routed_experts.quant_method.problem, x, ids, weights)
    with torch.no_grad():
        expected = block.shared_experts(x) + routed
    assert torch.equal(got, expected)
    assert float(weights.sum(-1).mean()) == pytest.approx(2.5, rel=0.01)  # the scale is in the router's weights


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_it_is_one_operator_under_compile(engine: Any, runner: Any) -> None:
    """Nothing reads a tensor's values, so nothing waits for the device, and a graph can be captured."""
    experts = runner.routed_experts
    x, logits = made.tokens(6)
    weights, ids = runner.router.select_experts(x, logits)

    def layer(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        output: Tensor = experts.quant_method.apply(experts, x, weights, ids, None, None)
        return output

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with made.set_forward_context(None, engine, num_tokens=6, is_padding=torch.arange(6) >= 5):
        assert torch.equal(compiled(x, weights, ids), layer(x, weights, ids))


def test_all_sessions_are_open_once_weights_are_loaded(
    engine: Any, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceBackend, "open", lambda *_: pytest.fail("a session was opened by a forward"))
    made.run(engine, runner, *made.tokens(3))


# -- experts that move -------------------------------------------------------------------------------------------------


def test_a_balancer_writes_where_the_operation_reads(engine: Any, runner: Any) -> None:
    x, logits = made.tokens(11)
    experts = runner.routed_experts
    weights, ids = runner.router.select_experts(x, logits)
    before = experts.quant_method.apply(experts, x, weights, ids, None, None)
    views = list(experts.get_expert_weights())
    assert len(views) == 4
    read = {tensor.data_ptr() for tensor in experts.quant_method._opened.expert_tensors().values()}
    assert {view.data_ptr() for view in views} == read
    order = torch.tensor([3, 1, 2, 0, 4, 5, 7, 6])
    for view in views:
        assert view.shape[0] == EXPERTS
        moved = view.view(torch.uint8)[order].clone()
        view.view(torch.uint8).copy_(moved)
    after = experts.quant_method.apply(experts, x, weights, order[ids.long()].int(), None, None)
    assert torch.equal(after, before)
    assert not torch.equal(experts.quant_method.apply(experts, x, weights, ids, None, None), before)


def test_weights_that_a_backend_lays_out_anew_become_the_parameters(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU backend does; the reference reads the checkpoint's order as it is."""
    prepare = ReferenceSession._prepare

    def prepare_copies(session: ReferenceSession, weights: Any) -> Any:
        prepared = prepare(session, weights)
        return replace(prepared, tensors={name: tensor.clone() for name, tensor in prepared.tensors.items()})

    monkeypatch.setattr(ReferenceSession, "_prepare", prepare_copies)
    runner = made.load(made.build(engine), made.checkpoint())
    experts = runner.routed_experts
    read = experts.quant_method._opened.expert_tensors()
    assert all(read[name] is getattr(experts, parameter) for name, parameter in vllm_moe.PARAMETERS.items())
    assert len(list(experts.parameters())) == len(read) == 4
    x, logits = made.tokens(5)
    weights, ids = runner.router.select_experts(x, logits)
    assert torch.equal(made.run(engine, runner, x, logits), direct(experts.quant_method.problem, x, ids, weights))


def test_redundant_experts_are_experts(engine: Any) -> None:
    runner = made.load(made.build(engine, enable_eplb=True, num_redundant_experts=2), made.checkpoint())
    experts = runner.routed_experts
    assert experts.quant_method.problem.num_experts == EXPERTS + 2
    assert torch.equal(experts.w2_weight[EXPERTS].float(), experts.w2_weight[0].float())
    x, _ = made.tokens(5)
    ids = torch.arange(5 * TOP_K).view(5, TOP_K) % EXPERTS
    weights = torch.rand(5, TOP_K)
    copies = torch.where(ids < 2, ids + EXPERTS, ids)
    results = [experts.quant_method.apply(experts, x, weights, chosen.int(), None, None) for chosen in (ids, copies)]
    assert torch.equal(*results)


def test_weights_that_are_loaded_again_are_read(engine: Any) -> None:
    """By vLLM's own reloading, which exchanges parameters and puts the first ones back."""
    model = made.Model(made.build(engine))
    record_metadata_for_reloading(model)
    made.load(model.experts, made.checkpoint(0))
    where = [p.data_ptr() for p in model.experts.routed_experts.parameters()]
    x, logits = made.tokens(8)
    first = made.run(engine, model.experts, x, logits)
    initialize_layerwise_reload(model)
    list(model.experts.load_weights(made.checkpoint(1).items()))
    finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.bfloat16))
    assert [p.data_ptr() for p in model.experts.routed_experts.parameters()] == where
    second = made.run(engine, model.experts, x, logits)
    fresh = made.load(made.build(engine, prefix="model.layers.9.mlp.experts"), made.checkpoint(1))
    assert torch.equal(second, made.run(engine, fresh, x, logits))
    assert not torch.equal(second, first)
    read = model.experts.routed_experts.quant_method._opened.expert_tensors()
    assert sorted(tensor.data_ptr() for tensor in read.values()) == sorted(where)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation": "gelu"}, "the activation gelu"),
        ({"swiglu_alpha": 1.702, "swiglu_beta": 1.0}, r"alpha 1.702, beta 1.0"),
        ({"has_bias": True}, "experts with biases"),
        ({"apply_router_weight_on_input": True}, "router weights that are applied to the input"),
        ({"intermediate_size": 192}, "no multiple of 128: 192"),
        ({"params_dtype": torch.float16}, "activations in torch.float16"),
        ({"num_experts": 40, "top_k": 17}, "top_k is too large"),
        ({"tp_size": 2}, "each expert cut over 2 ranks: start vLLM with --enable-expert-parallel"),
        ({"quant_config": made.quantization(store_dtype="mxfp4")}, "experts stored as mxfp4"),
    ],
)  # fmt: skip
def test_what_it_does_not_do_is_refused_by_name(engine: Any, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedProblemError, match=f"MegaMoE can't run {PREFIX} in vLLM.*{reason}"):
        made.build(engine, **changes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda config: setattr(config.parallel_config, "enable_dbo", True), "micro-batches"),
        (lambda config: setattr(config.parallel_config, "enable_elastic_ep", True), "elastic expert parallelism"),
        (
            lambda config: setattr(config, "offload_config", OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1))),
            "weights offloaded to the CPU",
        ),
        (
            lambda config: setattr(
                config, "model_config", SimpleNamespace(enable_sleep_mode=True, dtype=torch.bfloat16, hf_config=None)
            ),
            "sleep mode",
        ),
    ],
)
def test_engines_that_were_started_otherwise_are_refused(engine: Any, change: Any, reason: str) -> None:
    config = made.config()
    change(config)
    with pytest.raises(UnsupportedProblemError, match=reason):
        made.build(config)


def test_every_reason_is_named(engine: Any) -> None:
    with pytest.raises(UnsupportedProblemError, match="experts with biases; router weights.*leave --quantization out"):
        made.build(engine, has_bias=True, apply_router_weight_on_input=True)


def test_on_request_vllms_own_experts_run_instead(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = made.config()
    config.additional_config = {"megamoe": {"unsupported": "engine"}}
    with caplog.at_level(logging.WARNING):
        runner = made.build(config, has_bias=True)
    assert type(runner.routed_experts.quant_method) is fp8.Fp8MoEMethod
    assert f"{PREFIX} runs vLLM's own experts, not MegaMoE's" in caplog.text
    assert "experts with biases" in caplog.text


def test_the_cpu_never_computes_for_a_gpu(engine: Any) -> None:
    config = made.config()
    config.device_config = SimpleNamespace(device=torch.device("cuda"))
    config.additional_config = {"megamoe": {"backend": "reference"}}
    with pytest.raises(BackendUnavailableError, match="the reference backend computes on CPU"):
        made.build(config)


def test_unknown_options_are_refused(engine: Any) -> None:
    for options in ({"capacity": 3}, {"unsupported": "eager"}, {"transport": "fp4"}, 7):
        config = made.config()
        config.additional_config = {"megamoe": options}
        with pytest.raises(ConfigError, match="unknown (option|unsupported|transport)"):
            made.build(config)


def test_a_capacity_can_be_given(engine: Any) -> None:
    config = made.config()
    config.additional_config = {"megamoe": {"num_max_tokens_per_rank": 5, "transport": "fp8_blockwise_1x32"}}
    problem = made.build(config).routed_experts.quant_method.problem
    assert (problem.num_max_tokens_per_rank, problem.transport) == (5, "fp8_blockwise_1x32")


def test_layers_are_counted_on_request(engine: Any) -> None:
    """Under vLLM's names, each once; rows of padding are no rows. A worker hands them on as plain values."""
    vllm_moe.close()  # counters of other tests' sessions go with them
    config = made.config()
    config.additional_config = {"megamoe": {"metrics": True}}
    first, second = (
        made.load(made.build(config, prefix=f"model.layers.{i}.mlp.experts"), made.checkpoint(i)) for i in (0, 1)
    )
    x, logits = made.tokens(12)
    made.run(config, first, x, logits)
    made.run(config, second, x, logits, is_padding=torch.arange(12) >= 7)
    rows = [torch.bincount(some.topk(TOP_K).indices.flatten(), minlength=EXPERTS) for some in (logits, logits[:7])]
    extension = resolve_obj_by_qualname("megamoe.integrations.vllm.WorkerExtension")  # as a worker does
    (metrics,) = extension().megamoe_metrics()
    assert metrics["rows_per_layer"] == {
        f"model.layers.{i}.mlp.experts": layer.tolist() for i, layer in enumerate(rows)
    }
    assert (metrics["calls"], metrics["dropped_ids"], metrics["timeouts"]) == (2, 0, 0)
    made.run(engine, made.load(made.build(engine), made.checkpoint()), x, logits)
    (nothing,) = megamoe_vllm.metrics()
    assert nothing.calls == 0, "a layer that did not ask is not counted"


# -- two ranks ---------------------------------------------------------------------------------------------------------

OWN = {
    "uneven": Case(((11, 1), (4, 2)), {}),
    "one-empty": Case(((9, 1), (0, 2)), {}),
    "redundant": Case(((6, 1), (6, 2)), {"enable_eplb": True, "num_redundant_experts": 2}),
    "too-large": Case(((25, 1), (4, 2)), {}),
}
SHARED = {
    "odd": Case(((13, 1), (13, 1)), {}),
    "one-token": Case(((1, 1), (1, 1)), {}),
    "padded": Case(((10, 1), (10, 1)), {}, num_padding=3),
    "sequence-parallel": Case(((13, 1), (13, 1)), {"is_sequence_parallel": True}, num_padding=2),
}


@pytest.fixture(scope="module")
def own_tokens() -> list[dict[str, made.Outcome]]:
    """Data parallel: what two ranks with batches of their own say."""
    return run_ranks(made.run_rank, 2, {"data_parallel_size": 2}, OWN, timeout_s=240, num_threads=1)


@pytest.fixture(scope="module")
def shared_tokens() -> list[dict[str, made.Outcome]]:
    """Tensor parallel: what two ranks with the same batch say."""
    return run_ranks(made.run_rank, 2, {"tensor_parallel_size": 2}, SHARED, timeout_s=240, num_threads=1)


def whole(engine: Any, batch: tuple[int, int], num_padding: int = 0) -> Tensor:
    """What one rank makes of the batch, all experts its own."""
    runner = made.load(made.build(engine), made.checkpoint())
    output = made.run(engine, runner, *made.tokens(*batch))
    output[batch[0] - num_padding :] = 0
    return output


@pytest.mark.parametrize("name", ["uneven", "one-empty", "redundant"])
def test_ranks_with_own_tokens(engine: Any, own_tokens: Any, name: str) -> None:
    """Global ids, own rows in, own rows out, summed once."""
    case = OWN[name]
    for rank, (batch, outcome) in enumerate(zip(case.batches, (ranks[name] for ranks in own_tokens), strict=True)):
        assert torch.equal(outcome.output, whole(engine, batch))
        if name != "redundant":
            assert outcome.experts == list(range(4 * rank, 4 * rank + 4))
        assert outcome.capacity == MAX_TOKENS
    rows = sum(int(ranks[name].received.sum()) for ranks in own_tokens)
    assert rows == TOP_K * sum(num_tokens for num_tokens, _ in case.batches)


def test_a_batch_that_is_too_large_on_one_rank_ends_on_all(own_tokens: Any) -> None:
    first, second = (ranks["too-large"].error for ranks in own_tokens)
    assert first.startswith("CapacityError: more tokens than the session holds; got 25")
    assert second.startswith("RankFailedError")


@pytest.mark.parametrize("name", ["odd", "one-token", "padded"])
def test_ranks_that_hold_the_same_tokens_share_them_out(engine: Any, shared_tokens: Any, name: str) -> None:
    """Each row is computed once, every rank has the whole result, and it is not summed again."""
    case = SHARED[name]
    expected = whole(engine, case.batches[0], case.num_padding)
    for ranks in shared_tokens:
        assert torch.equal(ranks[name].output, expected)
        assert ranks[name].capacity == MAX_TOKENS // 2
    rows = sum(int(ranks[name].received.sum()) for ranks in shared_tokens)
    assert rows == TOP_K * (case.batches[0][0] - case.num_padding)


def test_tokens_that_the_model_has_shared_out_are_taken_as_they_are(engine: Any, shared_tokens: Any) -> None:
    case = SHARED["sequence-parallel"]
    together = torch.cat([ranks["sequence-parallel"].output for ranks in shared_tokens])
    assert together.shape[0] == 14  # 13, filled up to a row more
    assert torch.equal(together[:13], whole(engine, case.batches[0], case.num_padding))
    assert sum(int(ranks["sequence-parallel"].received.sum()) for ranks in shared_tokens) == TOP_K * 11


def test_vllms_balancer_moves_experts_between_ranks() -> None:
    """By the code that moves them in production, into the memory that the operation reads."""
    for before, after, by_the_old_map in run_ranks(made.move_rank, 2, timeout_s=240, num_threads=1):
        assert torch.equal(after, before)
        assert not torch.equal(by_the_old_map, before)

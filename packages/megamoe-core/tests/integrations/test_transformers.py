"""The adapter against transformers' own classes: the same models, run by MegaMoE's reference and by themselves."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megamoe.checkpoint import convert
from megamoe.errors import (
    BackendUnavailableError,
    CaptureError,
    ConfigError,
    InputError,
    SessionError,
    UnsupportedProblemError,
)
from megamoe.problem import Activation, MoEProblem, QuantMode
from megamoe.tensors import GateUpLayout, expert_tensors
from megamoe.testing.tolerances import ORACLE_GATES

pytest.importorskip("transformers", reason="the transformers extra is not installed")

import ep_workers
import tiny_models
import transformers
from tiny_models import EXPERTS, HIDDEN, INTER, TOP_K, VOCAB, experts_modules, tokens
from transformers.distributed import expert_parallel
from transformers.integrations import finegrained_fp8, moe

from megamoe.integrations import sessions, versions
from megamoe.integrations import transformers as megamoe_transformers
from megamoe.integrations.transformers_experts import Adapter, own_forward
from megamoe.integrations.transformers_weights import in_format_of, read_experts, recognise_gate
from megamoe.launch import run_ranks

pytestmark = pytest.mark.transformers

FAMILIES = ["deepseek_v3", "qwen3_moe", "mixtral", "gpt_oss"]


@pytest.fixture
def adapters() -> Iterator[Any]:
    """`megamoe_transformers.register`, undone at the end."""
    registered: list[Adapter] = []

    def register(*args: Any, **options: Any) -> Adapter:
        registered.append(megamoe_transformers.register(*args, **options))
        return registered[-1]

    yield register
    for adapter in registered:
        adapter.close()


@pytest.fixture
def adapter(adapters: Any) -> Adapter:
    return adapters(num_max_tokens_per_rank=64)  # type: ignore[no-any-return]


def rel_l2(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def eager_fp32(experts: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The module's own forward on the same weights in FP32."""
    exact = copy.deepcopy(experts).float()
    with torch.no_grad():
        return own_forward(exact)(exact, x.float(), ids, weights)


def in_mode(got: Tensor, expected: Tensor, mode: QuantMode) -> bool:
    """Whether the output of a layer is within the mode's gate of the exact one."""
    rows = (got.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return rel_l2(got, expected) < ORACLE_GATES[mode].rel_l2 and float(rows.max()) < ORACLE_GATES[mode].row_rel_l2


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_the_models_own(family: str, adapter: Adapter) -> None:
    model = tiny_models.model(family, experts_implementation="megamoe")
    x, ids, weights = tokens(41)
    for experts in experts_modules(model):
        with torch.no_grad():
            got = experts(x, ids, weights)
        assert got.dtype == x.dtype
        assert in_mode(got, eager_fp32(experts, x, ids, weights), QuantMode.BF16)
    (problem,) = adapter.problems()  # one session for all layers
    assert (problem.hidden_size, problem.intermediate_size, problem.num_experts, problem.top_k) == (
        (HIDDEN, INTER, EXPERTS, TOP_K)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_says_what_it_says_by_itself(family: str, adapter: Adapter) -> None:
    """Logits near those of the eager model in BF16 and in FP32; generated tokens are eager FP32's own but for ties."""
    model = tiny_models.model(family)
    prompt = torch.randint(1, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    model.set_experts_implementation("megamoe")
    with torch.no_grad():
        told = model.generate(prompt, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(prompt))
        assert adapter.problems()
        logits = model(told).logits.float()
        model.set_experts_implementation("eager")
        eager = model(told).logits.float()
        exact = model.float()(told).logits
    # A row's experts change where rounding turns the router's choice: so the median row, and not the worst.
    for reference in (eager, exact):
        rows = (logits - reference).norm(dim=-1) / reference.norm(dim=-1)
        assert float(rows.median()) < 2 * ORACLE_GATES[QuantMode.BF16].row_rel_l2
    assert told.shape == (2, 20)
    choices, ours, generated = exact[:, 11:-1], logits[:, 11:-1], told[:, 12:, None]
    gap = choices.amax(-1) - choices.gather(-1, generated).squeeze(-1)
    assert float((gap == 0).float().mean()) > 0.75
    rounding = ORACLE_GATES[QuantMode.BF16].row_rel_l2 * choices.norm(dim=-1)  # of decoding against a whole forward
    assert bool((gap <= 2 * (ours - choices).abs().amax(-1) + rounding).all())


def test_the_gate_is_recognised_by_what_it_computes() -> None:
    def found(family: str, **changes: Any) -> tuple[Activation, float | None, GateUpLayout]:
        return recognise_gate(experts_modules(tiny_models.model(family, **changes))[0])

    for family in ("deepseek_v3", "qwen3_moe", "mixtral"):
        assert found(family) == (Activation.SWIGLU, None, GateUpLayout.PACKED)
    assert found("gpt_oss") == (Activation.SWIGLU_OAI, 7.0, GateUpLayout.INTERLEAVED)
    assert found("gpt_oss", swiglu_limit=3.0) == (Activation.SWIGLU_OAI, 3.0, GateUpLayout.INTERLEAVED)
    for changes in ({"hidden_act": "gelu"}, {"hidden_act": "relu"}):
        with pytest.raises(UnsupportedProblemError, match="MixtralExperts; got an activation"):
            found("mixtral", **changes)
    with pytest.raises(UnsupportedProblemError, match="activation"):
        found("gpt_oss", swiglu_alpha=1.6)


def test_deepseek_v4_experts_are_clamped(adapter: Adapter) -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    config = transformers.DeepseekV4Config(
        hidden_size=HIDDEN, moe_intermediate_size=INTER, n_routed_experts=EXPERTS, experts_implementation="megamoe"
    )
    experts = DeepseekV4Experts(config).bfloat16()
    with torch.no_grad():
        experts.gate_up_proj.normal_(std=0.7)  # many of the products pass the clamp at 10
        experts.down_proj.normal_(std=0.1)
        assert recognise_gate(experts) == (Activation.SWIGLU, 10.0, GateUpLayout.PACKED)
        x, ids, weights = tokens(30)
        got = experts(x, ids, weights)
    assert in_mode(got, eager_fp32(experts, x, ids, weights), QuantMode.BF16)
    experts.limit = None
    experts._apply_gate = lambda gate_up: moe._default_apply_gate(experts, gate_up)
    assert not in_mode(got, eager_fp32(experts, x, ids, weights), QuantMode.BF16)


def test_another_mode_rounds_the_weights(adapters: Any) -> None:
    """Two roundings then: of the activations, which the gate allows for, and of the weights."""
    adapters("megamoe_a8w8", num_max_tokens_per_rank=64, quant="a8w8")
    for family in ("mixtral", "gpt_oss"):
        (experts, *_) = experts_modules(tiny_models.model(family, experts_implementation="megamoe_a8w8"))
        x, ids, weights = tokens(41)
        with torch.no_grad():
            got = experts(x, ids, weights)
        expected = eager_fp32(experts, x, ids, weights)
        assert ORACLE_GATES[QuantMode.BF16].rel_l2 < rel_l2(got, expected) < 1.5 * ORACLE_GATES[QuantMode.A8W8].rel_l2


# -- FP8 and FP4 -------------------------------------------------------------------------------------------------------


def fp8_experts(**quantization: Any) -> Any:
    """`FP8Experts` as the quantiser puts them into a model, with random weights and scales."""
    model = tiny_models.model("deepseek_v3", experts_implementation="megamoe")
    others = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    config = transformers.FineGrainedFP8Config(weight_block_size=[128, 128], **quantization)
    finegrained_fp8.replace_with_fp8_linear(model, others, config)
    experts = experts_modules(model)[0].to_empty(device="cpu")
    assert isinstance(experts, finegrained_fp8.FP8Experts)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            weight, scale = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
            if weight.dtype == torch.int8:
                weight.copy_(torch.randint(-128, 128, weight.shape, generator=g))
            else:
                weight.copy_((100 * torch.randn(weight.shape, generator=g)).to(weight.dtype))
            size = 0.1 if weight.dtype == torch.int8 else 1e-3
            scale.copy_((size * (0.5 + torch.rand(scale.shape, generator=g))).to(scale.dtype))
    return experts


def dequantized(experts: Any) -> nn.Module:
    """Experts of the model's own class, in FP32, with the values that the payloads and scales stand for."""
    plain: Any = experts_modules(tiny_models.model("deepseek_v3", experts_implementation="eager"))[0].float()
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            weight, scale = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
            if weight.dtype == torch.int8:
                codes = torch.stack((weight & 15, (weight >> 4) & 15), dim=-1).flatten(-2).long()
                values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * (1 - 2 * (codes >> 3))
                values *= scale.float().repeat_interleave(32, -1)
            else:
                values = weight.float() * scale.float().repeat_interleave(128, -2).repeat_interleave(128, -1)
            getattr(plain, name).copy_(values)
    return plain


@pytest.mark.parametrize(
    ("quantization", "mode"),
    [
        ({}, QuantMode.A8W8),
        ({"scale_fmt": "ue8m0"}, QuantMode.A8W8),
        ({"scale_fmt": "ue8m0", "expert_dtype": "fp4"}, QuantMode.A8W4),
    ],
    ids=["fp8", "fp8-ue8m0", "fp4"],
)
def test_fp8_and_fp4_experts(quantization: dict[str, Any], mode: QuantMode, adapter: Adapter) -> None:
    """FP8 linear layers need a GPU, their experts don't: what is compared is the experts module."""
    experts = fp8_experts(**quantization)
    x, ids, weights = tokens(41)
    with torch.no_grad():
        got = experts(x, ids, weights)
    (problem,) = adapter.problems()
    assert problem.quant is mode
    expected = eager_fp32(dequantized(experts), x, ids, weights)
    assert in_mode(got, expected, mode)
    assert not in_mode(got, eager_fp32(dequantized(experts), x, ids.flip(0), weights), mode)


def test_fp8_experts_that_are_refused(adapter: Adapter) -> None:
    static = fp8_experts(activation_scheme="static")
    with pytest.raises(UnsupportedProblemError, match="activation_scheme 'static'"):
        static(*tokens(3))
    small = fp8_experts()
    small.block_size = [64, 64]
    with pytest.raises(UnsupportedProblemError, match="scale per .64, 64."):
        small(*tokens(3))
    with pytest.raises(UnsupportedProblemError, match="FP4 with scales in torch.float32"):
        fp8_experts(expert_dtype="fp4")(*tokens(3))


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_weights_are_not_copied_where_the_backend_reads_them_as_they_are(family: str, adapter: Adapter) -> None:
    (experts, *_) = experts_modules(tiny_models.model(family))
    layer = adapter.layer(experts, TOP_K)
    assert layer is not None
    own = {parameter.untyped_storage().data_ptr() for parameter in experts.parameters()}
    matrices = {name: tensor for name, tensor in layer.weights.tensors.items() if "bias" not in name}
    assert len(matrices) == 2
    assert {tensor.untyped_storage().data_ptr() for tensor in matrices.values()} <= own
    assert adapter.layer(experts, TOP_K) is layer


@pytest.mark.parametrize("change", ["in_place", "load_state_dict", "replace", "cast_and_back"])
def test_changed_parameters_are_prepared_again(change: str, adapters: Any) -> None:
    """Seen in a mode that copies, where a stale layer would give the old output."""
    adapters("copies", num_max_tokens_per_rank=64, quant="a8w8")
    (experts, other, *_) = experts_modules(tiny_models.model("mixtral", experts_implementation="copies"))
    arguments = tokens(9)
    with torch.no_grad():
        before, expected = experts(*arguments), other(*arguments)
        assert not torch.equal(before, expected)
        if change == "in_place":
            experts.gate_up_proj.copy_(other.gate_up_proj)
            experts.down_proj.copy_(other.down_proj)
        elif change == "load_state_dict":
            experts.load_state_dict(other.state_dict())
        elif change == "replace":
            experts.gate_up_proj, experts.down_proj = other.gate_up_proj, other.down_proj
        else:
            experts.load_state_dict(other.state_dict())
            experts.float().bfloat16()
        assert torch.equal(experts(*arguments), expected)


def test_weights_prepared_in_inference_mode_can_be_moved_outside_of_it(adapters: Any) -> None:
    adapter = adapters("inference", num_max_tokens_per_rank=64, quant="a8w8")
    (experts, *_) = experts_modules(tiny_models.model("mixtral", experts_implementation="inference"))
    with torch.inference_mode():
        experts(*tokens(9))
    layer = adapter.layer(experts, TOP_K)
    for tensor in expert_tensors(layer.weights).values():
        tensor[0].copy_(tensor[1])


def test_a_copied_module_has_weights_of_its_own(adapter: Adapter) -> None:
    (experts, *_) = experts_modules(tiny_models.model("mixtral", experts_implementation="megamoe"))
    arguments = tokens(9)
    with torch.no_grad():
        before = experts(*arguments)
        twin = copy.deepcopy(experts)
        assert torch.equal(twin(*arguments), before)
        twin.down_proj.zero_()
        assert not twin(*arguments).any()
        assert torch.equal(experts(*arguments), before)
    assert len(adapter.problems()) == 1


def test_parameters_can_be_dropped(adapters: Any) -> None:
    adapter = adapters("dropping", num_max_tokens_per_rank=64, keep_parameters=False)
    (experts, twin, *_) = experts_modules(tiny_models.model("mixtral", experts_implementation="dropping"))
    arguments = tokens(9)
    expected = eager_fp32(experts, *arguments)
    with torch.no_grad():
        first, second = experts(*arguments), experts(*arguments)
    assert in_mode(first, expected, QuantMode.BF16)
    assert torch.equal(first, second)
    assert all(parameter.numel() == 0 for parameter in experts.parameters())
    with pytest.raises(ConfigError, match="keep_parameters=True"):
        experts.state_dict()
    with pytest.raises(ConfigError, match="were dropped"), torch.no_grad():
        experts(arguments[0], arguments[1][:, :2], arguments[2][:, :2])  # another top_k needs another preparation
    assert adapter.problems()[0].top_k == TOP_K
    assert twin.down_proj.numel() > 0


@pytest.mark.parametrize("mode", list(QuantMode))
def test_converting_by_expert_is_converting_at_once(mode: QuantMode) -> None:
    for family in ("mixtral", "gpt_oss"):
        stored = read_experts(experts_modules(tiny_models.model(family))[0]).weights
        got, expected = dict(in_format_of(stored, mode).tensors()), dict(convert(stored, mode).tensors())
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            assert got[name].dtype == tensor.dtype
            assert torch.equal(got[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


# -- calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17, 50])
def test_a_batch_above_the_capacity_is_split(num_tokens: int, adapters: Any) -> None:
    adapters("small", num_max_tokens_per_rank=16)
    adapters("large", num_max_tokens_per_rank=64)
    model = tiny_models.model("mixtral")
    (experts, *_) = experts_modules(model)
    outputs = []
    for name in ("small", "large"):
        model.set_experts_implementation(name)
        with torch.no_grad():
            outputs.append(experts(*tokens(num_tokens)))
    assert outputs[0].shape == (num_tokens, HIDDEN)
    assert torch.equal(*outputs)


def test_the_session_gets_the_models_own_tensors(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied or converted on the way there and back: a forward is the session's one call."""
    (experts, *_) = experts_modules(tiny_models.model("mixtral", experts_implementation="megamoe"))
    call = tokens(9)
    with torch.no_grad():
        experts(*call)
        session, given = adapter.layer(experts, TOP_K).session, []  # type: ignore[union-attr]
        forward = session.forward

        def record(*arguments: Any, **options: Any) -> Tensor:
            given.append((arguments[:3], forward(*arguments, **options)))
            return given[-1][1]

        monkeypatch.setattr(session, "forward", record)
        y = experts(*call)
    ((arguments, result),) = given
    assert all(mine is theirs for mine, theirs in zip(arguments, call, strict=True))
    assert y is result


def test_masked_ids_contribute_nothing(adapter: Adapter) -> None:
    """`num_experts` is what transformers' own expert-parallel implementations put for experts of other ranks."""
    (experts, *_) = experts_modules(tiny_models.model("mixtral", experts_implementation="megamoe"))
    x, ids, weights = tokens(9)
    experts._is_expert_parallel = True
    with torch.no_grad():
        whole = experts(x, ids, weights)
        ids[4] = experts.num_experts
        got = experts(x, ids, weights)
    assert not got[4].any()
    keep = torch.arange(9) != 4
    assert torch.equal(got[keep], whole[keep])
    layer = adapter.layer(experts, TOP_K)
    assert layer is not None
    assert layer.session.stats().dropped_ids == 0
    assert adapter.metrics() == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_compiles_into_one_graph_once_it_has_run(mode: Any, adapter: Adapter) -> None:
    (experts, *_) = experts_modules(tiny_models.model("mixtral", experts_implementation="megamoe"))
    torch.compiler.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    with mode():
        expected = experts(*tokens(9))
        for _ in range(2):
            assert torch.equal(compiled(*tokens(9)), expected)
        assert torch.equal(compiled(*tokens(5)), experts(*tokens(5)))


def test_layers_are_counted_on_request(adapters: Any) -> None:
    """By name, each once, in calls of their own and under torch.compile; a layer that is prepared again goes on."""
    adapter = adapters(num_max_tokens_per_rank=64, metrics=True)
    first, second, *_ = experts_modules(tiny_models.model("mixtral", experts_implementation="megamoe"))
    x, ids, weights = tokens(9)
    torch.compiler.reset()
    with torch.no_grad():
        first(x, ids, weights)
        second(x, ids, weights)
        torch.compile(second, fullgraph=True, backend="aot_eager")(x, ids, weights)
        second.down_proj.mul_(2)
        second(x[:0], ids[:0], weights[:0])
    rows = torch.bincount(ids.flatten(), minlength=first.num_experts)
    (metrics,) = adapter.metrics()
    assert {name: layer.tolist() for name, layer in metrics.rows_per_layer.items()} == {
        "MixtralExperts.0": rows.tolist(),
        "MixtralExperts.1": (2 * rows).tolist(),
    }
    assert (metrics.calls, metrics.dropped_ids, metrics.timeouts) == (4, 0, 0)


def test_a_whole_model_compiles_into_one_graph(adapter: Adapter) -> None:
    model = tiny_models.model("deepseek_v3", experts_implementation="megamoe")
    prompt = torch.randint(1, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.compiler.reset()
    with torch.no_grad():
        expected = model(prompt, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(prompt, use_cache=False).logits, expected)


def test_compiling_first_breaks_the_graph_and_says_why(adapter: Adapter) -> None:
    (experts, other, *_) = experts_modules(tiny_models.model("mixtral", experts_implementation="megamoe"))
    torch.compiler.reset()
    with torch.no_grad():
        got = torch.compile(experts, backend="aot_eager")(*tokens(9))
        assert torch.equal(got, experts(*tokens(9)))
        torch.compiler.reset()
        with pytest.raises(Exception, match="run the model once before torch.compile"):
            torch.compile(other, fullgraph=True, backend="aot_eager")(*tokens(9))


def test_a_first_call_inside_a_capture_is_refused(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    (experts, *_) = experts_modules(tiny_models.model("mixtral", experts_implementation="megamoe"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="run the model once before the capture"):
        experts(*tokens(2))
    assert adapter.problems() == ()


def test_there_is_no_backward(adapter: Adapter) -> None:
    """A forward outside of no_grad works; training through it fails instead of losing gradients."""
    (experts, *_) = experts_modules(tiny_models.model("mixtral", experts_implementation="megamoe"))
    x, ids, weights = tokens(9)
    output = experts(x.requires_grad_(), ids, weights)
    with torch.no_grad():
        assert torch.equal(output, experts(x, ids, weights))
    with pytest.raises(InputError, match="there is no backward"):
        output.sum().backward()


def test_the_example_runs() -> None:
    example = Path(__file__).parents[4] / "examples/transformers_generate.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, check=True)
    with_megamoe, by_itself = (line.split(":")[1].split() for line in done.stdout.splitlines()[1:])
    assert "MegaMoE ran MoEProblem(hidden_size=256" in done.stdout
    assert len(with_megamoe) == len(by_itself) == 8
    assert with_megamoe[0] == by_itself[0]


# -- policies ----------------------------------------------------------------------------------------------------------


def test_experts_that_are_not_supported_raise_by_default(adapter: Adapter) -> None:
    model = tiny_models.model("mixtral", hidden_act="gelu", experts_implementation="megamoe")
    with pytest.raises(UnsupportedProblemError, match="MegaMoE can't run MixtralExperts"), torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long))
    (experts, *_) = experts_modules(tiny_models.model("mixtral", experts_implementation="megamoe").float())
    with pytest.raises(UnsupportedProblemError, match="dtype=torch.bfloat16"):
        experts(*tokens(2))
    assert adapter.problems() == ()


@pytest.mark.parametrize("case", ["module", "problem"])
def test_the_models_own_forward_on_request_said_once(case: str, adapters: Any, caplog: Any) -> None:
    """The module can't be read, or no backend takes the problem: a8w8 wants multiples of 128."""
    adapters("or_eager", num_max_tokens_per_rank=64, unsupported="eager", quant="a8w8" if case == "problem" else None)
    changes = {"hidden_act": "gelu"} if case == "module" else {}
    model = tiny_models.model("mixtral", **changes)
    if case == "problem":
        for experts in experts_modules(model):
            experts.gate_up_proj = nn.Parameter(experts.gate_up_proj[:, : 2 * 96].contiguous())
            experts.down_proj = nn.Parameter(experts.down_proj[:, :, :96].contiguous())
    prompt = torch.randint(0, VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), caplog.at_level(logging.WARNING, "megamoe"):
        model.set_experts_implementation("eager")
        expected = model(prompt).logits
        model.set_experts_implementation("or_eager")
        assert torch.equal(model(prompt).logits, expected)
        assert torch.equal(model(prompt).logits, expected)
    said = [record.message for record in caplog.records if "runs its own forward" in record.message]
    assert len(said) == 1
    assert ("activation" if case == "module" else "intermediate_size is 96") in said[0]


def test_the_cpu_never_computes_for_a_gpu(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    problem = MoEProblem(
        hidden_size=HIDDEN, intermediate_size=INTER, num_experts=8, top_k=2, num_max_tokens_per_rank=4, quant="bf16"
    )
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    with caplog.at_level(logging.WARNING, "megamoe"):
        assert sessions.backend_for(cpu, "auto", problem).name == "reference"
    assert "CPU reference" in caplog.text
    with pytest.raises(BackendUnavailableError, match="computes on CPU, the experts are elsewhere; got cuda:0"):
        sessions.backend_for(gpu, "reference", problem)
    monkeypatch.setenv("MEGAMOE_BACKEND", "reference")
    with pytest.raises(BackendUnavailableError, match="the experts are elsewhere"):
        sessions.backend_for(gpu, "auto", problem)
    monkeypatch.setenv("MEGAMOE_BACKEND", "nowhere")
    with pytest.raises(BackendUnavailableError, match="nowhere"):
        sessions.backend_for(cpu, "auto", problem)


# -- registration ------------------------------------------------------------------------------------------------------


def test_registering_twice(adapters: Any) -> None:
    adapter = adapters("twice", num_max_tokens_per_rank=32)
    assert adapters("twice", num_max_tokens_per_rank=32) is adapter
    with pytest.raises(ConfigError, match="registered with other options"):
        adapters("twice", num_max_tokens_per_rank=64)
    (experts, *_) = experts_modules(tiny_models.model("mixtral", experts_implementation="twice"))
    with torch.no_grad():
        expected = experts(*tokens(9))
        adapter.close()
        adapter.close()
        with pytest.raises(SessionError, match=r"closed.*register\(\) it again"):
            experts(*tokens(9))
        again = adapters("twice", num_max_tokens_per_rank=64)
        assert torch.equal(experts(*tokens(9)), expected)
    assert again is not adapter


@pytest.mark.parametrize("name", ["eager", "grouped_mm", "deepgemm_megamoe", "all_to_all", "auto"])
def test_names_of_transformers_are_not_taken(name: str) -> None:
    with pytest.raises(ConfigError, match="already is an implementation"):
        megamoe_transformers.register(name)


def test_unknown_options() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"unsupported": "cpu"}, "unknown unsupported; got 'cpu'; expected error or eager"),
        ({"quant": "int8"}, "unknown quant; got 'int8'; expected bf16 or a8w8 or a8w4 or a4w4"),
        ({"transport": "x"}, "unknown transport"),
        ({"quant": "a8w4", "act_format": "x"}, "unknown act_format"),
        ({"quant": "a8w8", "act_format": "mxfp8"}, "act_format is a choice of a8w4 only"),
        ({"backend": "CUDA"}, "unknown backend; got 'CUDA'; expected auto or cuda.*; did you mean cuda"),
        ({"backend": None}, "unknown backend"),
        ({"num_max_tokens_per_rank": 0}, "num_max_tokens_per_rank is not a positive integer"),
        ({"num_max_tokens_per_rank": "8"}, "num_max_tokens_per_rank is not a positive integer"),
        ({"metrics": "yes"}, "metrics is not a bool"),
        ({"keep_parameters": 0}, "keep_parameters is not a bool"),
    ]
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            megamoe_transformers.register("unknown_options", **options)
    with pytest.raises(ValueError, match='experts_implementation="unknown_options"'):
        tiny_models.model("mixtral", experts_implementation="unknown_options")


@pytest.mark.parametrize(("found", "fits"), [("5.23.1", False), ("5.24.0", True), ("5.24.3", True), ("5.25.0", False)])
def test_the_version_is_checked(found: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda _: found)
    if fits:
        versions.require_version("transformers", megamoe_transformers.SUPPORTED)
        return
    with pytest.raises(ConfigError, match=f"got transformers {re.escape(found)}; expected transformers>=5.24,<5.25"):
        megamoe_transformers.register("another_release")


def test_a_missing_engine_is_named() -> None:
    with pytest.raises(ConfigError, match=r'no-such-engine is not installed; .*pip install "megamoe-core\[no-such'):
        versions.require_version("no-such-engine", ">=1")


def test_the_extra_asks_for_the_supported_releases() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"transformers{megamoe_transformers.SUPPORTED}" in project["optional-dependencies"]["transformers"]


def test_importing_the_adapter_does_not_import_transformers() -> None:
    code = "import sys, megamoe.integrations.transformers; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- what transformers promises ----------------------------------------------------------------------------------------


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_signatures_that_the_adapter_relies_on() -> None:
    """A change here is for a person to read: the adapter overrides or calls each of them."""
    experts_arguments = ["self", "hidden_states", "top_k_index", "top_k_weights"]
    assert parameters(moe.grouped_mm_experts_forward) == experts_arguments
    assert parameters(finegrained_fp8.fp8_grouped_mm_experts_forward) == experts_arguments
    assert parameters(moe.use_experts_implementation) == [
        "experts_class", "experts_interface", "is_concatenated", "is_transposed", "has_bias", "has_gate",
        "has_post_expert_norm",
    ]  # fmt: skip
    implementation = expert_parallel.EPImplementation
    assert parameters(implementation.__init__) == ["self", "experts", "ep_mesh", "tp_mesh"]
    assert parameters(implementation.__call__) == experts_arguments
    assert parameters(expert_parallel.AutoEP.__init__) == ["self", "experts", "ep_mesh", "tp_mesh"]
    assert parameters(moe.ExpertsInterface.register) == ["key", "value"]
    assert isinstance(moe.ALL_EXPERTS_FUNCTIONS, moe.ExpertsInterface)
    assert isinstance(finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS, finegrained_fp8.FP8ExpertsInterface)


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_say_how_their_weights_lie(family: str) -> None:
    experts = experts_modules(tiny_models.model(family))[0]
    oai = family == "gpt_oss"
    assert (experts.is_transposed, experts.is_concatenated, experts.has_bias) == (oai, not oai, oai)
    assert (experts.has_gate, experts.has_post_expert_norm, experts._is_expert_parallel) == (True, False, False)
    assert experts.num_experts == EXPERTS
    assert list(experts._parameters) == (
        ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"] if oai else ["gate_up_proj", "down_proj"]
    )
    stored = read_experts(experts)
    assert stored.weights.layout is (GateUpLayout.INTERLEAVED if oai else GateUpLayout.PACKED)
    assert parameters(own_forward(experts))[0] == "self"
    assert own_forward(experts).__qualname__ == f"{type(experts).__name__}.forward"


def test_experts_without_a_gate_or_with_a_norm_are_refused() -> None:
    for flag, value in (("has_gate", False), ("has_post_expert_norm", True)):
        experts = experts_modules(tiny_models.model("mixtral"))[0]
        setattr(experts, flag, value)
        with pytest.raises(UnsupportedProblemError, match="MixtralExperts"):
            read_experts(experts)


# -- expert parallel ---------------------------------------------------------------------------------------------------

SHARED, OWN = {"tp_size": 2}, {"fsdp_size": 2}
RUNS = {
    "shared": ep_workers.Run(SHARED, "megamoe", ((1, 15), (1, 15))),  # each brings its share, of an odd number of rows
    "shared-split": ep_workers.Run(SHARED, "megamoe", ((3, 19), (3, 19))),  # 29 rows a rank are above the capacity
    "own": ep_workers.Run(OWN, "megamoe", ((1, 16), (1, 3))),  # batches of their own
    "all-reduce": ep_workers.Run(SHARED, "all_reduce", ((1, 15), (1, 15))),  # transformers' own, experts by MegaMoE
    "dropped": ep_workers.Run(SHARED, "megamoe", ((1, 15), (1, 15)), keep_parameters=False),
    "eager": ep_workers.Run(OWN, "megamoe", ((1, 17), (1, 3)), unsupported="eager", dtype=torch.float32),
    "own-too-large": ep_workers.Run(OWN, "megamoe", ((1, 17), (1, 3))),
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, ep_workers.Result]]]:
    """A model, and what two processes that share its experts made of `RUNS`."""
    model = tiny_models.model("qwen3_moe", experts_implementation="eager")
    path = str(tmp_path_factory.mktemp("model"))
    model.save_pretrained(path)
    return model, run_ranks(ep_workers.run_all, 2, path, RUNS, timeout_s=240, num_threads=1)


@pytest.mark.parametrize("name", ["shared", "shared-split", "own", "all-reduce", "dropped", "eager"])
def test_two_ranks_are_the_model(name: str, two_ranks: Any) -> None:
    model, outcomes = two_ranks
    for shape, outcome in zip(RUNS[name].shapes, outcomes, strict=True):
        got, error = outcome[name].logits, outcome[name].error
        assert error == ""
        assert outcome[name].ep_sizes == {"all-reduce": [1], "eager": []}.get(name, [2])
        with torch.no_grad():
            expected = model(ep_workers.batch(shape)).logits
        assert got.shape == expected.shape
        rows = (got.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
        assert float(rows.median()) < 2 * ORACLE_GATES[QuantMode.BF16].row_rel_l2


def test_an_own_batch_above_the_capacity_is_an_error_on_every_rank(two_ranks: Any) -> None:
    _, outcomes = two_ranks
    first, second = (outcome["own-too-large"].error for outcome in outcomes)
    assert first.startswith("CapacityError: more tokens than the session holds; got 17")
    assert second.startswith("RankFailedError")

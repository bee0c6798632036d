"""What engines do with a session, on one GPU: the operator in graphs and under torch.compile, models of transformers,
sessions of two capacities side by side, and what the adapter costs.

Run with the matrix: `pytest -p claim packages/megamoe-cuda/tests/gpu`. Models need `megamoe-core[transformers]`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe import ops
from megamoe.backend import Capability
from megamoe.errors import BackendError
from megamoe.integrations.sessions import session_for
from megamoe.problem import MoEProblem, QuantMode
from megamoe.tensors import ExpertWeights, expert_tensors
from megamoe.testing.data import make_weights, with_tensors
from megamoe.testing.tolerances import ORACLE_GATES
from megamoe_cuda.backend import CudaBackend

sys.path.insert(0, str(Path(__file__).parents[3] / "megamoe-core" / "tests"))

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
BACKEND = CudaBackend()
CAPACITY = 256
PROBLEM = MoEProblem(hidden_size=1024, intermediate_size=512, num_experts=16, top_k=4, num_max_tokens_per_rank=CAPACITY)
NUM_LAYERS = 3
GRAPH_BUDGET_S, EAGER_BUDGET_S = 10e-6, 60e-6  # what the adapter and the operator may add to a forward


class Stack:
    """Layers that share one session, called one after the other through the operator or the session itself."""

    def __init__(self, problem: MoEProblem = PROBLEM) -> None:
        self.session = BACKEND.open(BACKEND.plan(problem))
        self.session.warmup()
        whole = make_weights(problem, DEVICE, seed=0)
        self.weights = [self.session.prepare(rolled(whole, layer)) for layer in range(NUM_LAYERS)]
        self.handle = ops.register(self.session)
        self.flat = [ops.flatten_weights(weights) for weights in self.weights]

    def by_operator(self, x: Tensor, ids: Tensor, router: Tensor, num_tokens: Tensor | None = None) -> Tensor:
        for tag, tensors in self.flat:
            x = x + torch.ops.megamoe.forward(self.handle, x, None, ids, router, tag, tensors, num_tokens)
        return x

    def by_session(self, x: Tensor, ids: Tensor, router: Tensor, num_tokens: Tensor | None = None) -> Tensor:
        for weights in self.weights:
            x = x + self.session.forward(x, ids, router, weights, num_tokens=num_tokens)
        return x


def rolled(weights: ExpertWeights, by: int) -> ExpertWeights:
    """Other experts at every place."""
    rolled = {name: tensor.view(torch.uint8).roll(by, 0).view(tensor.dtype) for name, tensor in weights.tensors()}
    return with_tensors(weights, rolled)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    made = Stack()
    yield made
    made.session.check()
    made.session.close()


def make_call(num_tokens: int, seed: int, problem: MoEProblem = PROBLEM) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, problem.num_experts, generator=rng).argsort(-1)[:, : problem.top_k].contiguous()
    ids[torch.rand(ids.shape, generator=rng) < 0.1] = -1
    x = torch.randn(num_tokens, problem.hidden_size, generator=rng).bfloat16()
    return x.to(DEVICE), ids.to(DEVICE), torch.rand(num_tokens, problem.top_k, generator=rng).to(DEVICE)


def capture(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


# -- the operator ------------------------------------------------------------------------------------------------------


def test_a_graph_of_several_layers_replays_other_routings_and_counts(stack: Stack) -> None:
    """Captured once; 20 routings, each with another number of valid rows, which the device alone knows."""
    static = make_call(CAPACITY, 0)
    num_tokens = torch.tensor(CAPACITY, dtype=torch.int32, device=DEVICE)
    graph, out = capture(lambda: stack.by_operator(*static, num_tokens))
    for seed in range(1, 21):
        call = make_call(CAPACITY, seed)
        valid = (0, CAPACITY, 1, 37)[seed] if seed < 4 else (seed * 41) % CAPACITY
        for mine, new in zip(static, call, strict=True):
            mine.copy_(new)
        num_tokens.fill_(valid)
        out.fill_(float("nan"))
        graph.replay()
        expected = stack.by_session(*(part[:valid] for part in call))
        assert torch.equal(out[:valid], expected), f"routing {seed}, {valid} tokens"
        assert torch.equal(out[valid:], call[0][valid:]), "padding rows are zero, so their tokens stay"


def test_the_operator_compiles_into_one_graph(stack: Stack) -> None:
    compiled = torch.compile(stack.by_operator, fullgraph=True, dynamic=True)
    for num_tokens in (64, 7, CAPACITY):
        call = make_call(num_tokens, num_tokens)
        assert torch.equal(compiled(*call), stack.by_operator(*call))


def test_a_compiled_layer_is_captured(stack: Stack) -> None:
    static = make_call(32, 5)
    compiled = torch.compile(stack.by_operator, fullgraph=True)
    graph, out = capture(lambda: compiled(*static))
    call = make_call(32, 6)
    for mine, new in zip(static, call, strict=True):
        mine.copy_(new)
    graph.replay()
    assert torch.equal(out, stack.by_session(*call))


def test_the_operator_costs_little(stack: Stack) -> None:
    call = make_call(8, 1)
    with torch.no_grad():
        eager = host_seconds(lambda: stack.by_operator(*call)) - host_seconds(lambda: stack.by_session(*call))
    graphs = [capture(lambda run=run: run(*call))[0].replay for run in (stack.by_operator, stack.by_session)]
    seconds = [device_seconds(replay) for replay in graphs]
    in_graph = (seconds[0] - seconds[1]) / NUM_LAYERS
    print(f"operator: {eager / NUM_LAYERS * 1e6:.1f} us eager, {in_graph * 1e6:.2f} us in a graph")
    assert eager / NUM_LAYERS < EAGER_BUDGET_S
    assert in_graph < GRAPH_BUDGET_S


def host_seconds(call: Callable[[], object], repeats: int = 200) -> float:
    """Median of what the host spends on a call; the device catches up between calls."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return median(times)


def device_seconds(replay: Callable[[], None], repeats: int = 50) -> float:
    """Median of a graph's time by events."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


# -- experts that move -------------------------------------------------------------------------------------------------


def test_an_expert_that_moved_is_in_the_next_replay(stack: Stack) -> None:
    """Expert 5 is copied over expert 3 under a captured graph: then ids of both mean the same."""
    weights = stack.session.prepare(make_weights(PROBLEM, DEVICE, seed=5))
    x, ids, router = make_call(200, 21)
    graph, out = capture(lambda: stack.session.forward(x, ids, router, weights))
    expected = stack.session.forward(x, ids.masked_fill(ids == 3, 5), router, weights)
    graph.replay()
    assert not torch.equal(out, expected)
    for tensor in expert_tensors(weights).values():
        slots = tensor.view(torch.uint8)
        slots[3].copy_(slots[5])
    graph.replay()
    assert torch.equal(out, expected)


# -- two capacities ----------------------------------------------------------------------------------------------------


def test_decode_and_prefill_sessions_side_by_side(stack: Stack) -> None:
    """A small and a large session in turns, in graphs and not, on the same prepared weights: the same bits."""
    large = replace(PROBLEM, num_max_tokens_per_rank=4096)
    with BACKEND.open(BACKEND.plan(large)) as prefill:
        prefill.warmup()
        decode_call, prefill_call = make_call(32, 11), make_call(3000, 12)
        both = (prefill, stack.session)
        assert [session_for(len(call[0]), both) for call in (decode_call, prefill_call)] == [stack.session, prefill]
        weights = stack.weights[0]
        alone = stack.session.forward(*decode_call, weights), prefill.forward(*prefill_call, weights)
        graph, out = capture(lambda: stack.session.forward(*decode_call, weights))
        for _ in range(10):
            got = prefill.forward(*prefill_call, weights)
            graph.replay()
            assert torch.equal(got, alone[1])
            assert torch.equal(out, alone[0])
        assert torch.equal(prefill.forward(*decode_call, weights), alone[0])
        prefill.check()


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapters() -> Iterator[Any]:
    """`register` of the transformers adapter, undone at the end."""
    pytest.importorskip("transformers", reason="the transformers extra is not installed")
    from megamoe.integrations import transformers as megamoe_transformers

    registered = []

    def register(*args: Any, **options: Any) -> Any:
        registered.append(megamoe_transformers.register(*args, **options))
        return registered[-1]

    yield register
    for adapter in registered:
        adapter.close()


@pytest.mark.parametrize("quant", ["bf16", "a8w8"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "mixtral", "gpt_oss"])
def test_a_model_generates_on_the_gpu(family: str, quant: str, adapters: Any) -> None:
    """BF16 experts as they are, or rounded to FP8 (weights and activations), against eager in FP32. What the backend
    does not claim is refused at the first forward."""
    import tiny_models

    adapter = adapters(num_max_tokens_per_rank=64, quant=quant)
    model = tiny_models.model(family, experts_implementation="megamoe").to(DEVICE)
    prompt = torch.randint(1, tiny_models.VOCAB, (2, 12), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def generate() -> Tensor:
        with torch.no_grad():
            told = model.generate(prompt, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(prompt))
        return told  # type: ignore[no-any-return]

    claimed, oai = BACKEND.capabilities(), family == "gpt_oss"
    if f"quant:{quant}" not in claimed or (oai and Capability.EXPERT_BIAS not in claimed):
        with pytest.raises(BackendError, match="expert_bias" if f"quant:{quant}" in claimed else quant):
            generate()
        return
    told = generate()
    assert told.shape == (2, 20)
    (problem,) = adapter.problems()
    assert (problem.quant, problem.expert_bias) == (quant, oai)
    with torch.no_grad():
        logits = model(told).logits.float()
        model.set_experts_implementation("eager")
        exact = model.float()(told).logits
    rows = (logits - exact).norm(dim=-1) / exact.norm(dim=-1)
    print(f"{family} {quant}: median distance of logits {float(rows.median()):.4f}")
    assert float(rows.median()) < 2 * ORACLE_GATES[QuantMode(quant)].row_rel_l2
    assert not torch.equal(logits, exact)


def test_gpt_oss_on_the_cpu_runs_on_the_reference(adapters: Any) -> None:
    import tiny_models

    adapter = adapters(num_max_tokens_per_rank=64)
    model = tiny_models.model("gpt_oss", experts_implementation="megamoe")
    prompt = torch.randint(1, tiny_models.VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        told = model.generate(prompt, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(prompt))
    assert told.shape == (1, 13)
    assert adapter.problems()[0].expert_bias


def test_the_adapter_costs_little(adapters: Any) -> None:
    import tiny_models

    adapter = adapters(num_max_tokens_per_rank=64, quant="a8w8")
    model = tiny_models.model("mixtral", experts_implementation="megamoe").to(DEVICE)
    experts = tiny_models.experts_modules(model)[0]
    x, ids, router = (part.to(DEVICE) for part in tiny_models.tokens(8))
    with torch.no_grad():
        experts(x, ids, router)
        layer = adapter.layer(experts, tiny_models.TOP_K)
        calls = [lambda: experts(x, ids, router), lambda: layer.session.forward(x, ids, router, layer.weights)]
        assert torch.equal(calls[0](), calls[1]())
        host = [host_seconds(call) for call in calls]
        device = [device_seconds(capture(call)[0].replay) for call in calls]
    print(
        f"adapter: {(host[0] - host[1]) * 1e6:.1f} us eager over {host[1] * 1e6:.1f}, "
        f"{(device[0] - device[1]) * 1e6:.2f} us in a graph over {device[1] * 1e6:.1f}"
    )
    assert host[0] - host[1] < EAGER_BUDGET_S
    assert device[0] - device[1] < GRAPH_BUDGET_S


def test_replays_of_a_graph_are_counted(adapters: Any) -> None:
    """Two layers on one session, counted one by one: in calls of their own, and in each replay with another routing."""
    import tiny_models

    adapter = adapters(num_max_tokens_per_rank=64, quant="a8w8", metrics=True)
    model = tiny_models.model("mixtral", experts_implementation="megamoe").to(DEVICE)
    layers = tiny_models.experts_modules(model)[:2]
    x, ids, router = (part.to(DEVICE) for part in tiny_models.tokens(8))
    with torch.no_grad():
        graph, _ = capture(lambda: [layer(x, ids, router) for layer in layers][-1])
        adapter.metrics()  # what counted so far starts anew
        expected = torch.zeros(layers[0].num_experts, dtype=torch.int64)
        for shift in range(5):
            ids.copy_((ids + shift) % layers[0].num_experts)
            graph.replay()
            expected += torch.bincount(ids.flatten().cpu(), minlength=len(expected))
        layers[1](x, ids, router)
    (metrics,) = adapter.metrics()
    last = torch.bincount(ids.flatten().cpu(), minlength=len(expected))
    first, second = metrics.rows_per_layer.values()
    assert first.tolist() == expected.tolist()
    assert second.tolist() == (expected + last).tolist()
    assert (metrics.calls, metrics.dropped_ids, metrics.timeouts) == (11, 0, 0)


def test_a_compiled_model_is_the_model(adapters: Any) -> None:
    """Layers are prepared by a first forward; after that the whole model is one graph."""
    import tiny_models

    adapters(num_max_tokens_per_rank=64, quant="a8w8")
    model = tiny_models.model("qwen3_moe", experts_implementation="megamoe").to(DEVICE)
    ids = torch.randint(1, tiny_models.VOCAB, (2, 10), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True)
        got = compiled(ids, use_cache=False).logits
    # The compiler rounds elsewhere, so some rows take another expert.
    rows = (got - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    print(f"compiled: median distance of logits {float(rows.median()):.4f}")
    assert float(rows.median()) < ORACLE_GATES[QuantMode.A8W8].row_rel_l2

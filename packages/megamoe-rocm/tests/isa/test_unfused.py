"""The unfused pipeline, compiled for gfx950: what its kernels take, and one rank's call executed in the interpreter."""

from __future__ import annotations

from types import ModuleType

import pytest

pytestmark = pytest.mark.usefixtures("toolchain")

MAX_STEPS = 2_000_000


@pytest.mark.parametrize("quant", ["a4w4", "a8w4"])
def test_one_rank_against_the_staged_reference(layers: ModuleType, quant: str) -> None:
    """Over BF16 its roundings are those of the mode: a rank's rows, then their sum."""
    from megamoe.reference.staged import staged
    from megamoe_rocm import weights as kernel_weights
    from megamoe_rocm.isa.session import EmulatedLauncher
    from megamoe_rocm.unfused.exchange import CollectiveExchange
    from megamoe_rocm.unfused.pipeline import UnfusedPipeline

    problem = layers.problem(ep_size=1, quant=quant, swiglu_limit=2.0)
    inputs = layers.random_inputs(problem, (24,), seed=1, low=0)
    weights = layers.random_weights(problem, 0)
    launcher = EmulatedLauncher(1, seed=5, max_steps=MAX_STEPS)
    exchange = CollectiveExchange(problem, None)
    pipeline = UnfusedPipeline(problem, rank=0, exchange=exchange, tile=layers.SMALL, num_programs=2, launcher=launcher)
    prepared = kernel_weights.prepare(weights, problem).tensors
    out = pipeline.forward(inputs.hidden_states[0], inputs.topk_ids[0], inputs.topk_weights[0], prepared)
    expected = staged(problem, inputs.hidden_states, inputs.topk_ids, inputs.topk_weights, [weights]).outputs[0]
    assert layers.rel_l2(out, expected) < 1e-2


@pytest.mark.parametrize("quant", ["a4w4", "a8w4"])
def test_its_kernels_fit_as_the_fused_ones_do(layers: ModuleType, quant: str) -> None:
    """With the tile that takes most registers; a pipeline that spilled would be no peer."""
    import torch

    from megamoe_rocm.aot import Expectation, check
    from megamoe_rocm.code_store import compile_launch
    from megamoe_rocm.heuristics import tile_for
    from megamoe_rocm.kernels.launch import GFX950
    from megamoe_rocm.unfused.exchange import Received
    from megamoe_rocm.unfused.experts import Experts

    problem, tile = layers.problem(ep_size=1, quant=quant), tile_for(num_max_tokens_per_rank=2048, num_tokens=2048)
    meta = torch.device("meta")
    experts = Experts(problem, rank=0, max_rows=24, tile=tile, num_programs=512, target=GFX950, device=meta)
    rows = torch.empty(24, 512, dtype=torch.uint8, device=meta)
    ids = torch.empty(24, 2, dtype=torch.int32, device=meta)
    received = Received(payload=rows, scales=rows, ids=ids, weights=ids.float(), num_rows=ids)
    weights = dict.fromkeys(("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"), rows)
    launches: list = []
    experts.run(received, weights, launches.append)
    for launch in launches:
        gemm = launch.kernel.__name__.startswith("expert_gemm")
        check(compile_launch(launch), Expectation(min_workgroups_per_cu=2 if gemm else None))


def test_the_benchmark_has_it_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from megamoe_rocm import bench
    from megamoe_rocm.isa.session import EmulatedLauncher

    monkeypatch.setenv("MEGAMOE_ROCM_DEVICE", "isa")
    assert isinstance(bench._launcher(), EmulatedLauncher)

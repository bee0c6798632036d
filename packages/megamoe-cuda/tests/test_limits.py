"""Whatever `supports` takes can be planned, pinned to each tile and compiled: a grid of odd problems; no GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from megamoe.backend import Reason
from megamoe.errors import ConfigError
from megamoe.problem import MoEProblem
from megamoe.schedule.device_spec import H200
from megamoe_cuda.backend import CudaBackend
from megamoe_cuda.heuristics import M256, SessionConfig
from megamoe_cuda.jit.codegen import kernel_source
from megamoe_cuda.smem_budget import MAX_DYNAMIC_BYTES, shared_memory
from megamoe_cuda.workspace_layout import kernel_workspace

BACKEND = CudaBackend()
MODES: tuple[dict[str, Any], ...] = ({"quant": "a8w8"}, {"quant": "bf16"}, {"quant": "a8w4", "act_format": "fp8_1x128"})
MANY = MoEProblem(
    hidden_size=8192, intermediate_size=1024, num_experts=294 * 32, top_k=8, num_max_tokens_per_rank=8, ep_size=32
)


def odd_problem(seed: int) -> MoEProblem:
    chooser = random.Random(seed)
    ep_size = chooser.choice([1, 1, 2, 3, 8, 31, 32])
    sizes = [128 * chooser.randint(1, 64), 128, 8192, 32 * chooser.randint(1, 256)]
    return MoEProblem(
        hidden_size=chooser.choice(sizes),
        intermediate_size=chooser.choice(sizes),
        num_experts=ep_size * chooser.choice([1, 2, 32, chooser.randint(1, 384), chooser.randint(1, 8000)]),
        top_k=chooser.randint(1, 16),
        num_max_tokens_per_rank=chooser.choice([1, chooser.randint(1, 64), 32768, 1 << chooser.randint(0, 27)]),
        ep_size=ep_size,
        transport=chooser.choice(["bf16", "fp8_blockwise_1x32"]),
        activation=chooser.choice(["swiglu", "swiglu_oai"]),
        expert_bias=chooser.random() < 0.3,
        **chooser.choice(MODES),
    )


@pytest.mark.parametrize("seed", range(200))
def test_what_is_supported_can_be_planned_and_compiled(seed: int) -> None:
    problem = odd_problem(seed)
    verdict = BACKEND.supports(problem)
    if not verdict.ok:
        assert verdict.reason in (Reason.SHAPE, Reason.CAPACITY, Reason.NUM_EXPERTS)
        return
    num_sms = random.Random(seed).choice([1, 66, 131, 132])
    for name in BACKEND.configs(problem):
        if name == M256.name and num_sms < M256.cluster_size:
            continue  # refused
        plan = BACKEND.plan(problem, replace(H200, num_sms=num_sms), config=name)
        config = plan.config
        assert isinstance(config, SessionConfig)
        assert name == "auto" or [tile.name for tile in config.tiles] == [name]
        for tile, ring in zip(config.tiles, config.rings, strict=True):
            for virtual in {1, problem.ep_size}:
                kernel = config.kernel(
                    problem, tile, num_virtual_ranks=virtual, ctas_per_rank=max(num_sms // virtual, tile.cluster_size)
                )
                assert shared_memory(kernel).num_bytes <= MAX_DYNAMIC_BYTES
                assert kernel_workspace(kernel) == plan.workspace
            assert 1 <= ring.ring_blocks <= ring.max_blocks
        numbers = [line.split(" = ")[1] for line in kernel_source(kernel).splitlines() if "unsigned int k" in line]
        assert all(0 <= int(number.rstrip("u;")) < 1 << 32 for number in numbers)


def test_tables_of_routing_have_to_fit_the_stages() -> None:
    """With 12288 experts they were 128 bytes too large: the plan was made, and nvcc refused the kernel."""
    problem = replace(MANY, intermediate_size=8192, num_experts=384 * 32, ep_size=32, num_max_tokens_per_rank=32768)
    for mode in MODES:
        verdict = BACKEND.supports(replace(problem, **mode))
        assert (verdict.ok, verdict.reason) == (False, Reason.NUM_EXPERTS)
        assert "the tables of routing do not fit" in verdict.detail
        assert "plan fewer" in verdict.detail
    assert BACKEND.supports(replace(problem, num_experts=96 * 32)).ok


def test_rows_that_are_combined_have_to_fit_the_stages() -> None:
    """Sixteen math warps and sixteen rows a token, with six stages left: nvcc refused the kernel."""
    problem = replace(
        MANY, quant="a8w4", act_format="fp8_1x128", hidden_size=8192, top_k=16, ep_size=32, num_max_tokens_per_rank=64
    )
    assert BACKEND.supports(replace(problem, num_experts=208 * 32)).ok
    verdict = BACKEND.supports(replace(problem, num_experts=216 * 32))
    assert (verdict.ok, verdict.reason) == (False, Reason.NUM_EXPERTS)
    assert "plan fewer" in verdict.detail
    assert BACKEND.supports(replace(problem, num_experts=216 * 32, top_k=8)).ok


def test_a_tile_without_room_is_not_offered_and_can_not_be_pinned() -> None:
    """Few rows an expert: "auto" has small tiles only. Large ones have no room, which opening a session found out."""
    many = replace(MANY, quant="bf16")
    assert BACKEND.configs(many) == ("auto", "m64")
    with pytest.raises(ConfigError, match=r"shared memory.*plan fewer"):
        BACKEND.plan(many, config="m128")


def test_rows_that_all_ranks_send_to_one_are_counted_in_31_bits() -> None:
    few = replace(MANY, num_experts=128, top_k=16)
    assert BACKEND.supports(replace(few, num_max_tokens_per_rank=(1 << 22) - 1)).ok
    verdict = BACKEND.supports(replace(few, num_max_tokens_per_rank=1 << 22))
    assert (verdict.ok, verdict.reason) == (False, Reason.CAPACITY)


def test_a_share_of_a_gpu_has_an_sm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_RANKS_PER_GPU", "133")
    with pytest.raises(ConfigError, match="without SMs; got 0; .*MEGAMOE_RANKS_PER_GPU"):
        BACKEND.plan(replace(MANY, num_experts=128))

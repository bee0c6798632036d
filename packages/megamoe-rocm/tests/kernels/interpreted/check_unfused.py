"""The unfused pipeline in the interpreter: against the staged reference, over a stand-in for Mori and without ranks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import SMALL, problem, random_inputs, random_weights, rel_l2
from torch import Tensor

from megamoe.problem import MoEProblem
from megamoe.reference.staged import staged
from megamoe.symm import InprocGroup
from megamoe.testing.threads import on_ranks
from megamoe_rocm import weights as kernel_weights
from megamoe_rocm.kernels.launch import Launch
from megamoe_rocm.runtime.launcher import InterpretedLauncher
from megamoe_rocm.unfused.exchange import CollectiveExchange, Exchange
from megamoe_rocm.unfused.mori_exchange import MoriExchange
from megamoe_rocm.unfused.pipeline import UnfusedPipeline

STAND_IN = Path(__file__).parents[2] / "runtime/stand_in"
# Rows are rounded to BF16 where the fused kernels keep FP32, and their sum on a rank once more: 2^-9 each.
BOUND = 0.01
BOUND_OVER_FP8 = 0.04  # the reference's rows take a rounding to e4m3 (0.027) that the pipeline's do not here


@pytest.fixture(autouse=True)
def _mori(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(STAND_IN))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "mori"]:
        del sys.modules[name]


class InTurn(InterpretedLauncher):
    """Triton's interpreter changes its own modules while it runs a kernel: one thread at a time."""

    lock = threading.Lock()

    def launch(self, launch: Launch, *, rank: int) -> None:
        with self.lock:
            super().launch(launch, rank=rank)


def pipeline(of: MoEProblem, rank: int, exchange: Exchange) -> UnfusedPipeline:
    return UnfusedPipeline(of, rank=rank, exchange=exchange, tile=SMALL, num_programs=2, launcher=InTurn())


def reference(of: MoEProblem, inputs) -> list[Tensor]:
    weights = [random_weights(of, rank) for rank in range(of.ep_size)]
    return staged(of, inputs.hidden_states, inputs.topk_ids, inputs.topk_weights, weights).outputs


@pytest.mark.parametrize("quant", ["a4w4", "a8w4"])
@pytest.mark.parametrize("transport", ["bf16", "fp8_blockwise_1x32"])
def test_two_ranks_over_mori(quant: str, transport: str) -> None:
    of = problem(quant=quant, transport=transport, num_max_tokens_per_rank=17, swiglu_limit=2.0)
    calls = [random_inputs(of, (17, 17), seed=seed, low=0) for seed in range(2)]

    def body(group: InprocGroup) -> list[Tensor]:
        rank = group.rank
        weights = kernel_weights.prepare(random_weights(of, rank), of).tensors
        unfused = pipeline(of, rank, MoriExchange(of, rank))
        return [
            unfused.forward(
                inputs.hidden_states[rank], inputs.topk_ids[rank].int(), inputs.topk_weights[rank], weights
            ).clone()
            for inputs in calls
        ]

    by_rank = on_ranks(2, body)
    for call, inputs in enumerate(calls):
        for outputs, expected in zip(by_rank, reference(of, inputs), strict=True):
            assert rel_l2(outputs[call], expected) < (BOUND if transport == "bf16" else BOUND_OVER_FP8)


def test_one_rank_with_more_blocks_than_programs_and_an_expert_without_rows() -> None:
    of = problem(ep_size=1, num_experts=5, num_max_tokens_per_rank=70, top_k=2)
    inputs = random_inputs(of, (70,), seed=3, low=0)
    inputs.topk_ids[0][inputs.topk_ids[0] == 2] = 1
    weights = kernel_weights.prepare(random_weights(of, 0), of).tensors
    out = pipeline(of, 0, CollectiveExchange(of, None)).forward(
        inputs.hidden_states[0], inputs.topk_ids[0].int(), inputs.topk_weights[0], weights
    )
    assert rel_l2(out, reference(of, inputs)[0]) < BOUND

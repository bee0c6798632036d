"""Two ranks of a server with data-parallel attention, over gloo: SGLang's own layers and model blocks, run by MegaMoE.

`nox -s engines-sglang` runs these. What is expected is computed in FP32 from the checkpoint, by `sglang_models.exact`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.launch import run_ranks
from megamoe.problem import QuantMode
from megamoe.testing.tolerances import ORACLE_GATES

pytest.importorskip("sglang", reason="`nox -s engines-sglang` installs it and runs these")

from sglang_models import EXPERTS, TOP_K, exact, experts, write_config
from sglang_ranks import TOKENS, routing, run_rank

GATE = ORACLE_GATES[QuantMode.A8W8].rel_l2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = write_config(tmp_path_factory.mktemp("model"))
    return run_ranks(run_rank, 2, path, timeout_s=280, num_threads=1)


def assert_near(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert (got.float() - expected).norm() <= GATE * expected.norm()


def test_each_rank_gets_its_own_rows_back(ranks: list[dict[str, Any]]) -> None:
    """Global ids: every rank holds half of the experts, and its rows want experts of both halves."""
    assert [result["local_experts"] for result in ranks] == [EXPERTS // 2] * 2
    for rank, result in enumerate(ranks):
        x, ids, weights = routing(TOKENS[rank], rank)
        assert (ids < EXPERTS // 2).any()
        assert (ids >= EXPERTS // 2).any()
        assert_near(result["own_tokens"], exact(experts(), x, ids, weights))


def test_a_rank_without_tokens_takes_part(ranks: list[dict[str, Any]]) -> None:
    assert_near(ranks[0]["idle"], exact(experts(), *routing(4, 0)))
    assert ranks[1]["idle"].shape[0] == 0


@pytest.mark.parametrize("place", ["in_block", "at_boundary", "over_tp"])
def test_nobody_sums_the_rows_once_more(ranks: list[dict[str, Any]], place: str) -> None:
    for result in ranks:
        assert torch.equal(result[place], result["own_tokens"])


def test_sums_are_real_where_the_mode_does_not_forbid_them(ranks: list[dict[str, Any]]) -> None:
    """The control of the test above: without the mode the same call adds up both ranks."""
    for result in ranks:
        assert (result["without_mode"] == 2).all()


def test_a_server_that_would_sum_is_noticed_when_a_layer_is_prepared(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert "would not leave the tokens" in result["broken_promise"]
        assert "tokens stay on their rank: False" in result["broken_promise"]
        assert "no sum over the EP group: False" in result["broken_promise"]


def test_counts_are_those_of_the_recorder(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["counts"]["received"] == result["counts"]["chosen"]
        assert sum(result["counts"]["received"]) == sum(TOKENS) * TOP_K


def test_qwen_block(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        block = result["block"]
        scores = (block["x"].float() @ block["gate"].float().T).softmax(dim=-1)
        weights, ids = scores.topk(TOP_K)
        assert_near(block["y"], exact(experts(), block["x"], ids, weights / weights.sum(-1, keepdim=True)))


def test_deepseek_block(ranks: list[dict[str, Any]]) -> None:
    """The routed rows are scaled once, and the shared expert is added once, on each rank for its own rows."""
    for result in ranks:
        block = result["deepseek"]
        x = block["x"].float()
        scores = (x @ block["gate.weight"].float().T).sigmoid()
        weights, ids = scores.topk(TOP_K)
        routed = exact(experts(), block["x"], ids, weights / weights.sum(-1, keepdim=True))
        gate, up = (x @ block["shared_experts.gate_up_proj.weight"].float().T).chunk(2, dim=-1)
        shared = (torch.nn.functional.silu(gate) * up) @ block["shared_experts.down_proj.weight"].float().T
        assert_near(block["y"], 2.5 * routed + shared)


def test_the_balancer_moves_experts_between_ranks(ranks: list[dict[str, Any]]) -> None:
    """What it writes to is what MegaMoE reads: the same experts elsewhere give the same bits."""
    for result in ranks:
        assert torch.equal(result["moved"], result["own_tokens"])


def test_more_tokens_than_the_capacity_raise_on_both_ranks(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["too_many"] == "CapacityError"
    assert ranks[1]["too_many"] == "RankFailedError"

"""Routers by hand: which experts, with which weights. `tests/real_models` compares with transformers' routers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megamoe.checkpoint import Router, TensorFiles, find_layer, load_router
from megamoe.errors import CheckpointError, ConfigError

EYE = torch.eye(4)  # logits are the tokens themselves


def test_softmax_first_with_and_without_normalising() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    ids, weights = Router(weight=EYE, top_k=2)(logits)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, logits.softmax(-1)[:, [1, 2]])
    _, weights = Router(weight=EYE, top_k=2, normalize=True, scale=2.5)(logits)
    torch.testing.assert_close(weights, 2.5 * logits[:, [1, 2]].softmax(-1))


def test_softmax_last_with_a_bias() -> None:
    router = Router(weight=EYE, top_k=2, bias=torch.tensor([5.0, 0.0, 0.0, 0.0]), softmax_last=True)
    ids, weights = router(torch.tensor([[0.0, 2.0, 1.0, -1.0]]).bfloat16())
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[5.0, 2.0]]).softmax(-1))


def test_a_correction_bias_chooses_but_does_not_weigh_and_groups_come_first() -> None:
    logits = torch.tensor([[4.0, -4.0, 1.0, 0.9]])
    correction = torch.tensor([0.0, 0.0, 0.5, 0.5])
    plain = Router(weight=EYE, top_k=1, correction_bias=torch.zeros(4))
    assert plain(logits)[0].tolist() == [[0]]
    ids, weights = Router(weight=EYE, top_k=1, correction_bias=correction)(logits)
    assert ids.tolist() == [[2]]
    torch.testing.assert_close(weights, torch.tensor([[1.0]]).sigmoid())
    # Of two groups the one with the larger sum of its best two: {2, 3}, although expert 0 scores highest alone.
    grouped = Router(weight=EYE, top_k=2, correction_bias=torch.zeros(4), num_groups=2, top_groups=1)
    assert grouped(logits)[0].sort().values.tolist() == [[2, 3]]


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"top_k": 5}, "so many experts for a token; got 5; expected 1 to 4"),
        ({"top_k": 3, "num_groups": 2}, "so many experts for a token; got 3; expected 1 to 2"),  # others are barred
        ({"top_k": 1, "num_groups": 3}, "do not share out the experts"),
        ({"top_k": 1, "num_groups": 2, "top_groups": 3}, "do not share out the experts"),
    ],
    ids=str,
)
def test_a_choice_that_there_is_none_of_is_refused(fields: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Router(weight=EYE, correction_bias=torch.zeros(4), **fields)  # type: ignore[arg-type]


def test_the_files_say_which_router(tmp_path: Path) -> None:
    prefix = "model.layers.0.mlp"
    experts = {
        f"{prefix}.experts.{expert}.{name}_proj.weight": torch.zeros(8, 8, dtype=torch.bfloat16)
        for expert in range(4)
        for name in ("gate", "up", "down")
    }

    def router(config: dict[str, object], **tensors: torch.Tensor) -> Router:
        save_file(experts | {f"{prefix}.{name}": t for name, t in tensors.items()}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config))
        return load_router(find_layer(TensorFiles.find([tmp_path]), 0), top_k=2)

    gate = {"gate.weight": torch.randn(4, 8)}
    qwen = router({"norm_topk_prob": True}, **gate)
    assert (qwen.normalize, qwen.correction_bias, qwen.softmax_last) == (True, None, False)
    assert torch.equal(qwen.weight, gate["gate.weight"])
    assert not router({}, **gate).normalize
    deepseek = {**gate, "gate.e_score_correction_bias": torch.ones(4)}
    chosen = router({"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True}, **deepseek)
    assert chosen.correction_bias is not None
    assert (chosen.num_groups, chosen.top_groups, chosen.scale) == (2, 1, 2.5)
    oss = router({}, **{"router.weight": torch.randn(4, 8).bfloat16(), "router.bias": torch.ones(4)})
    assert oss.softmax_last
    with pytest.raises(CheckpointError, match=r"no router for this layer.*mlp\.gate\.weight"):
        router({})
    with pytest.raises(CheckpointError, match=r"gate\.weight .* wrong shape"):
        router({}, **{"gate.weight": torch.randn(5, 8)})
    for key, value in (("n_group", "x"), ("topk_group", [1]), ("n_group", -1), ("routed_scaling_factor", True)):
        with pytest.raises(CheckpointError, match=f"config.json's {key} is no number above 0"):
            router({key: value}, **deepseek)

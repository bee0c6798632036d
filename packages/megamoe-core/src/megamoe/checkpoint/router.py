"""The router of a layer, from the same checkpoint: which experts a token goes to, and with what weights.

MegaMoE takes ids and weights as inputs of a call. This is for running a layer on its own, as `megamoe run` does: the
four ways in which the models whose namings are read here choose their experts, in FP32.

| model | choice |
|---|---|
| DeepSeek-V3 | sigmoid; a correction bias for the choice only; groups of experts first; weights normalised and scaled |
| Mixtral, Qwen-MoE | softmax over all experts, the top k of it, normalised where the model does |
| gpt-oss | the top k logits, softmax over these |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.checkpoint.load import LayerCheckpoint
from megamoe.checkpoint.namings.base import FLOATS, positive
from megamoe.checkpoint.namings.mixtral import Mixtral
from megamoe.errors import CheckpointError, ConfigError


@dataclass(frozen=True, kw_only=True)
class Router:
    """Chooses experts for tokens.

    Args:
        weight: `[E, H]` FP32.
        top_k: picks per token.
        bias: `[E]` FP32 added to the logits (gpt-oss), or None.
        correction_bias: `[E]` FP32 added to sigmoid scores for the choice only (DeepSeek-V3), or None: softmax.
        num_groups: groups of consecutive experts of which `top_groups` are eligible (DeepSeek-V3).
        top_groups: see above.
        softmax_last: softmax over the chosen logits instead of over all.
        normalize: divide the weights by their sum.
        scale: factor of all weights.

    Raises:
        ConfigError: groups that do not share out the experts, or more picks than experts that are eligible.
    """

    weight: Tensor
    top_k: int
    bias: Tensor | None = None
    correction_bias: Tensor | None = None
    num_groups: int = 1
    top_groups: int = 1
    softmax_last: bool = False
    normalize: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        experts, groups = self.weight.shape[0], self.num_groups
        if groups < 1 or experts % groups or not 1 <= self.top_groups <= groups:
            raise ConfigError(
                "these groups do not share out the experts",
                got=f"the best {self.top_groups} of {groups} groups, {experts} experts",
                expected="a number of groups that divides the experts, and at most so many best ones",
            )
        eligible = experts // groups * self.top_groups
        if not 1 <= self.top_k <= eligible:
            raise ConfigError(
                "the router can't choose so many experts for a token", got=self.top_k, expected=f"1 to {eligible}"
            )

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """ids `[T, K]` int64 and weights `[T, K]` FP32 of `[T, H]` tokens."""
        logits = torch.nn.functional.linear(hidden_states.float(), self.weight, self.bias)
        if self.softmax_last:
            values, ids = logits.topk(self.top_k, dim=-1)
            return ids, values.softmax(-1)
        scores = logits.softmax(-1) if self.correction_bias is None else logits.sigmoid()
        ids = self._eligible(scores).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, ids)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * self.scale

    def _eligible(self, scores: Tensor) -> Tensor:
        """Scores to choose by: corrected, and -inf outside of the best groups."""
        if self.correction_bias is not None:
            scores = scores + self.correction_bias
        if self.num_groups == 1:
            return scores
        groups = scores.view(*scores.shape[:-1], self.num_groups, -1)
        group_scores = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
        best = group_scores.topk(self.top_groups, dim=-1).indices
        barred = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, best, False)
        eligible: Tensor = groups.masked_fill(barred.unsqueeze(-1), -torch.inf)
        return eligible.flatten(-2)


def load_router(layer: LayerCheckpoint, top_k: int) -> Router:
    """The router of `layer`.

    Raises:
        CheckpointError: the files hold none in a naming that is known, or config.json's numbers are none.
        ConfigError: see `Router`.
    """
    stored, config = layer.stored, layer.files.config
    shape = (stored.num_experts, stored.hidden_size)
    gate, router = f"{stored.prefix}.gate", f"{stored.prefix}.router"
    with layer.files.open() as reader:
        if f"{router}.weight" in reader:
            return Router(
                weight=reader.read(f"{router}.weight", shape=shape, dtypes=FLOATS).float().clone(),
                bias=reader.read(f"{router}.bias", shape=shape[:1], dtypes=FLOATS).float().clone(),
                top_k=top_k,
                softmax_last=True,
            )
        if f"{gate}.weight" not in reader:
            raise CheckpointError(
                "the checkpoint holds no router for this layer",
                expected=f"{gate}.weight or {router}.weight",
                hint="give the routing through --input, or choose a generated one with --routing",
            )
        weight = reader.read(f"{gate}.weight", shape=shape, dtypes=FLOATS).float().clone()
        correction = None
        if f"{gate}.e_score_correction_bias" in reader:
            name = f"{gate}.e_score_correction_bias"
            correction = reader.read(name, shape=shape[:1], dtypes=FLOATS).float().clone()
    return Router(
        weight=weight,
        top_k=top_k,
        correction_bias=correction,
        num_groups=int(positive(config, "n_group", 1)) if correction is not None else 1,
        top_groups=int(positive(config, "topk_group", 1)) if correction is not None else 1,
        # Mixtral always normalises and has no field that says so.
        normalize=bool(config.get("norm_topk_prob", stored.naming == Mixtral.name)),
        scale=float(positive(config, "routed_scaling_factor", 1.0)),
    )

"""Where tokens go: the routings under which layers of other implementations broke, and the plain ones.

Each routing is a function of `Picks` (how many of what) and a seeded generator, and returns `[T, K]` int64 ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.problem import MoEProblem

MASKED = -1  # "no expert"


@dataclass(frozen=True, kw_only=True)
class Picks:
    """What a routing has to fill: one source rank's `[num_tokens, top_k]` ids.

    Args:
        num_tokens: rows.
        top_k: picks per row.
        num_experts: global physical experts.
        ep_size: ranks that they are spread over.
        src_rank: the rank that the tokens live on.
    """

    num_tokens: int
    top_k: int
    num_experts: int
    ep_size: int
    src_rank: int

    @classmethod
    def of(cls, problem: MoEProblem, *, num_tokens: int, src_rank: int) -> Picks:
        """Those of a rank that brings `num_tokens` tokens to a layer."""
        return cls(
            num_tokens=num_tokens,
            top_k=problem.top_k,
            num_experts=problem.num_experts,
            ep_size=problem.ep_size,
            src_rank=src_rank,
        )

    @property
    def shape(self) -> tuple[int, int]:
        return (self.num_tokens, self.top_k)

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.ep_size


Routing = Callable[[Picks, torch.Generator], Tensor]


def uniform(picks: Picks, rng: torch.Generator) -> Tensor:
    """Distinct experts per row where there are enough, each equally likely."""
    return drawn(picks, torch.ones(picks.num_experts), rng)


def zipf(picks: Picks, rng: torch.Generator) -> Tensor:
    """Expert e is picked in proportion to 1 / (e + 1): a few experts take most rows, many take none."""
    return drawn(picks, 1.0 / torch.arange(1, picks.num_experts + 1), rng)


def hot_expert(picks: Picks, rng: torch.Generator) -> Tensor:
    """Every row's first pick is the last expert; the others are uniform."""
    ids = uniform(picks, rng)
    ids[:, 0] = picks.num_experts - 1
    return ids


def one_expert(picks: Picks, rng: torch.Generator) -> Tensor:
    """Every pick of every row is one expert: K times the rows on one expert, none anywhere else."""
    return torch.full(picks.shape, picks.num_experts // 2, dtype=torch.int64)


def hot_rank(picks: Picks, rng: torch.Generator) -> Tensor:
    """All picks are on the last rank: it alone multiplies, the others only send and combine."""
    return _on_rank(picks, picks.ep_size - 1, rng)


def empty_ranks(picks: Picks, rng: torch.Generator) -> Tensor:
    """Only even ranks receive rows."""
    ids = uniform(picks, rng)
    owner = ids // picks.num_local_experts
    return ids - (owner % 2) * picks.num_local_experts


def own_rank(picks: Picks, rng: torch.Generator) -> Tensor:
    """All picks stay on the token's own rank: nothing crosses, and the transport's rounding is taken all the same."""
    return _on_rank(picks, picks.src_rank, rng)


def next_rank(picks: Picks, rng: torch.Generator) -> Tensor:
    """All picks are on the following rank: nothing stays."""
    return _on_rank(picks, (picks.src_rank + 1) % picks.ep_size, rng)


def send_only(picks: Picks, rng: torch.Generator) -> Tensor:
    """Rank 0 sends and receives nothing; the last rank receives all of it and all its own."""
    return _on_rank(picks, picks.ep_size - 1, rng) if picks.src_rank == 0 else _avoid_rank_0(picks, rng)


def masked_some(picks: Picks, rng: torch.Generator) -> Tensor:
    """A third of the picks are -1."""
    ids = uniform(picks, rng)
    return ids.masked_fill(torch.rand(picks.shape, generator=rng) < 0.34, MASKED)


def masked_rows(picks: Picks, rng: torch.Generator) -> Tensor:
    """Every second row has no expert at all."""
    ids = uniform(picks, rng)
    ids[::2] = MASKED
    return ids


def masked_all(picks: Picks, rng: torch.Generator) -> Tensor:
    """No row has an expert, on any rank."""
    return torch.full(picks.shape, MASKED, dtype=torch.int64)


def masked_rank(picks: Picks, rng: torch.Generator) -> Tensor:
    """Rank 0 sends nothing; the others do, to every rank."""
    return masked_all(picks, rng) if picks.src_rank == 0 else uniform(picks, rng)


def duplicates(picks: Picks, rng: torch.Generator) -> Tensor:
    """Every row repeats an expert, in the pattern [5, 88, 88, 65] (a public failure at 256 and 257 tokens)."""
    pattern = torch.tensor([5, 88, 88, 65]) % picks.num_experts
    return pattern.repeat(-(-picks.top_k // 4))[: picks.top_k].repeat(picks.num_tokens, 1)


def out_of_range(picks: Picks, rng: torch.Generator) -> Tensor:
    """A third of the picks name no expert: E, E + 63, -2, the extremes of int32."""
    outside = torch.tensor([picks.num_experts, picks.num_experts + 63, -2, 2**31 - 1, -(2**31)])
    ids = uniform(picks, rng)
    wrong = outside[torch.randint(len(outside), picks.shape, generator=rng)]
    return torch.where(torch.rand(picks.shape, generator=rng) < 0.34, wrong, ids)


def redundant(picks: Picks, rng: torch.Generator) -> Tensor:
    """Experts e and e + E/2 hold the same weights (`make_weights` of testing/data.py): rows take either in turn."""
    half = max(picks.num_experts // 2, 1)
    logical = uniform(Picks(**{**vars(picks), "num_experts": half, "ep_size": 1, "src_rank": 0}), rng)
    copy = torch.arange(picks.num_tokens).unsqueeze(1) % 2
    return logical + copy * (picks.num_experts - half)


ROUTINGS: Mapping[str, Routing] = {
    routing.__name__: routing
    for routing in (
        uniform, zipf, hot_expert, one_expert, hot_rank, empty_ranks, own_rank, next_rank, send_only, masked_some,
        masked_rows, masked_all, masked_rank, duplicates, out_of_range, redundant,
    )
}  # fmt: skip


def drawn(picks: Picks, weights: Tensor, rng: torch.Generator) -> Tensor:
    """Experts drawn in proportion to `weights`, `[E]`, without repeats in a row where there are enough experts."""
    if picks.num_tokens == 0:
        return torch.zeros(picks.shape, dtype=torch.int64)
    repeats = picks.top_k > picks.num_experts
    return torch.multinomial(weights.expand(picks.num_tokens, -1), picks.top_k, replacement=repeats, generator=rng)


def _on_rank(picks: Picks, owner: int, rng: torch.Generator) -> Tensor:
    local = Picks(**{**vars(picks), "num_experts": picks.num_local_experts, "ep_size": 1, "src_rank": 0})
    return uniform(local, rng) + owner * picks.num_local_experts


def _avoid_rank_0(picks: Picks, rng: torch.Generator) -> Tensor:
    weights = torch.ones(picks.num_experts)
    if picks.ep_size > 1:
        weights[: picks.num_local_experts] = 0
    repeats = picks.top_k > int(weights.sum())
    if picks.num_tokens == 0:
        return torch.zeros(picks.shape, dtype=torch.int64)
    return torch.multinomial(weights.expand(picks.num_tokens, -1), picks.top_k, replacement=repeats, generator=rng)

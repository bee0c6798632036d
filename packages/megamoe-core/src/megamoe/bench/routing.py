"""Routings of the benchmarks and of `megamoe run`, by name: one spelling for results, options and docs.

| name | which experts |
|---|---|
| `uniform` | distinct experts, each equally likely |
| `zipf:A` | expert e in proportion to (e + 1)^-A, distinct in a row; `zipf` is `zipf:1` |
| `warm-rank` | the last rank receives 1.5 times the mean, spread evenly over its experts |
| `hot-expert` | every row's first pick is one expert |
| `hot-rank` | all picks on one rank |
| `ep8-equivalent` | two ranks stand in for one of eight: a pick is on the other rank with probability 7/8 |

`ep8-equivalent` needs two ranks that hold 32 experts each for an EP8 layer of 256: then local experts, rows, FLOPs,
weight bytes and remote rows of a rank are EP8's. It does not reproduce fan-in from seven peers nor eight-way barriers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.errors import ConfigError
from megamoe.testing.routings import Picks, Routing, drawn, hot_expert, hot_rank, uniform

WARM = 1.5  # rows of the warm rank, of the mean
EP8_REMOTE = 7 / 8  # share of a rank's picks that leave it at EP8 under uniform routing


def zipf(picks: Picks, rng: torch.Generator, exponent: float = 1.0) -> Tensor:
    """Distinct experts of a row, expert e drawn in proportion to (e + 1)^-exponent."""
    return drawn(picks, torch.arange(1, picks.num_experts + 1, dtype=torch.float64) ** -exponent, rng)


def warm_rank(picks: Picks, rng: torch.Generator) -> Tensor:
    """Distinct experts of a row, drawn so that the last of several ranks receives `WARM` times the mean."""
    weights = torch.ones(picks.num_experts, dtype=torch.float64)
    if picks.ep_size > 1:
        share = WARM / picks.ep_size
        weights[-picks.num_local_experts :] = share * (picks.ep_size - 1) / (1 - share)
    return drawn(picks, weights, rng)


def ep8_equivalent(picks: Picks, rng: torch.Generator) -> Tensor:
    """Each pick on the other of two ranks with probability 7/8, uniform and distinct within a rank.

    Raises:
        ConfigError: another number of ranks, or fewer experts on a rank than picks of a token.
    """
    if picks.ep_size != 2 or picks.top_k > picks.num_local_experts:
        raise ConfigError(
            "ep8-equivalent routing is for two ranks with at least top_k experts each",
            got=f"{picks.ep_size} ranks with {picks.num_local_experts} experts, top_k {picks.top_k}",
        )
    if picks.num_tokens == 0:
        return torch.zeros(picks.shape, dtype=torch.int64)
    within = torch.ones(picks.num_tokens, picks.num_local_experts)
    # Distinct within each rank, since a row takes distinct columns of one permutation on either.
    local = torch.multinomial(within, picks.top_k, generator=rng)
    remote = torch.rand(picks.shape, generator=rng) < EP8_REMOTE
    owner = torch.where(remote, 1 - picks.src_rank, picks.src_rank)
    return local + owner * picks.num_local_experts


_BY_NAME: dict[str, Routing] = {
    "uniform": uniform,
    "zipf": zipf,
    "warm-rank": warm_rank,
    "hot-expert": hot_expert,
    "hot-rank": hot_rank,
    "ep8-equivalent": ep8_equivalent,
}
ROUTING_NAMES = ("uniform", "zipf[:A]", "warm-rank", "hot-expert", "hot-rank", "ep8-equivalent")


def routing(name: str, *, also: tuple[str, ...] = ()) -> Routing:
    """The routing of that name. `also`: names that the caller takes besides, which the error lists too.

    Raises:
        ConfigError: an unknown name, or a Zipf exponent that is no number >= 0.
    """
    if name.startswith("zipf:"):
        try:
            exponent = float(name.removeprefix("zipf:"))
        except ValueError:
            exponent = -1.0
        if not 0 <= exponent < float("inf"):
            raise ConfigError("the Zipf exponent is not a number >= 0", got=repr(name), expected="zipf:1.2, say")
        return lambda picks, rng: zipf(picks, rng, exponent)
    if name not in _BY_NAME:
        raise ConfigError("unknown routing", got=repr(name), expected=" or ".join((*ROUTING_NAMES, *also)))
    return _BY_NAME[name]


def router_weights(num_tokens: int, top_k: int, rng: torch.Generator) -> Tensor:
    """Positive FP32 `[T, K]` weights that sum to 1 in each row, as a softmax over the picks would give."""
    return torch.randn(num_tokens, top_k, generator=rng).softmax(-1)

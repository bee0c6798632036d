"""How many rows an owner's experts receive, without random numbers: the counts at even quantiles of their distribution.

Tokens pick experts independently of each other, so an expert's rows are a sum of binomials. Expert i of n gets the
quantile (i + 1/2) / n of that distribution: the spread that a call has on average, and with it the padding and the
experts without rows. What it leaves out is how far one call's total strays from its mean, about 1 in sqrt(rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, lgamma, log, sqrt

from megamoe.problem import MoEProblem

TAIL_DEVIATIONS = 8.0  # standard deviations beyond which a distribution is cut off: 1e-15 of it
ORDER_STRIDE = 0.6180339887  # the golden section: neighbours in the expert order get unlike quantiles


@dataclass(frozen=True, kw_only=True)
class Source:
    """Tokens that pick an expert of the owner, each with the same probability."""

    num_tokens: int
    probability: float


def uniform_sources(problem: MoEProblem, num_tokens: int) -> tuple[Source, ...]:
    """`num_tokens` on every rank, each with `top_k` distinct experts, all equally likely."""
    picks = min(1.0, problem.top_k / problem.num_experts)
    return (Source(num_tokens=num_tokens * problem.ep_size, probability=picks),)


def two_rank_sources(problem: MoEProblem, num_tokens: int, remote_share: float) -> tuple[Source, ...]:
    """Two ranks that stand in for a larger group: a pick is on the other one with probability `remote_share`."""
    picks = problem.top_k / problem.num_local_experts
    return tuple(Source(num_tokens=num_tokens, probability=picks * share) for share in (1 - remote_share, remote_share))


def expected_rows(sources: Sequence[Source], num_local_experts: int) -> tuple[int, ...]:
    """Rows of each local expert."""
    first, masses = 0, [1.0]
    for source in sources:
        begin, binomial = _binomial(source)
        first, masses = first + begin, _convolve(masses, binomial)
    counts = _quantiles(first, masses, num_local_experts)
    order = sorted(range(num_local_experts), key=lambda expert: expert * ORDER_STRIDE % 1)
    rows = [0] * num_local_experts
    for expert, count in zip(order, counts, strict=True):
        rows[expert] = count
    return tuple(rows)


def _binomial(source: Source) -> tuple[int, list[float]]:
    """First value and masses of the number of picks."""
    n, p = source.num_tokens, source.probability
    if n == 0 or p <= 0:
        return 0, [1.0]
    if p >= 1:
        return n, [1.0]
    reach = TAIL_DEVIATIONS * sqrt(n * p * (1 - p)) + TAIL_DEVIATIONS
    begin, end = max(0, int(n * p - reach)), min(n, int(n * p + reach) + 1)
    masses = [
        exp(lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) + k * log(p) + (n - k) * log(1 - p))
        for k in range(begin, end + 1)
    ]
    return begin, masses


def _convolve(left: list[float], right: list[float]) -> list[float]:
    masses = [0.0] * (len(left) + len(right) - 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            masses[i + j] += a * b
    return masses


def _quantiles(first: int, masses: list[float], num: int) -> list[int]:
    """Values at (i + 1/2) / num, ascending."""
    values: list[int] = []
    total, scale = 0.0, sum(masses)
    for offset, mass in enumerate(masses):
        total += mass / scale
        while len(values) < num and (len(values) + 0.5) / num <= total:
            values.append(first + offset)
    values += [first + len(masses) - 1] * (num - len(values))  # rounding left the sum below 1
    return values

"""What the reference decides about a problem before it runs it."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.backend import KernelConfig, Plan
from megamoe.errors import ConfigError
from megamoe.problem import MoEProblem
from megamoe.schedule.protocol import ProtocolShape
from megamoe.schedule.tiles import round_up
from megamoe.stages.multiply import MAX_ROWS, ROW_TILE


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(KernelConfig):
    """How the reference cuts its work. Every configuration gives the same bits.

    Args:
        block_m: rows of a pool block.
        num_ctas: workers of a rank; at most that many threads are used.
        lag_blocks: GEMM2 trails GEMM1 by so many blocks; few, so that both read the weights of the same experts.
        ring_blocks: blocks of the ring; None for all that a usual call fills.
        rows_per_pull: rows that a dispatch worker pulls at a time.
        first_epoch: epoch of the first call.
    """

    block_m: int
    num_ctas: int = 4
    lag_blocks: int = 2
    ring_blocks: int | None = None
    rows_per_pull: int
    first_epoch: int = 1

    @classmethod
    def named(cls, name: str | None, problem: MoEProblem) -> ReferenceConfig:
        """The configuration called `name`; None is "default".

        "tight" has the smallest ring, small pulls and an epoch that soon wraps: it is there to test the protocol.

        Raises:
            ConfigError: no configuration has the name.
        """
        if name in (None, "default"):
            rows_of_an_expert = problem.ep_size * problem.num_max_tokens_per_rank  # without duplicates
            block_m = min(MAX_ROWS, round_up(rows_of_an_expert, ROW_TILE))
            return cls(name="default", block_m=block_m, rows_per_pull=block_m)
        if name == "tight":
            return cls(
                name="tight",
                block_m=ROW_TILE,
                num_ctas=3,
                lag_blocks=1,
                ring_blocks=2,
                rows_per_pull=5,
                first_epoch=2**32 - 3,
            )
        raise ConfigError("the reference has no such configuration", got=repr(name), expected="default or tight")


@dataclass(frozen=True, kw_only=True)
class ReferencePlan(Plan):
    """A plan of the reference, and the protocol that follows from it."""

    config: ReferenceConfig
    shape: ProtocolShape

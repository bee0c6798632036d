"""The reference backend: any problem, on any CPU."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from megamoe.backend import Backend, Capability, Plan, Reason, Verdict
from megamoe.formats import activation_format, weight_format
from megamoe.opening import ranks_of, wait_s
from megamoe.problem import ActFormat, MoEProblem, Transport
from megamoe.reference.opening import open_session
from megamoe.reference.plan import ReferenceConfig, ReferencePlan
from megamoe.reference.session import ReferenceSession
from megamoe.schedule.device_spec import CPU, DeviceSpec
from megamoe.schedule.protocol import ProtocolShape
from megamoe.schedule.waves import default_ring
from megamoe.schedule.workspace import ACTIVATION_ROWS, FP8_TRANSPORT_BLOCK, plan_workspace

MAX_PICKS = 2**31 - 1  # token * top_k + slot is an int32


class ReferenceBackend(Backend):
    """Runs every mode on CPU, through the protocol of the kernels, with the bits that docs/numerics.md promises."""

    name: ClassVar[str] = "reference"

    def probe(self) -> Verdict:
        """Always: torch on CPU is all it needs."""
        return Verdict.yes(f"torch {torch.__version__} on CPU")

    def capabilities(self) -> frozenset[Capability]:
        """Everything but graphs."""
        return frozenset(Capability) - {Capability.GRAPH_CAPTURE}

    def check_limits(self, problem: MoEProblem) -> Verdict:
        """Formats need whole blocks; picks are 32-bit numbers."""
        # Weights' blocks count too: those of a8w8 are whole, whatever its activations allow.
        granule = max(
            activation_format(problem.quant, problem.act_format).granule, weight_format(problem.quant).granule
        )
        for field in ("hidden_size", "intermediate_size"):
            size = getattr(problem, field)
            if size % granule:
                return Verdict.no(
                    Reason.SHAPE, f"mode {problem.quant} takes multiples of {granule} columns; {field} is {size}"
                )
        if problem.transport is Transport.FP8_BLOCKWISE_1X32 and problem.hidden_size % FP8_TRANSPORT_BLOCK:
            return Verdict.no(
                Reason.SHAPE,
                f"transport {problem.transport} has a scale per {FP8_TRANSPORT_BLOCK} columns: hidden_size "
                f"{problem.hidden_size} is not a multiple of it",
            )
        if problem.num_max_tokens_per_rank * problem.top_k > MAX_PICKS:
            return Verdict.no(Reason.CAPACITY, f"num_max_tokens_per_rank * top_k is above {MAX_PICKS}")
        return Verdict.yes()

    def configs(self, problem: MoEProblem) -> tuple[str, ...]:
        """See `ReferenceConfig.named`."""
        return ("default", "tight")

    def plan(
        self, problem: MoEProblem, device: DeviceSpec | None = None, *, config: str | None = None
    ) -> ReferencePlan:
        """See `Backend.plan`."""
        self.require(problem, device)
        chosen = ReferenceConfig.named(config, problem)
        ring = default_ring(
            ep_size=problem.ep_size,
            num_max_tokens_per_rank=problem.num_max_tokens_per_rank,
            top_k=problem.top_k,
            num_local_experts=problem.num_local_experts,
            block_m=chosen.block_m,
            lag_blocks=chosen.lag_blocks,
            ring_blocks=chosen.ring_blocks,
        )
        shape = ProtocolShape(
            ep_size=problem.ep_size,
            num_ctas=chosen.num_ctas,
            num_local_experts=problem.num_local_experts,
            top_k=problem.top_k,
            num_max_tokens_per_rank=problem.num_max_tokens_per_rank,
            block_m=ring.block_m,
            ring_blocks=ring.ring_blocks,
            lag_blocks=ring.lag_blocks,
            num_gemm1_tiles=1,
            num_gemm2_tiles=1,
            rows_per_pull=chosen.rows_per_pull,
            max_blocks=ring.max_blocks,
        )
        workspace = plan_workspace(
            hidden_size=problem.hidden_size,
            intermediate_size=problem.intermediate_size,
            num_local_experts=problem.num_local_experts,
            ep_size=problem.ep_size,
            num_max_tokens_per_rank=problem.num_max_tokens_per_rank,
            top_k=problem.top_k,
            activation=ACTIVATION_ROWS[_row_format(problem)],
            transport=problem.transport,
            rings=(ring,),
            num_ctas=chosen.num_ctas,
        )
        return ReferencePlan(
            backend=self.name, problem=problem, device=device or CPU, config=chosen, workspace=workspace, shape=shape
        )

    def open(
        self, plan: Plan, group: Any = None, *, timeout_s: float | None = None, workspace: Tensor | None = None
    ) -> ReferenceSession:
        """COLLECTIVE. See `Backend.open`.

        `group` may be None (ep_size 1), `VirtualRanks()`, a `megamoe.symm.Group` on CPU memory, or a process group of
        torch.distributed whose ranks are on one machine. `workspace` can be handed in where the session is the only
        one that uses it: with `group` None.
        """
        timeout_s = wait_s(timeout_s)
        ranks = ranks_of(group, plan, self.name, ReferenceConfig)
        return open_session(plan, group, ranks, timeout_s=timeout_s, workspace=workspace)


def _row_format(problem: MoEProblem) -> str:
    """Name of the mode's rows in `ACTIVATION_ROWS`."""
    if problem.act_format is ActFormat.FP8_1X128:
        return f"{problem.quant}:{problem.act_format}"
    return str(problem.quant)

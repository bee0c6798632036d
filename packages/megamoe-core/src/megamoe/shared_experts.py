"""Shared experts, which every token goes through beside its routed ones, computed in the same call.

    shared = SharedExperts(problem, num_fused_shared_experts=1, ep_rank=3)    # `problem`: the routed experts alone
    plan = backend.plan(shared.problem)
    with backend.open(plan, group) as session:
        weights = session.prepare(shared.join(routed_weights, shared_weights))
        y = session.forward(x, *shared.picks(topk_ids, topk_weights), weights)

The rule: a shared expert is one more local expert, a copy of it on every rank, and one more pick of every token, in the
last slots, with weight 1. So it is computed by the same launch, rounded where the mode rounds, and summed in FP32 with
the routed experts before the one rounding to BF16; its rows stay on their rank. That needs shared experts in the mode's
weight format and of the routed experts' intermediate size or a multiple of it, and picks for them beside the router's.
Where `fusible` says no, compute them after the call, by the model's own MLP, and add the result.

No backend knows of it: to a session they are experts like others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megamoe.backend import Backend, Reason, Verdict
from megamoe.errors import ConfigError, InputError
from megamoe.problem import MAX_TOP_K, MoEProblem
from megamoe.tensors import ExpertWeights, GateUpLayout

NO_EXPERT = -1


class SharedExperts:
    """The shared experts of one layer as one rank sees them. Its calls have fixed shapes and never synchronise.

    Args:
        problem: the routed experts, as they would be run without shared ones.
        num_fused_shared_experts: S, of the routed experts' intermediate size: one MLP of n times that size counts n.
        ep_rank: this rank.

    Attributes:
        problem: what to plan: E + S * R physical experts, top-(K + S).

    Raises:
        ConfigError: no such number, or more picks than a token can have.
    """

    def __init__(self, problem: MoEProblem, *, num_fused_shared_experts: int, ep_rank: int) -> None:
        if num_fused_shared_experts < 1 or problem.top_k + num_fused_shared_experts > MAX_TOP_K:
            raise ConfigError(
                "not a number of shared experts that fits beside the router's picks",
                got=f"{num_fused_shared_experts}, and top_k {problem.top_k}",
                expected=f"at least 1, and no more than {MAX_TOP_K} picks together",
                hint="compute them after the call",
            )
        if not 0 <= ep_rank < problem.ep_size:
            raise ConfigError("no such rank", got=ep_rank, expected=f"0 to {problem.ep_size - 1}")
        self.routed = problem
        self.num_fused_shared_experts = num_fused_shared_experts
        self.ep_rank = ep_rank
        self.problem = replace(
            problem,
            num_experts=problem.num_experts + num_fused_shared_experts * problem.ep_size,
            top_k=problem.top_k + num_fused_shared_experts,
        )

    def join(self, routed: ExpertWeights, shared: ExpertWeights) -> ExpertWeights:
        """One rank's weights for the session: its routed experts, then a copy of every shared one.

        Args:
            routed: `[E_local, ...]`, as for a session without shared experts.
            shared: `[S, ...]`, the same on every rank. Or one MLP `[1, ...]` of S times the intermediate size, gate
                rows first: it is cut into S experts, which add up to it.

        Raises:
            InputError: shared experts of another format, layout or size.
        """
        if type(shared) is not type(routed):
            raise InputError(
                "shared experts in another format", got=type(shared).__name__, expected=type(routed).__name__,
                hint="convert them (megamoe.checkpoint.convert), or compute them after the call",
            )  # fmt: skip
        theirs, ours = dict(routed.tensors()), self._cut(shared)
        joined: dict[str, Any] = {}
        for name, tensor in theirs.items():
            own = ours.get(name)
            expected = (self.num_fused_shared_experts, *tensor.shape[1:])
            if own is None or tuple(own.shape) != expected or shared.layout != routed.layout:
                raise InputError(
                    f"shared experts do not fit the routed ones in {name}",
                    got="missing" if own is None else f"{tuple(own.shape)}, {shared.layout}",
                    expected=f"{expected}, {routed.layout}",
                    hint="compute them after the call",
                )
            joined[name] = torch.cat((tensor.view(torch.uint8), own.view(torch.uint8))).view(tensor.dtype)
        return replace(routed, **joined)

    def _cut(self, shared: ExpertWeights) -> dict[str, Tensor]:
        """Tensors of shared experts, one MLP of S times the size cut into S."""
        tensors, parts = dict(shared.tensors()), self.num_fused_shared_experts
        w2 = tensors["w2_weight"]
        wide = w2.shape[0] == 1 and parts > 1 and shared.layout is GateUpLayout.PACKED
        if not wide or tensors["w13_weight"].shape[1] != 2 * parts * self.routed.intermediate_size:
            return tensors
        rows: dict[str, Callable[[Tensor], Tensor]] = {
            # Rows of w13 and columns of w2 are channels of the activation, as are those of their scales.
            "w13": lambda x: x.reshape(2, parts, -1, *x.shape[2:]).transpose(0, 1).flatten(1, 2),
            "w2": lambda x: x.reshape(*x.shape[1:-1], parts, -1).movedim(-2, 0),
        }
        cut = {
            name: rows[name.split("_")[0]](tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor)
            .contiguous().view(tensor.dtype)
            for name, tensor in tensors.items()
            if name != "w2_bias"
        }  # fmt: skip
        if (bias := tensors.get("w2_bias")) is not None:  # added once: by the first of the parts
            cut["w2_bias"] = torch.cat((bias, bias.new_zeros(parts - 1, *bias.shape[1:])))
        return cut

    def picks(self, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        """Stream-ordered, graph-safe. What this rank's `forward` is given for the router's picks.

        Args:
            topk_ids: `[T, K]` int32 or int64, global physical ids of routed experts; -1 means no expert.
            topk_weights: `[T, K]` FP32.

        Returns:
            ids `[T, K + S]` of the same dtype and weights `[T, K + S]`. Ids are those of `problem`; one outside of
            [-1, E) stays outside. A row whose ids are all -1 is padding and goes through no shared expert either.
        """
        num_tokens, routed, shared = topk_ids.shape[0], self.routed, self.num_fused_shared_experts
        known = (topk_ids >= 0) & (topk_ids < routed.num_experts)
        # Rank r's experts begin r * S later than without shared ones.
        ids = torch.where(known, topk_ids + topk_ids // routed.num_local_experts * shared, topk_ids)
        beyond = topk_ids >= routed.num_experts
        ids = torch.where(beyond, topk_ids + shared * routed.ep_size, ids).to(topk_ids.dtype)
        first = self.problem.first_expert(self.ep_rank) + routed.num_local_experts
        own = torch.arange(first, first + shared, device=topk_ids.device, dtype=topk_ids.dtype).expand(num_tokens, -1)
        padding = (topk_ids == NO_EXPERT).all(1, keepdim=True)
        own = torch.where(padding, NO_EXPERT, own).to(topk_ids.dtype)
        return torch.cat((ids, own), 1), torch.cat((topk_weights, topk_weights.new_ones(num_tokens, shared)), 1)

    def routed_counts(self, receive_counts: Tensor) -> Tensor:
        """`[E_local]` of what `Session.receive_counts()` gives, `[E_local + S]`: the rows that a load balancer counts.

        A shared expert's rows are this rank's own tokens: no placement of experts changes them.
        """
        return receive_counts[: self.routed.num_local_experts]


def fusible(backend: Backend, problem: MoEProblem, num_fused_shared_experts: int) -> Verdict:
    """Whether `backend` can run shared experts in the call of the routed ones. Pure.

    Args:
        backend: that would run it.
        problem: the routed experts.
        num_fused_shared_experts: see `SharedExperts`.
    """
    try:
        shared = SharedExperts(problem, num_fused_shared_experts=num_fused_shared_experts, ep_rank=0)
    except ConfigError as error:
        return Verdict.no(Reason.TOP_K, str(error))
    return backend.supports(shared.problem)

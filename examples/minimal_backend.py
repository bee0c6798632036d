"""A backend of one's own: BF16 experts in plain PyTorch on a CPU; one session plays all ranks.

docs/adding-a-backend.md walks through it. It passes what it claims; in this folder:

    python -m pytest -p megamoe.testing.plugin --pyargs megamoe.testing.conformance --device=cpu \\
        --backend=minimal_backend:MinimalBackend

In a package of its own, with the entry point `minimal = "minimal_backend:MinimalBackend"` of the group
`megamoe.backends`, it is found by its name, here and by `select_backend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import silu

from megamoe import Backend, DeviceSpec, MoEProblem, Plan, PreparedWeights, Session, VirtualRanks, env
from megamoe.backend import Capability, KernelConfig, Reason, SessionStats, Verdict
from megamoe.call_checks import by_rank, check_call, of_each, require_ids, require_own_memory, valid_rows
from megamoe.errors import ConfigError
from megamoe.opening import ranks_of, wait_s
from megamoe.schedule.device_spec import CPU
from megamoe.schedule.waves import default_ring
from megamoe.schedule.workspace import ACTIVATION_ROWS, plan_workspace
from megamoe.tensors import Bf16Weights, ExpertWeights, GateUpLayout, require_prepared

HOST = torch.device("cpu")


class MinimalBackend(Backend):
    """What can be decided without running anything."""

    name: ClassVar[str] = "minimal"

    def probe(self) -> Verdict:
        return Verdict.yes("torch on CPU")

    def capabilities(self) -> frozenset[Capability]:
        formats = {
            Capability.QUANT_BF16,
            Capability.TRANSPORT_BF16,
            Capability.ACTIVATION_SWIGLU,
            Capability.INPUT_BF16,
        }
        return frozenset(formats | {Capability.NUM_TOKENS, Capability.RECEIVE_COUNTS, Capability.VIRTUAL_RANKS})

    def check_limits(self, problem: MoEProblem) -> Verdict:
        if problem.ep_size > 8:
            return Verdict.no(Reason.EP_SIZE, f"ep_size = {problem.ep_size} exceeds 8")
        return Verdict.yes()

    def plan(self, problem: MoEProblem, device: DeviceSpec | None = None, *, config: str | None = None) -> Plan:
        self.require(problem, device)
        if config not in (None, "plain"):
            raise ConfigError("unknown configuration", got=repr(config), expected="plain")
        sizes = {
            "ep_size": problem.ep_size,
            "num_max_tokens_per_rank": problem.num_max_tokens_per_rank,
            "top_k": problem.top_k,
            "num_local_experts": problem.num_local_experts,
        }
        workspace = plan_workspace(
            **sizes,
            hidden_size=problem.hidden_size,
            intermediate_size=problem.intermediate_size,
            activation=ACTIVATION_ROWS["bf16"],
            transport=problem.transport,
            rings=(default_ring(**sizes, block_m=16, lag_blocks=1, ring_blocks=None),),
            num_ctas=1,
        )
        return Plan(
            backend=self.name,
            problem=problem,
            device=device or CPU,
            config=KernelConfig(name="plain"),
            workspace=workspace,
        )

    def open(
        self, plan: Plan, group: Any = None, *, timeout_s: float | None = None, workspace: Tensor | None = None
    ) -> Session:
        wait_s(timeout_s)  # this backend never waits, but what is no time is refused
        if ranks_of(group, plan, self.name, KernelConfig) is not None or workspace is not None:
            raise ConfigError("minimal takes no group and no workspace", hint="pass VirtualRanks()")
        return MinimalSession(plan, None if isinstance(group, VirtualRanks) else 0)


class MinimalSession(Session):
    """One call after the other; nothing is left behind but counters."""

    weight_layout: ClassVar[str] = "minimal-v1"

    def __init__(self, plan: Plan, ep_rank: int | None) -> None:
        super().__init__(plan, ep_rank)
        self._stats = [SessionStats() for _ in range(plan.problem.ep_size)]
        self._counts = torch.zeros(plan.problem.num_experts, dtype=torch.int32)

    def _prepare(self, weights: ExpertWeights) -> PreparedWeights:
        assert isinstance(weights, Bf16Weights)
        w13 = weights.w13_weight
        if weights.layout is GateUpLayout.INTERLEAVED:
            w13 = torch.cat((w13[:, 0::2], w13[:, 1::2]), 1)
        tensors = {"w13": w13.clone(), "w2": weights.w2_weight.clone()}
        return PreparedWeights.of(
            self.plan.problem, backend=self.plan.backend, layout=self.weight_layout, tensors=tensors
        )

    def _forward(self, arguments: Sequence[Any]) -> Any:
        self.require_open()
        calls = by_rank(arguments, self.plan.problem.ep_size) if self.ep_rank is None else [arguments]
        valid = of_each(self._checked, calls, virtual=self.ep_rank is None)
        prepared = [call[3] for call in calls]
        self._counts = torch.zeros_like(self._counts)  # a new one: the last may be of inference mode
        outputs = [
            self._run(x[:rows], ids[:rows], router[:rows], prepared, self._stats[rank], len(x))
            for rank, ((x, ids, router, *_), rows) in enumerate(zip(calls, valid, strict=True))
        ]
        given = [y if call[4] is None else call[4].copy_(y) for y, call in zip(outputs, calls, strict=True)]
        return self._per_rank(given)

    def _checked(self, _: int, x: Any, ids: Any, router: Any, weights: Any, out: Any, num_tokens: Any) -> int:
        """Rows that are no padding. Nothing is computed before every rank's arguments are right."""
        problem = self.plan.problem
        rows = check_call(problem, x, ids, router, out, device=HOST)
        require_prepared(weights, backend=self.plan.backend, layout=self.weight_layout, problem=problem, device=HOST)
        valid = rows if num_tokens is None else max(0, min(rows, int(valid_rows(num_tokens, rows, HOST))))
        if out is not None:
            require_own_memory(out, x, ids, router, weights, num_tokens)
        if env.debug():
            require_ids(ids[:valid], problem.num_experts)
        return valid

    def _run(
        self,
        x: Tensor,
        ids: Tensor,
        router: Tensor,
        prepared: list[PreparedWeights],
        stats: SessionStats,
        num_rows: int,
    ) -> Tensor:
        """One rank's tokens through everybody's experts, rounded where docs/numerics.md says."""
        problem = self.plan.problem
        stats.calls += 1
        stats.dropped_ids += int(((ids < -1) | (ids >= problem.num_experts)).sum())
        rows = torch.zeros(len(x), problem.top_k, problem.hidden_size)
        for expert in range(problem.num_experts):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            if len(token):
                self._counts[expert] += len(token)
                owner, index = divmod(expert, problem.num_local_experts)
                w13, w2 = (prepared[owner].tensors[name][index].float() for name in ("w13", "w2"))
                gate, up = (x[token].float() @ w13.T).chunk(2, 1)
                if problem.swiglu_limit is not None:
                    gate, up = (
                        gate.clamp(max=problem.swiglu_limit),
                        up.clamp(-problem.swiglu_limit, problem.swiglu_limit),
                    )
                activated = (silu(gate) * up).bfloat16().float()
                rows[token, slot] = (activated @ w2.T * router[token, slot, None]).bfloat16().float()
        y = torch.zeros(num_rows, problem.hidden_size)
        for k in range(problem.top_k):  # in slot order
            y[: len(x)] += rows[:, k]
        return y.bfloat16()

    def receive_counts(self) -> Any:
        self.require_open()
        return self._per_rank(list(self._counts.view(self.plan.problem.ep_size, -1).clone()))

    def stats(self) -> Any:
        self.require_open()
        return self._per_rank(self._stats)

    def _per_rank(self, values: list[Any]) -> Any:
        return values if self.ep_rank is None else values[0]

    def warmup(self) -> float:
        self.require_open()
        return 0.0

    def check(self) -> None:
        self.require_open()

    def reset(self) -> None:
        self.require_open()

    def close(self) -> None:
        self.closed = True

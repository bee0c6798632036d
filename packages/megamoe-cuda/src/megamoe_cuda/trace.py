"""The kernel's time stamps of one call, for `megamoe trace`.

Stamps are nanoseconds of %globaltimer, one thread per CTA and point: `started`, `routed` and `planned` by its first
thread, `pulled` by its first dispatch warp, the others by its first math warp. Kernels that are not compiled with
`trace` hold none of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megamoe.bench.trace import Span, Trace, concatenated
from megamoe.errors import BackendUnavailableError
from megamoe.launch import RankContext, run_ranks
from megamoe.problem import MoEProblem
from megamoe_cuda.backend import CudaBackend
from megamoe_cuda.bench.inputs import make_experts, make_inputs
from megamoe_cuda.bench.timing import FLUSH_BYTES
from megamoe_cuda.launcher import TRACE_POINTS
from megamoe_cuda.session import CudaSession

TIME_LIMIT_S = 900.0
WARMUP_CALLS = 3

SPANS = (
    Span(role="all", name="stage and route", begin="started", end="routed"),
    Span(role="all", name="await counts and plan", begin="routed", end="planned"),
    Span(role="dispatch", name="pull", begin="planned", end="pulled"),
    Span(role="math", name="multiply", begin="planned", end="multiplied"),
    Span(role="math", name="await all ranks", begin="multiplied", end="finished"),
    Span(role="math", name="combine", begin="finished", end="combined"),
)


@dataclass(frozen=True, kw_only=True)
class TracedCall:
    """What to trace.

    Args:
        problem: the layer; `ep_size` GPUs take part.
        num_tokens: on each rank.
        routing: a name of `megamoe.bench.routing`.
        config: a configuration by name, or None.
    """

    problem: MoEProblem
    num_tokens: int
    routing: str
    config: str | None = None

    @property
    def title(self) -> str:
        """One line."""
        problem = self.problem
        return (
            f"{self.num_tokens} tokens per rank, EP{problem.ep_size}, {self.routing} routing, {problem.quant}, "
            f"{problem.transport} transport, H={problem.hidden_size} I={problem.intermediate_size} "
            f"E={problem.num_experts} top-{problem.top_k}"
        )


def trace_of(title: str, session: CudaSession) -> Trace:
    """The last call of a session that keeps a trace. Synchronises."""
    return Trace(title=title, points=TRACE_POINTS, spans=SPANS, stamps_ns=session.stamps_ns())


def trace_call(call: TracedCall) -> Trace:
    """Run the call on this machine's GPUs, one process each, and return the stamps of its last repeat.

    Raises:
        BackendUnavailableError: fewer GPUs than ranks.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus < call.problem.ep_size:
        raise BackendUnavailableError("not enough GPUs for a trace", got=num_gpus, expected=call.problem.ep_size)
    traces = run_ranks(trace_rank, call.problem.ep_size, call, timeout_s=TIME_LIMIT_S)
    return concatenated(call.title, traces)


def trace_rank(context: RankContext, call: TracedCall) -> Trace:
    """COLLECTIVE. Body of a rank's process, on its GPU: warm up, then one call with a cold L2 cache."""
    context.join_gpus(context.gpu)
    try:
        return _traced(context.rank, call)
    finally:
        dist.destroy_process_group()


def _traced(rank: int, call: TracedCall) -> Trace:
    backend, problem = CudaBackend(), call.problem
    inputs = make_inputs(problem, num_tokens=call.num_tokens, routing_name=call.routing, rank=rank, seed=0)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    group = dist.group.WORLD if problem.ep_size > 1 else None
    with backend.open(backend.plan(problem, config=call.config), group) as session:
        assert isinstance(session, CudaSession)
        weights = session.prepare(make_experts(problem, rank))
        session.keep_trace()
        session.warmup()
        for _ in range(WARMUP_CALLS + 1):
            flush.zero_()
            dist.all_reduce(torch.zeros(1, device="cuda"))  # all ranks start together
            session.forward((inputs.payload, inputs.scales), inputs.topk_ids, inputs.topk_weights, weights)
        session.check()
        return trace_of(call.title, session)

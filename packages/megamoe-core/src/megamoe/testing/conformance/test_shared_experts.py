"""Shared experts as further local experts (`megamoe.shared_experts`), and metering (`megamoe.meter`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megamoe.backend import Capability
from megamoe.meter import Meter, Metrics
from megamoe.reference.oracle import oracle
from megamoe.shared_experts import SharedExperts, fusible
from megamoe.tensors import ExpertWeights
from megamoe.testing.cases import TRANSPORTS, Case, Mode
from megamoe.testing.checks import check_oracle, check_same_bits, check_staged
from megamoe.testing.data import Call, make_weights, shard
from megamoe.testing.workbench import Workbench, with_capacity, with_ep_size

pytestmark = pytest.mark.edge

SEED = 17  # of the shared experts' weights


def fused_on_every_rank(case: Case, count: int) -> list[SharedExperts]:
    return [
        SharedExperts(case.problem, num_fused_shared_experts=count, ep_rank=rank)
        for rank in range(case.problem.ep_size)
    ]


def shared_weights(workbench: Workbench, case: Case, count: int) -> ExpertWeights:
    return make_weights(replace(case.problem, num_experts=count, ep_size=1), workbench.device, seed=SEED)


def with_shared(fused: list[SharedExperts], calls: list[Call]) -> list[Call]:
    extended = []
    for one, call in zip(fused, calls, strict=True):
        ids, weights = one.picks(call.topk_ids, call.topk_weights)
        extended.append(replace(call, topk_ids=ids, topk_weights=weights))
    return extended


def exact(workbench: Workbench, case: Case, calls: list[Call], count: int) -> list[Tensor]:
    """The routed experts' oracle, and each shared expert's for every row that is no padding, added."""
    shared = shared_weights(workbench, case, count)
    alone = replace(case.problem, num_experts=count, ep_size=1, top_k=count)
    outputs = workbench.oracle(case.problem, workbench.weights(case), calls)
    for y, call in zip(outputs, calls, strict=True):
        ids = torch.arange(count, device=y.device).expand(call.num_rows, -1).clone()
        ids[(call.topk_ids == -1).all(1)] = -1
        y += oracle(alone, call.bf16, ids, torch.ones(ids.shape, device=y.device), [shared])
    return outputs


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("count", [1, 2])
def test_shared_experts_in_the_call(workbench: Workbench, mode: Mode, transport: str, count: int) -> None:
    """Within the mode's gates of the sum, and the staged reference's values; masked rows stay zero."""
    case = workbench.case(mode, ep_size=4, transport=transport, routing="masked_rows", top_k=3)
    fused = fused_on_every_rank(case, count)
    workbench.require(fused[0].problem)
    assert fusible(workbench.backend, case.problem, count).ok
    calls = workbench.calls(case)
    shared = shared_weights(workbench, case, count)
    shares = [one.join(share, shared) for one, share in zip(fused, workbench.shards(case), strict=True)]
    extended = with_shared(fused, calls)
    with workbench.open(fused[0].problem) as session:
        outputs = session.forward(extended, session.prepare(shares))
        counts = session.receive_counts() if Capability.RECEIVE_COUNTS in workbench.backend.capabilities() else None
    check_oracle(fused[0].problem, outputs, exact(workbench, case, calls, count))
    whole = replace(shares[0], **{n: torch.cat([dict(s.tensors())[n] for s in shares]) for n, _ in shares[0].tensors()})
    check_staged(fused[0].problem, outputs, workbench.staged(fused[0].problem, whole, extended).outputs)
    for rank, call in enumerate(calls):
        padding = (call.topk_ids == -1).all(1).cpu()  # where the outputs of ranks in processes of their own are
        assert not outputs[rank][padding].any(), f"rank {rank}: a padding row went through a shared expert"
        if counts is not None:
            own = counts[rank].tolist()
            assert own[case.problem.num_local_experts :] == [int((~padding).sum())] * count
            assert fused[rank].routed_counts(counts[rank]).tolist() == own[: case.problem.num_local_experts]


def test_bits_of_shared_experts_do_not_depend_on_the_ranks(workbench: Workbench, mode: Mode) -> None:
    """One token's row is the same on another EP size: its shared expert is its own rank's copy."""
    workbench.require_capability(Capability.BATCH_INVARIANT)
    case = workbench.case(mode, ep_size=2, top_k=3)
    outputs = []
    for ep_size in sorted({1, case.problem.ep_size}):
        calls = workbench.calls(case)[:1] + [call.rows(slice(0, 0)) for call in workbench.calls(case)[1:ep_size]]
        problem = with_ep_size(with_capacity(case.problem, calls[0].num_rows), ep_size)
        fused = [SharedExperts(problem, num_fused_shared_experts=1, ep_rank=rank) for rank in range(ep_size)]
        workbench.require(fused[0].problem)
        shared = shared_weights(workbench, case, 1)
        shares = shard(workbench.weights(case), ep_size)
        with workbench.open(fused[0].problem) as session:
            weights = session.prepare([one.join(share, shared) for one, share in zip(fused, shares, strict=True)])
            outputs.append(session.forward(with_shared(fused, calls), weights)[0])
    check_same_bits(outputs[:1], outputs[-1:], "between EP sizes")


def test_a_meter_counts_calls_rows_and_dropped_ids(workbench: Workbench) -> None:
    """In one process; what a session of several processes counts is the same code."""
    workbench.require_capability(Capability.RECEIVE_COUNTS)
    case = workbench.any_case(routing="out_of_range")
    (call,) = workbench.calls(case)
    published: list[list[Metrics]] = []
    with workbench.backend.open(workbench.plan(case.problem)) as session:
        weights = session.prepare(workbench.shards(case)[0])
        meter = Meter(session, published.append, every=3)
        for _ in range(4):
            session.forward(call.bf16, call.topk_ids, call.topk_weights, weights)
            meter.count()
        (after,) = meter.collect()
        (nothing,) = meter.collect()
    known = (call.topk_ids >= 0) & (call.topk_ids < case.problem.num_experts)
    rows = torch.bincount(call.topk_ids[known].cpu(), minlength=case.problem.num_experts)
    dropped = int(((call.topk_ids < -1) | (call.topk_ids >= case.problem.num_experts)).sum())
    ((first,),) = published
    for metrics, calls in ((first, 3), (after, 1), (nothing, 0)):
        assert (metrics.ep_rank, metrics.calls, metrics.timeouts) == (0, calls, 0)
        assert metrics.rows_per_expert.tolist() == (calls * rows).tolist()
        assert metrics.dropped_ids == calls * dropped
    assert first.imbalance >= 1
    assert nothing.imbalance == 0

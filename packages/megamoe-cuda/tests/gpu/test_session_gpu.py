"""What only a GPU shows of the host side: cost of a call, epochs that wrap, SMs left free, workspaces handed in.

Run with the matrix: `pytest -p claim packages/megamoe-cuda/tests/gpu` on a machine with a Hopper GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe.backend import VirtualRanks
from megamoe.errors import MegaMoETimeoutError, ProtocolError, RankFailedError, SessionError, WorkspaceError
from megamoe.problem import MoEProblem
from megamoe.reference.oracle import oracle
from megamoe.reference.staged import staged
from megamoe.schedule.device_spec import H200
from megamoe.symm import PeerMemory
from megamoe.tensors import ExpertWeights
from megamoe.testing.data import make_weights, shard, with_tensors
from megamoe.testing.tolerances import rel_l2
from megamoe_cuda import backend as cuda_backend
from megamoe_cuda.backend import CudaBackend
from megamoe_cuda.session import CudaSession

pytestmark = pytest.mark.gpu

PROBLEM = MoEProblem(
    hidden_size=1024, intermediate_size=512, num_experts=16, top_k=4, num_max_tokens_per_rank=256, ep_size=2
)
SINGLE = replace(PROBLEM, ep_size=1, num_experts=8)
BACKEND = CudaBackend()
HOST_BUDGET_S = 25e-6  # of one forward
UNFUSED_BOUND = 0.08  # three roundings in quadrature: 0.068


@pytest.fixture(autouse=True)
def claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "SEEN_RIGHT_ON", "under test")
    verdict = BACKEND.probe()
    assert verdict.ok, verdict


def make_call(problem: MoEProblem, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, problem.hidden_size, generator=rng).bfloat16()
    ids = torch.rand(num_tokens, problem.num_experts, generator=rng).argsort(-1)[:, : problem.top_k].contiguous()
    return hidden.cuda(), ids.cuda(), torch.rand(num_tokens, problem.top_k, generator=rng).cuda()


def experts(problem: MoEProblem) -> list[ExpertWeights]:
    return shard(make_weights(problem, torch.device("cuda")), problem.ep_size)


def on_cpu(weights: ExpertWeights) -> ExpertWeights:
    return with_tensors(weights, {name: tensor.cpu() for name, tensor in weights.tensors()})


def call_all(session: Any, problem: MoEProblem, weights: list[Any], num_tokens: int, seed: int = 0) -> torch.Tensor:
    calls = [make_call(problem, num_tokens, seed + rank) for rank in range(problem.ep_size)]
    hidden, ids, router = (list(part) for part in zip(*calls, strict=True))
    return torch.cat(session.forward(hidden, ids, router, weights))


def open_virtual(problem: MoEProblem, **options: Any) -> Any:
    return BACKEND.open(BACKEND.plan(problem, options.pop("device", None)), VirtualRanks(), **options)


def test_result_is_the_staged_references() -> None:
    with open_virtual(PROBLEM) as session:
        weights = [session.prepare(share) for share in experts(PROBLEM)]
        got = call_all(session, PROBLEM, weights, 100)
    calls = [make_call(PROBLEM, 100, rank) for rank in range(2)]
    hidden, ids, router = ([x.cpu() for x in part] for part in zip(*calls, strict=True))
    shares = [on_cpu(share) for share in experts(PROBLEM)]
    expected = torch.cat(staged(PROBLEM, hidden, ids, router, shares).outputs)
    assert rel_l2(got.cpu().float(), expected.float()) < 0.01


@pytest.mark.parametrize("epoch", [2**31 - 3, 2**32 - 3])
def test_epochs_survive_the_wrap(epoch: int) -> None:
    with open_virtual(PROBLEM) as session:
        weights = [session.prepare(share) for share in experts(PROBLEM)]
        expected = call_all(session, PROBLEM, weights, 64)
        session.start_epochs(epoch)
        for _ in range(8):
            assert torch.equal(call_all(session, PROBLEM, weights, 64), expected)


def test_sms_can_be_left_free() -> None:
    """With 32 SMs free, a kernel that holds one of them does not delay the layer; the bits stay."""
    with open_virtual(PROBLEM) as session, open_virtual(PROBLEM, device=replace(H200, num_sms=100)) as fewer:
        weights = [session.prepare(share) for share in experts(PROBLEM)]
        expected = call_all(session, PROBLEM, weights, 200)
        assert torch.equal(call_all(fewer, PROBLEM, weights, 200), expected)
        torch.cuda.synchronize()
        side, done = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000_000)  # about a second on one SM
        started = time.perf_counter()
        assert torch.equal(call_all(fewer, PROBLEM, weights, 200), expected)
        done.record()
        done.synchronize()
        assert time.perf_counter() - started < 0.5, "the layer waited for the other kernel"
        torch.cuda.synchronize()


def test_more_tokens_than_a_cta_lists() -> None:
    """With one SM a rank, combine looks up the slots of its last tokens one by one; the bits stay."""
    problem = replace(PROBLEM, num_max_tokens_per_rank=5000)
    with open_virtual(problem) as session, open_virtual(problem, device=replace(H200, num_sms=2)) as narrow:
        weights = [session.prepare(share) for share in experts(problem)]
        assert torch.equal(call_all(narrow, problem, weights, 5000), call_all(session, problem, weights, 5000))


def test_a_side_stream_that_holds_an_sm_delays_but_does_not_hang() -> None:
    with open_virtual(PROBLEM) as session:
        weights = [session.prepare(share) for share in experts(PROBLEM)]
        expected = call_all(session, PROBLEM, weights, 64)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(200_000_000)
        assert torch.equal(call_all(session, PROBLEM, weights, 64), expected)


def test_the_host_pays_little_for_a_call() -> None:
    with BACKEND.open(BACKEND.plan(SINGLE)) as session:
        (share,) = experts(SINGLE)
        weights = session.prepare(share)
        hidden, ids, router = make_call(SINGLE, 8, 0)
        out = torch.empty_like(hidden)
        session.warmup()
        times = []
        for index in range(400):
            started = time.perf_counter()
            session.forward(hidden, ids, router, weights, out=out)
            times.append(time.perf_counter() - started)
            if index % 50 == 49:
                torch.cuda.synchronize()  # a full launch queue would block the host
        print(f"host: median {median(times) * 1e6:.1f} us, minimum {min(times) * 1e6:.1f} us")
        assert median(times) < HOST_BUDGET_S


def test_calls_of_two_threads_do_not_mix() -> None:
    """The driver reads a launch's arguments without the GIL; another thread's call must not be in them then."""
    with BACKEND.open(BACKEND.plan(SINGLE)) as session:
        (share,) = experts(SINGLE)
        weights = session.prepare(share)
        calls = [make_call(SINGLE, num_tokens, num_tokens) for num_tokens in (8, 64)]
        expected = [session.forward(*call, weights) for call in calls]
        torch.cuda.synchronize()
        right = [0, 0]

        def body(index: int) -> None:
            made = 0
            while made < 200:
                with suppress(SessionError):  # the other is in a call
                    right[index] += torch.equal(session.forward(*calls[index], weights), expected[index])
                    made += 1

        threads = [Thread(target=body, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert right == [200, 200]
        session.check()


def test_a_thread_that_has_not_used_cuda_may_load_and_launch() -> None:
    """Neither a session's first call there nor a later one finds a current context."""
    with BACKEND.open(BACKEND.plan(SINGLE)) as session:
        (share,) = experts(SINGLE)
        weights = session.prepare(share)
        call, out = make_call(SINGLE, 8, 0), torch.empty(2, 8, SINGLE.hidden_size, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        for index in range(2):
            thread = Thread(target=session.forward, args=(*call, weights), kwargs={"out": out[index]})
            thread.start()
            thread.join()
        assert torch.equal(out[0], out[1])
        assert torch.equal(out[0], session.forward(*call, weights))


def test_an_output_of_inference_mode_is_padded() -> None:
    with BACKEND.open(BACKEND.plan(SINGLE)) as session:
        (share,) = experts(SINGLE)
        weights = session.prepare(share)
        call = make_call(SINGLE, 8, 0)
        expected = session.forward(*call, weights, num_tokens=5)
        with torch.inference_mode():
            out = torch.full_like(call[0], 7)
        assert torch.equal(session.forward(*call, weights, out=out, num_tokens=5), expected)
        assert not expected[5:].any()


def test_a_workspace_can_be_handed_in() -> None:
    plan = BACKEND.plan(PROBLEM)
    guard = 4096
    buffer = torch.full((2 * plan.bytes + 2 * guard,), 0xA5, dtype=torch.uint8, device="cuda")
    workspace = buffer[guard : guard + 2 * plan.bytes]
    with BACKEND.open(plan, VirtualRanks(), workspace=workspace) as session:
        weights = [session.prepare(share) for share in experts(PROBLEM)]
        given = call_all(session, PROBLEM, weights, 100)
        session.check()
    with open_virtual(PROBLEM) as session:
        assert torch.equal(call_all(session, PROBLEM, weights, 100), given)
    assert (buffer[:guard] == 0xA5).all()
    assert (buffer[-guard:] == 0xA5).all()
    with pytest.raises(WorkspaceError, match="too small"):
        BACKEND.open(plan, VirtualRanks(), workspace=workspace[:-1024])


def test_opened_in_inference_mode_and_under_another_default_device() -> None:
    with torch.inference_mode(), torch.device("meta"):
        session = open_virtual(PROBLEM)
    with session:
        shares = experts(PROBLEM)
        with torch.inference_mode():
            weights = [session.prepare(share) for share in shares]
            expected = call_all(session, PROBLEM, weights, 64)
        session.reset()
        for tensor in weights[0].tensors.values():
            tensor[0].copy_(tensor[0].clone())
        assert torch.equal(call_all(session, PROBLEM, weights, 64), expected)


def test_out_of_memory_is_a_typed_error() -> None:
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(int(free * 0.95), dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(WorkspaceError, match="out of GPU memory"):
            open_virtual(replace(PROBLEM, num_max_tokens_per_rank=1 << 20, hidden_size=8192))
    finally:
        del hog
        torch.cuda.empty_cache()


def test_cold_start_is_reported_and_the_cache_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    seconds = []
    for _ in range(2):
        with open_virtual(PROBLEM) as session:
            seconds.append(session.warmup())
    print(f"cold start {seconds[0]:.2f} s, from the cache {seconds[1]:.3f} s")
    assert 0 < seconds[1] < seconds[0] / 2


@contextmanager
def ranks_apart(problem: MoEProblem, *timeouts_s: float) -> Iterator[tuple[CudaSession, list[CudaSession]]]:
    """A session of virtual ranks, and one per entry of `timeouts_s` that drives that rank alone in the same memory."""
    device = torch.device("cuda", torch.cuda.current_device())
    with open_virtual(problem) as whole:
        assert isinstance(whole, CudaSession)
        alone = []
        for rank, timeout_s in enumerate(timeouts_s):
            group: Any = SimpleNamespace(rank=rank, barrier=lambda **_: None, if_a_rank_died=None)
            session = CudaSession(
                BACKEND.plan(problem),
                group=group,
                virtual=False,
                device=device,
                timeout_s=timeout_s,
                allocate=lambda num_bytes: PeerMemory(ranks=whole._memory.ranks, release=lambda: None),
            )
            session.start()
            session.warmup()
            alone.append(session)
        yield whole, alone


WIDE = replace(PROBLEM, num_max_tokens_per_rank=1024)  # more picks than one CTA routes


@pytest.mark.parametrize("num_tokens", [64, 1000])
def test_launches_behind_a_timed_out_call_leave_all_memory_alone(num_tokens: int) -> None:
    """Calls and graph replays that were queued before the host could know: they push nothing under the peer, who may
    only be late and still work on that call. After a reset all is as before."""
    with ranks_apart(WIDE, 0.5) as (whole, (alone,)):
        weights = [whole.prepare(share) for share in experts(WIDE)]
        expected = call_all(whole, WIDE, weights, num_tokens)
        whole.reset()
        hidden, ids, router = make_call(WIDE, num_tokens, 0)
        skewed = ids % (WIDE.num_experts // 2) + WIDE.num_experts // 2  # all picks are the peer's
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = alone.forward(hidden, skewed, router, weights[0])
        outputs = [alone.forward(hidden, ids, router, weights[0])]
        memory = [rank.clone() for rank in whole._memory.ranks]  # as the failed call leaves it
        outputs += [alone.forward(hidden, skewed, router, weights[0]) for _ in range(20)]
        for _ in range(20):
            graph.replay()
        with pytest.raises(MegaMoETimeoutError, match=r"got 0; expected 1"):
            alone.check()
        assert all(out.isnan().all() for out in [*outputs, replayed])
        for rank, (now, then) in enumerate(zip(whole._memory.ranks, memory, strict=True)):
            assert torch.equal(now, then), f"rank {rank}'s memory changed"
        alone.reset()
        whole.reset()
        assert torch.equal(call_all(whole, WIDE, weights, num_tokens), expected)
        whole.check()
        del graph


def test_a_rank_that_gave_up_tells_its_peers() -> None:
    """The late rank does not sit out its own time-out, and says who gave up."""
    with ranks_apart(PROBLEM, 0.5, 10.0) as (whole, (first, late)):
        weights = [whole.prepare(share) for share in experts(PROBLEM)]
        call = make_call(PROBLEM, 64, 0)
        first.forward(*call, weights[0])
        with pytest.raises(MegaMoETimeoutError):
            first.check()
        started = time.perf_counter()
        out = late.forward(*call, weights[1])
        with pytest.raises(RankFailedError) as raised:
            late.check()
        assert time.perf_counter() - started < 5
        assert (raised.value.rank, raised.value.peer) == (1, 0)
        assert out.isnan().all()
        assert late.stats().timeouts == 0


@pytest.mark.parametrize("count", [WIDE.num_max_tokens_per_rank * WIDE.top_k, 2**31 + 1, 2**32 - 1])
def test_impossible_counts_are_an_error_and_no_wild_access(count: int) -> None:
    """A source sends at most capacity * K picks. The first number is one expert's most; two experts have it."""
    with ranks_apart(WIDE, 2.0) as (whole, (alone,)):
        weights = [whole.prepare(share) for share in experts(WIDE)]
        expected = call_all(whole, WIDE, weights, 64)
        whole.reset()
        alone._words(0, "counts_published")[1] = 1
        alone._words(0, "route_counts")[-2:] = count - (1 << 32 if count >= 1 << 31 else 0)
        out = alone.forward(*make_call(WIDE, 64, 0), weights[0])
        with pytest.raises(ProtocolError, match="rank 0 was sent impossible row counts by rank 1"):
            alone.check()
        assert out.isnan().all()
        alone.reset()
        whole.reset()
        assert torch.equal(call_all(whole, WIDE, weights, 64), expected)


def test_a_negative_number_of_tokens_on_the_device_means_none() -> None:
    with open_virtual(PROBLEM) as session:
        weights = [session.prepare(share) for share in experts(PROBLEM)]
        calls = [make_call(PROBLEM, 64, rank) for rank in range(2)]
        hidden, ids, router = (list(part) for part in zip(*calls, strict=True))
        counts = [torch.tensor(value, dtype=torch.int32, device="cuda") for value in (-3, 64)]
        outputs = session.forward(hidden, ids, router, weights, num_tokens=counts)
        session.check()
        assert (outputs[0] == 0).all()
        assert sum(map(int, torch.cat(session.receive_counts()).tolist())) == 64 * PROBLEM.top_k


def test_a_peer_that_never_comes_ends_in_a_named_timeout_and_reset_recovers() -> None:
    """EP2 with one of the two ranks launched: the second rank's workspace is there, its kernel is not."""
    with ranks_apart(PROBLEM, 0.5) as (whole, (lonely,)):
        weights = [whole.prepare(share) for share in experts(PROBLEM)]
        expected = call_all(whole, PROBLEM, weights, 64)
        whole.reset()
        hidden, ids, router = make_call(PROBLEM, 64, 0)
        out = lonely.forward(hidden, ids, router, weights[0])
        with pytest.raises(MegaMoETimeoutError) as raised:
            lonely.check()
        assert (raised.value.rank, raised.value.peer, raised.value.phase) == (0, 1, "dispatch")
        assert out.isnan().all()
        with pytest.raises(MegaMoETimeoutError):
            lonely.forward(hidden, ids, router, weights[0])
        whole.reset()
        assert torch.equal(call_all(whole, PROBLEM, weights, 64), expected)
        torch.cuda.synchronize()


def test_the_unfused_peer_computes_the_layer(tmp_path: Path) -> None:
    """The benchmark's peer quantises its weights once more, by channel: about 0.04 at w13 and 0.026 at w2, beside the
    mode's own 0.048 (megamoe.testing.tolerances)."""
    import torch.distributed as dist

    from megamoe_cuda.bench.inputs import make_experts, make_inputs
    from megamoe_cuda.bench.unfused import UnfusedPeer

    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        inputs = make_inputs(SINGLE, num_tokens=50, routing_name="uniform", rank=0, seed=0)
        weights = make_experts(SINGLE, 0)
        assert dist.group.WORLD is not None
        peer = UnfusedPeer(SINGLE, dist.group.WORLD, weights)
        peer.load(inputs)
        got = peer.call().cpu()
        expected = oracle(
            SINGLE,
            inputs.hidden_states.cpu(),
            inputs.topk_ids.cpu(),
            inputs.topk_weights.cpu(),
            [on_cpu(weights)],
        )
        distance = rel_l2(got.float(), expected.float())
        print(f"unfused peer: relL2 {distance:.4f} from the oracle")
        assert distance < UNFUSED_BOUND
    finally:
        dist.destroy_process_group()

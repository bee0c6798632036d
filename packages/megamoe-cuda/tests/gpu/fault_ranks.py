"""What each rank of test_faults_gpu.py does: a module of its own, since spawned processes have to import it.

Ranks may share a GPU (`MEGAMOE_RANKS_PER_GPU`). Their kernels take turns on it then, a call takes many milliseconds,
and NCCL refuses: collectives on the host are gloo's, and the all-reduce beside a call is PyTorch's own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from megamoe import env
from megamoe.errors import MegaMoEError
from megamoe.launch import RankContext
from megamoe.problem import MoEProblem
from megamoe.schedule.device_spec import H200
from megamoe.symm.torch_symm import TorchSymmGroup
from megamoe.tensors import ExpertWeights
from megamoe.testing.data import make_weights, shard
from megamoe_cuda import backend as cuda_backend
from megamoe_cuda.backend import CudaBackend

PROBLEM = MoEProblem(
    hidden_size=1024, intermediate_size=512, num_experts=16, top_k=4, num_max_tokens_per_rank=256, ep_size=2
)
THREE_RANKS = replace(PROBLEM, num_experts=12, ep_size=3)  # of which two can go on with the same experts
SHORT_S = 5.0  # a time-out that is waited for
LATE_S = 90.0  # how late a rank comes that must be waited for
GUARD, GUARD_ROWS = 0xA5, 4


class Rank:
    """One rank on its GPU: opens sessions of `problem`, and makes calls."""

    def __init__(self, context: RankContext, problem: MoEProblem = PROBLEM) -> None:
        cuda_backend.SEEN_RIGHT_ON = cuda_backend.SEEN_RIGHT_ON or "under test"
        self.rank = context.rank
        self.device = context.gpu
        context.join_gpus(self.device)
        self.problem = problem
        self._group = TorchSymmGroup(dist.group.WORLD, self.device)  # type: ignore[arg-type]
        with self.open() as session:
            self.weights = session.prepare(self.share(problem))

    def share(self, problem: MoEProblem) -> ExpertWeights:
        """This rank's experts; all of them are the same for every number of ranks."""
        return shard(make_weights(problem, self.device), problem.ep_size)[self.rank]

    def open(
        self,
        num_sms: int = H200.num_sms,
        problem: MoEProblem | None = None,
        timeout_s: float | None = 60.0,
        group: TorchSymmGroup | None = None,
    ) -> Any:
        """COLLECTIVE. A session, warm; of all ranks unless a group is given."""
        backend = CudaBackend()
        plan = backend.plan(problem or self.problem, replace(H200, num_sms=num_sms))
        session = backend.open(plan, group or self._group, timeout_s=timeout_s)
        session.warmup()
        return session

    def call(self, num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments of this rank."""
        rng = torch.Generator().manual_seed(10 * seed + self.rank)
        experts, top_k = self.problem.num_experts, self.problem.top_k
        ids = torch.rand(num_tokens, experts, generator=rng).argsort(-1)[:, :top_k].contiguous()
        x = torch.randn(num_tokens, PROBLEM.hidden_size, generator=rng).bfloat16()
        router = torch.rand(num_tokens, PROBLEM.top_k, generator=rng)
        return x.to(self.device), ids.to(self.device), router.to(self.device)

    def meet(self) -> None:
        """COLLECTIVE. Wait for all ranks and their work, on the host."""
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()


def make_all_reduce(rank: Rank, num_elements: int) -> Callable[[], object]:
    """COLLECTIVE. An all-reduce of another group, whose kernel waits for its peers on the GPU: NCCL's, where it can."""
    if env.ranks_per_gpu() == 1:
        tensor = torch.ones(num_elements, device=rank.device)
        return lambda: dist.all_reduce(tensor)
    others = dist.new_group()
    shared = symm_mem.empty(num_elements, dtype=torch.float32, device=rank.device).fill_(1)
    symm_mem.rendezvous(shared, others.group_name)
    return lambda: torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", others.group_name)


def error_of(act: Callable[[], object], check: Callable[[], None]) -> str:
    """The MegaMoE error that `act`, and the check behind it, raise: its type, a colon, its message; or nothing."""
    try:
        act()
        check()
    except MegaMoEError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def beside_an_all_reduce(rank: Rank) -> bool:
    """With 32 SMs left free, an all-reduce of another group on another stream is started before each call: whether
    every call gave its bits."""
    with rank.open(num_sms=H200.num_sms - 32) as session:
        call, reduce, side = rank.call(200), make_all_reduce(rank, 1 << 20), torch.cuda.Stream()
        expected = session.forward(*call, rank.weights)
        reduce()
        rank.meet()
        right = True
        for _ in range(num_rounds()):
            with torch.cuda.stream(side):
                reduce()
            right &= torch.equal(session.forward(*call, rank.weights), expected)
        session.check()
        return right


def crossed_with_an_all_reduce(rank: Rank) -> tuple[str, bool]:
    """No SM left free, and the ranks start the layer and an all-reduce in opposite order: a rank's error, and whether
    the session is right again after a reset."""
    with rank.open(timeout_s=SHORT_S) as session:
        call, all_reduce, side = rank.call(200), make_all_reduce(rank, 1 << 20), torch.cuda.Stream()
        expected = session.forward(*call, rank.weights)

        def reduce() -> None:
            with torch.cuda.stream(side):
                all_reduce()

        def crossed() -> None:
            order = [reduce, lambda: session.forward(*call, rank.weights)]
            for start in order if rank.rank == 0 else reversed(order):
                start()
                time.sleep(0.5)  # it runs, and holds its SMs

        reduce()
        rank.meet()
        error = error_of(crossed, session.check)
        rank.meet()
        session.reset()
        return error, torch.equal(session.forward(*call, rank.weights), expected)


def many_uneven_calls(rank: Rank) -> str:
    """`num_calls()` calls with other token counts each, zero included, into guarded memory: what went wrong first."""
    with rank.open() as session:
        counts = (0, 256, 1, 63, 64, 65, 200, 0, 17, 128, 129)
        mine = counts[rank.rank :] + counts[: rank.rank]
        calls = [rank.call(num_tokens, seed) for seed, num_tokens in enumerate(mine)]
        alone = [session.forward(*call, rank.weights).clone() for call in calls]
        outs = [_guarded(num_tokens, rank.device) for num_tokens in mine]
        for step in range(num_calls()):
            which = step * 7 % len(calls)
            session.forward(*calls[which], rank.weights, out=outs[which][GUARD_ROWS:-GUARD_ROWS])
            if step % 1000 == 999:
                torch.cuda.synchronize()
        session.check()
        for which, (out, expected) in enumerate(zip(outs, alone, strict=True)):
            if not torch.equal(out[GUARD_ROWS:-GUARD_ROWS], expected):
                return f"call {which} of {len(expected)} tokens gave other bits"
            guards = torch.cat((out[:GUARD_ROWS], out[-GUARD_ROWS:])).view(torch.uint8)
            if not bool((guards == GUARD).all()):
                return f"call {which} wrote past its output"
        return "" if session.stats().calls == num_calls() + len(calls) else "calls were not counted"


def num_rounds() -> int:
    """Of tests whose calls are alike."""
    return 50 if env.ranks_per_gpu() == 1 else 20


def num_calls() -> int:
    """10,000 on GPUs of their own; where ranks take turns on one, what fits into some seconds."""
    return 10_000 if env.ranks_per_gpu() == 1 else 200


def _guarded(num_tokens: int, device: torch.device) -> Tensor:
    rows = torch.full((num_tokens + 2 * GUARD_ROWS, 2 * PROBLEM.hidden_size), GUARD, dtype=torch.uint8, device=device)
    return rows.view(torch.bfloat16)


def out_of_memory_on_one_rank(rank: Rank) -> tuple[str, bool]:
    """Rank 1 has no memory for a large session: what `open` raises on this rank, and whether a small one opens then.

    Where ranks share a GPU none has: the session is larger than the GPU, and nothing is taken from others there.
    """
    hog, alone = None, env.ranks_per_gpu() == 1
    if rank.rank == 1 and alone:
        hog = torch.empty(int(0.97 * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device=rank.device)
    rank.meet()
    capacity = 1 << (18 if alone else 22)  # 18 GiB of workspace, or 289
    large = replace(PROBLEM, hidden_size=8192, num_max_tokens_per_rank=capacity)
    error = error_of(lambda: rank.open(problem=large), lambda: None)
    del hog
    torch.cuda.empty_cache()
    with rank.open() as session:
        y = session.forward(*rank.call(64), rank.weights)
        return error, bool(y.isfinite().all())


def over_capacity_on_one_rank(rank: Rank) -> tuple[str, bool]:
    """Rank 0 brings a token too many: a rank's error, and whether the session is right again after a reset."""
    with rank.open(timeout_s=SHORT_S) as session:
        call = rank.call(64)
        expected = session.forward(*call, rank.weights)
        rank.meet()
        brought = rank.call(PROBLEM.num_max_tokens_per_rank + 1) if rank.rank == 0 else call
        error = error_of(lambda: session.forward(*brought, rank.weights), session.check)
        rank.meet()
        session.reset()
        return error, torch.equal(session.forward(*call, rank.weights), expected)


def two_sessions_on_two_streams(rank: Rank) -> bool:
    """Each takes half of the SMs; both are in flight at the same time, in the same order on every rank."""
    half = H200.num_sms // 2
    with rank.open(num_sms=half) as one, rank.open(num_sms=half) as other:
        call, streams = rank.call(200), [torch.cuda.Stream(), torch.cuda.Stream()]
        expected = one.forward(*call, rank.weights)
        rank.meet()
        right = True
        for _ in range(num_rounds()):
            got = []
            for stream, session in zip(streams, (one, other), strict=True):
                with torch.cuda.stream(stream):
                    got.append(session.forward(*call, rank.weights))
            torch.cuda.synchronize()
            right &= all(torch.equal(y, expected) for y in got)
        one.check()
        other.check()
        return right


def interrupted_while_waiting(rank: Rank) -> tuple[bool, bool]:
    """Ctrl-C on rank 0 while its kernel waits for rank 1, which is late: whether it was felt, and whether the call and
    the next one are right all the same."""
    with rank.open() as session:
        call = rank.call(100)
        expected = session.forward(*call, rank.weights)
        rank.meet()
        felt = False
        if rank.rank == 1:
            time.sleep(2.0)
        else:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
            signal.setitimer(signal.ITIMER_REAL, 0.5)
        y = session.forward(*call, rank.weights)
        try:
            session.check()
            time.sleep(0.1)
        except KeyboardInterrupt:
            felt = True
        right = torch.equal(y, expected)
        rank.meet()
        return felt, right and torch.equal(session.forward(*call, rank.weights), expected)


def late_rank(context: RankContext) -> bool:
    """COLLECTIVE. With the default time-out a rank that is late is waited for: whether all got their bits."""
    rank = Rank(context)
    with rank.open(timeout_s=None) as session:
        call = rank.call(100)
        expected = session.forward(*call, rank.weights)
        rank.meet()
        if rank.rank == 1:
            time.sleep(LATE_S)
        right = torch.equal(session.forward(*call, rank.weights), expected)
        session.check()
    dist.destroy_process_group()
    return right


def survive(context: RankContext) -> tuple[str, bool]:
    """COLLECTIVE. Rank 2 is killed while the others are in a call with it: what they raise, and whether the two of them
    get the same bits from the same experts in a new session of a new process group."""
    rank = Rank(context, THREE_RANKS)
    session, call = rank.open(timeout_s=SHORT_S), rank.call(100)
    expected = session.forward(*call, rank.weights)
    rank.meet()
    if rank.rank == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    error = error_of(lambda: session.forward(*call, rank.weights), session.check)
    survivors = dist.new_group([0, 1], use_local_synchronization=True)
    problem = replace(THREE_RANKS, ep_size=2)
    with rank.open(problem=problem, group=TorchSymmGroup(survivors, rank.device)) as new:  # type: ignore[arg-type]
        weights = new.prepare(rank.share(problem))
        right = all(torch.equal(new.forward(*call, weights), expected) for _ in range(20))
        new.check()
    return error, right


FAULTS: tuple[Callable[[Rank], Any], ...] = (
    beside_an_all_reduce,
    many_uneven_calls,
    two_sessions_on_two_streams,
    interrupted_while_waiting,
    out_of_memory_on_one_rank,
    over_capacity_on_one_rank,
    crossed_with_an_all_reduce,
)


def all_faults(context: RankContext) -> None:
    """COLLECTIVE. Every fault, one after the other in the same two processes; each outcome is reported as it comes."""
    rank = Rank(context)
    for fault in FAULTS:
        rank.meet()
        context.report((fault.__name__, fault(rank)))
    dist.destroy_process_group()

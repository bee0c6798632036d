"""What the ranks of `test_processes` run; a module of its own, since a spawned process has to import it."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from layers import make_layer

from megamoe.errors import MegaMoEError
from megamoe.launch import RankContext
from megamoe.reference import executor
from megamoe.reference.backend import ReferenceBackend
from megamoe.symm import ShmGroup

LAYER = {"quant": "a8w8", "num_tokens": 90, "top_k": 3, "num_experts": 12}


def forward(context: RankContext, config: str | None, over_gloo: bool, num_calls: int) -> torch.Tensor:
    """One rank's output of the last of some calls."""
    layer = make_layer(**LAYER, ep_size=context.world_size)
    backend = ReferenceBackend()
    plan = backend.plan(layer.problem, config=config)
    if over_gloo:
        store = dist.FileStore(str(context.directory / "store"), context.world_size)
        dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
        group = dist.group.WORLD
    else:
        group = ShmGroup.connect(context.name, context.rank, context.world_size, timeout_s=60)
    with backend.open(plan, group, timeout_s=60) as session:
        weights = session.prepare(layer.weights(context.rank))
        for _ in range(num_calls):
            output = session.forward(*layer.tokens(context.rank), weights)
    if over_gloo:
        dist.destroy_process_group()
    return output


Survived = tuple[str, float, bool, set[str], torch.Tensor]


def forward_until_killed(context: RankContext, victim: int, where: str) -> Survived:
    """What a survivor sees of a peer that dies inside a call: error, seconds until it came, NaN in out, leftovers, and
    its output of a call of a new session, which the survivors open in a new group."""
    layer = make_layer(**LAYER, ep_size=context.world_size)
    backend = ReferenceBackend()
    group = ShmGroup.connect(context.name, context.rank, context.world_size, timeout_s=60)
    session = backend.open(backend.plan(layer.problem), group, timeout_s=60)
    weights = session.prepare(layer.weights(context.rank))
    session.forward(*layer.tokens(context.rank), weights)
    group.barrier(timeout_s=60, phase="test")
    if context.rank == victim:
        setattr(executor, where, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    out = torch.zeros(layer.tokens(context.rank)[0].shape, dtype=torch.bfloat16)
    began = time.monotonic()
    try:
        session.forward(*layer.tokens(context.rank), weights, out=out)
    except MegaMoEError as error:
        seconds = time.monotonic() - began
        left = {name for name in os.listdir("/dev/shm") if "megamoe" in name}
        session.close()
        again = _forward_of_survivors(context, [rank for rank in range(context.world_size) if rank != victim])
        return f"{type(error).__name__}: {error}", seconds, bool(out.isnan().all()), left, again
    raise AssertionError("the call ended as if nobody had died")


def _forward_of_survivors(context: RankContext, survivors: list[int]) -> torch.Tensor:
    rank = survivors.index(context.rank)
    layer, backend = make_layer(**LAYER, ep_size=len(survivors)), ReferenceBackend()
    group = ShmGroup.connect(f"{context.name}again", rank, len(survivors), timeout_s=60)
    with backend.open(backend.plan(layer.problem), group, timeout_s=60) as session:
        output = session.forward(*layer.tokens(rank), session.prepare(layer.weights(rank)))
    group.close()
    return output

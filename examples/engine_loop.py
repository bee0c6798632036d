"""What an inference engine does with MegaMoE, step by step: several layers on one session, batches that change, padded
graphs, metrics, and a busy expert that gets a second copy between two steps.

    python examples/engine_loop.py                                   # one rank
    torchrun --nproc-per-node 2 examples/engine_loop.py              # CPU reference, or one GPU a rank

On GPUs each batch size is captured in a CUDA graph once and replayed from then on; on a CPU the same code is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import megamoe
from megamoe.expert_map import ExpertMap
from megamoe.formats import FP8_128X128
from megamoe.meter import Meter

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYERS = 256, 128, 8, 2, 2
BATCHES = (16, 64)  # sizes that are captured; a step takes the smallest that holds it
RANK, EP_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SLOTS = EXPERTS + EP_SIZE  # physical experts: each rank has one spare slot


class Engine:
    """One rank: tokens `[T, HIDDEN]` in, tokens out, through `LAYERS` MoE layers of random weights."""

    def __init__(self, session: megamoe.Session, device: torch.device) -> None:
        self.session, self.device = session, device
        rng = torch.Generator().manual_seed(RANK)
        slots = session.plan.problem.num_local_experts
        self.weights = [
            session.prepare_weights(
                quantized_experts(slots, 2 * INTERMEDIATE, HIDDEN, rng, device),
                quantized_experts(slots, HIDDEN, INTERMEDIATE, rng, device),
                layout="packed",
            )
            for _ in range(LAYERS)
        ]
        # The last slot of each rank is empty at first.
        own = EXPERTS // EP_SIZE
        self.slot_of = torch.tensor([[*range(r * own, (r + 1) * own), -1] for r in range(EP_SIZE)]).flatten()
        self.experts = ExpertMap(
            self.slot_of, num_logical_experts=EXPERTS, ep_rank=RANK, ep_size=EP_SIZE, device=device
        )
        # Experts are not equally liked: the second is chosen by nearly every token.
        self.router = (torch.randn(HIDDEN, EXPERTS, generator=torch.Generator().manual_seed(7)) / 16).to(device)
        self.bias = torch.zeros(EXPERTS, device=device).index_fill_(0, torch.tensor([1], device=device), 2.0)
        self.meter = Meter(session)
        self.steps = {size: self._make_step(size) for size in BATCHES}

    def _make_step(self, size: int) -> Callable[[Tensor], Tensor]:
        """A step of up to `size` tokens; rows past the valid ones are padding, and the device alone knows how many."""
        x = torch.zeros(size, HIDDEN, dtype=torch.bfloat16, device=self.device)
        valid = torch.zeros(1, dtype=torch.int32, device=self.device)

        def layers() -> Tensor:
            y = x
            for weights in self.weights:
                scores = (y.float() @ self.router + self.bias).softmax(-1).topk(TOP_K)
                ids = self.experts.to_physical(scores.indices)
                y = y + self.session.forward(y, ids, scores.values, weights, num_tokens=valid)
                self.meter.count()
            return y

        replay, out = captured(layers) if self.device.type == "cuda" else (None, x)

        def step(tokens: Tensor) -> Tensor:
            x[: len(tokens)] = tokens
            valid.fill_(len(tokens))
            if replay is None:
                return layers()[: len(tokens)]
            replay()
            return out[: len(tokens)]

        return step

    def __call__(self, tokens: Tensor) -> Tensor:
        """COLLECTIVE. One step. All ranks take the size that the largest batch needs: sizes need not agree, but the
        same choice everywhere keeps their times alike."""
        largest = torch.tensor(len(tokens))
        if EP_SIZE > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return self.steps[min(size for size in BATCHES if size >= largest)](tokens)

    def rebalance(self) -> None:
        """COLLECTIVE. Copy the busiest expert into the next rank's spare slot, in place: graphs stay valid."""
        (metrics,) = self.meter.collect()
        load = self.experts.logical_counts(metrics.rows_per_expert.to(self.device)).cpu()
        if EP_SIZE > 1:
            dist.all_reduce(load)
        busiest = int(load.argmax())
        slot = int((self.slot_of == busiest).nonzero()[0])
        per_rank = SLOTS // EP_SIZE
        owner, receiver = slot // per_rank, (slot // per_rank + 1) % EP_SIZE
        for weights in self.weights:
            for tensor in megamoe.expert_tensors(weights).values():
                expert = tensor[slot % per_rank].view(torch.uint8).cpu()
                if EP_SIZE > 1:
                    dist.broadcast(expert, src=owner)
                if receiver == RANK:
                    tensor[per_rank - 1].view(torch.uint8).copy_(expert)
        self.slot_of[receiver * per_rank + per_rank - 1] = busiest
        self.experts.update(self.slot_of)
        if RANK == 0:
            print(f"rows per expert {load.tolist()}: expert {busiest} gets a copy on rank {receiver}")


def captured(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """COLLECTIVE. `run` as a CUDA graph, and where its result will be."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = run()
    return graph.replay, out


def quantized_experts(
    count: int, rows: int, columns: int, rng: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Random experts `[count, rows, columns]` as FP8 payload and the FP32 scale of each 128x128 block."""
    quantized = FP8_128X128.quantize(torch.randn(count, rows, columns, generator=rng) * columns**-0.5)
    assert quantized.scales is not None
    return quantized.payload.to(device), quantized.scales.to(device)


def main() -> None:
    problem = megamoe.MoEProblem(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_experts=SLOTS, top_k=TOP_K,
        num_max_tokens_per_rank=max(BATCHES), ep_size=EP_SIZE, quant="a8w8",
    )  # fmt: skip
    backend = megamoe.select_backend("auto", problem)
    plan = backend.plan(problem)
    on_cpu = plan.device.arch == "cpu"
    device = torch.device("cpu") if on_cpu else torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if not on_cpu:
        torch.cuda.set_device(device)
    if EP_SIZE > 1:
        dist.init_process_group("gloo" if on_cpu else "cpu:gloo,cuda:nccl")
    with backend.open(plan, dist.group.WORLD if EP_SIZE > 1 else None) as session:
        session.warmup()
        engine = Engine(session, device)
        rng = torch.Generator().manual_seed(100 + RANK)
        for step, num_tokens in enumerate((16, 5, 0, 64, 33, 7, 16, 1)):
            tokens = torch.randn(num_tokens, HIDDEN, generator=rng).bfloat16().to(device)
            y = engine(tokens)
            mean = float(y.float().mean()) if num_tokens else 0.0
            print(f"rank {RANK}, step {step}: {num_tokens} tokens, mean {mean:+.4f}")
            if step == 3:
                engine.rebalance()
        (metrics,) = engine.meter.collect()
        session.check()
        rows = metrics.rows_per_expert.tolist()
        print(
            f"rank {RANK}: {metrics.calls} calls since, rows per slot {rows}, busiest over mean {metrics.imbalance:.2f}"
        )
    if EP_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

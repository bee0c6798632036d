"""Time to first token and time per token of a model: through MegaMoE's adapter, and with unfused blocks.

    python benchmarks/end_to_end/run.py --output benchmarks/results/end-to-end/DATE-2xH200.json
    python benchmarks/end_to_end/run.py --ranks 1 --experts 32 --output benchmarks/results/end-to-end/DATE-1xH200.json

On one GPU, 32 experts are what one rank of EP8 holds, and a token's eight picks are the rows that it receives there.
One run measures every implementation on the same model and inputs, in turns whose order is drawn anew for each. Needs
`megamoe-core[transformers]`, and on GPUs megamoe-cuda; sgl-deep-gemm 0.1.5 where it is installed. Without GPUs, or with
--tiny, a tiny model runs: on the CPU reference that shows that the script works, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import transformers
from model import DEEPSEEK_V3, TINY, Implementations, Size, build, experts_modules
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import EPImplementation
from unfused_block import Dispatch, ExactMath, UnfusedExpertParallel

from megamoe.bench.commit import current_commit
from megamoe.integrations import transformers as megamoe_transformers
from megamoe.launch import RankContext, run_ranks

OURS, EXACT, REST = "megamoe", "exact", "without experts"
GATE = 0.06  # relL2 from the exact layer that a8w8 may have (docs/numerics.md)
UNFUSED_GATE = 0.08  # where weights are rounded once more, three roundings in quadrature
CHECKED_TOKENS = 32  # per rank, whose layers' outputs are compared with the exact ones


class NoExperts(EPImplementation):  # type: ignore[misc]
    """Hands its input back: what is left of a model's time is not the experts'."""

    def __init__(self, _: object, *args: Any) -> None:
        super().__init__(*args)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[T, H]` -> the same."""
        return hidden_states


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured; see `main`."""

    size: Size
    num_ranks: int
    num_moe_layers: int
    repeats: int
    gpu: bool
    gemm: str


class Rank:
    """One rank's model and what is done with it."""

    def __init__(self, context: RankContext, options: Options) -> None:
        self.context, self.options = context, options
        self.device = torch.device("cuda", context.rank) if options.gpu else torch.device("cpu")
        if options.gpu:
            context.join_gpus(self.device)
        else:
            store = f"file://{context.directory / 'store'}"
            dist.init_process_group("gloo", init_method=store, rank=context.rank, world_size=context.world_size)
        mesh = init_device_mesh(self.device.type, (context.world_size, 1), mesh_dim_names=("ep", "tp"))
        self.model = build(
            options.size, num_moe_layers=options.num_moe_layers, rank=context.rank,
            world_size=context.world_size, device=self.device,
        )  # fmt: skip
        if options.gpu:
            torch.cuda.empty_cache()  # symmetric memory does not come from torch's pool
        self.implementations = Implementations(self.model, mesh["ep"], mesh["tp"])
        self.adapter = megamoe_transformers.register(
            OURS, num_max_tokens_per_rank=options.size.prompt, keep_parameters=True
        )
        self.unfused = {f"unfused, {dispatch}": dispatch for dispatch in Dispatch}
        self._captured: list[Callable[[], None]] = []
        self._enter_all()

    def _enter_all(self) -> None:
        modules = experts_modules(self.model)
        self.implementations.add(OURS)
        math = [self._math(experts) for experts in modules]
        for name, dispatch in self.unfused.items():
            self.implementations.register(name, partial(UnfusedExpertParallel, dispatch), math)
        exact = map(ExactMath, modules)
        self.implementations.register(EXACT, partial(UnfusedExpertParallel, Dispatch.ALL_GATHER), exact)
        self.implementations.register(REST, NoExperts, modules)

    def _math(self, experts: Any) -> Any:
        if not self.options.gpu:
            return ExactMath(experts)
        import fp8_math

        return {"deep_gemm": fp8_math.DeepGemm, "torch": fp8_math.TorchGroupedMm}[self.options.gemm](experts)

    # -- time ------------------------------------------------------------------------------------------------------

    def meet(self) -> float:
        """COLLECTIVE. Wait for all work of all ranks; the time then, seconds."""
        if self.options.gpu:
            torch.cuda.synchronize()
        dist.barrier()
        if self.options.gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def slowest(self, seconds: list[float]) -> list[float]:
        """COLLECTIVE. The slowest rank's time of each repeat."""
        times = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return times.tolist()  # type: ignore[no-any-return]

    # -- prefill ---------------------------------------------------------------------------------------------------

    def prefill(self, ids: Tensor) -> Tensor:
        """`[1, V]` logits after a prompt `[1, T]`, through a cache that decoding would go on from."""
        return self.model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[:, -1]  # type: ignore[no-any-return]

    def first_token(self, ids: Tensor) -> tuple[float, Tensor]:
        """COLLECTIVE. Seconds until the host has the first token, and its logits."""
        began = self.meet()
        logits = self.prefill(ids)
        logits.argmax(-1).item()
        return time.perf_counter() - began, logits

    def measure_prefill(self) -> dict[str, Any]:
        """COLLECTIVE. One prompt on each rank, output 1."""
        ids = self.random_ids(1, self.options.size.prompt)
        names = [OURS, *self.unfused, REST]
        seconds: dict[str, list[float]] = {name: [] for name in names}
        logits: dict[str, Tensor] = {}
        for round_ in range(2 + self.options.repeats):
            for name in drawn(names, round_):
                self.implementations.use(name)
                took, logits[name] = self.first_token(ids)
                if round_ >= 2:
                    seconds[name].append(took)
        return self.row("prefill", batch=1, num_tokens=self.options.size.prompt, seconds=seconds, logits=logits)

    # -- decode ----------------------------------------------------------------------------------------------------

    def measure_decode(self, batch: int) -> dict[str, Any]:
        """COLLECTIVE. One step of `batch` sequences on each rank; on GPUs a CUDA graph."""
        names = [OURS, f"unfused, {Dispatch.ALL_GATHER}", REST]
        steps: dict[str, Callable[[], None]] = {}
        logits: dict[str, Tensor] = {}
        for name in names:
            steps[name], logits[name] = self.decode_step(name, batch)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for round_ in range(3 + 4 * self.options.repeats):
            for name in drawn(names, round_):
                self.implementations.use(name)  # where there is no graph
                took = self.elapsed(steps[name])
                if round_ >= 3:
                    seconds[name].append(took)
        return self.row("decode", batch=batch, num_tokens=batch, seconds=seconds, logits=logits)

    def elapsed(self, step: Callable[[], None]) -> float:
        """COLLECTIVE. Seconds of a step; on GPUs by CUDA events, the ranks meeting on the stream before it."""
        if not self.options.gpu:
            began = self.meet()
            step()
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.all_reduce(torch.ones(1, device=self.device))
        begin.record()
        step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def decode_step(self, name: str, batch: int) -> tuple[Callable[[], None], Tensor]:
        """COLLECTIVE. What runs one step by the implementation `name`, and where its logits `[B, V]` are."""
        context = self.options.size.context
        cache = transformers.StaticCache(config=self.model.config, max_cache_len=context)
        ids = self.random_ids(batch, context)
        self.implementations.use(REST)  # the same cache for all, whatever the capacity
        self.model(input_ids=ids[:, :-1], cache=cache, use_cache=True, logits_to_keep=1)
        token = ids[:, -1:].contiguous()
        position = torch.full((batch, 1), context - 1, device=self.device)
        mask = torch.ones(batch, 1, 1, context, dtype=torch.bool, device=self.device)
        logits = torch.empty(batch, self.model.config.vocab_size, dtype=torch.bfloat16, device=self.device)

        def step() -> None:
            for layer in cache.layers:
                layer.cumulative_length.fill_(context - 1)  # the same step at each replay
            output = self.model(
                input_ids=token, attention_mask=mask, position_ids=position, cache=cache, use_cache=True
            )
            logits.copy_(output.logits[:, -1])

        self.implementations.use(name)
        return (self.captured(step) if self.options.gpu else step), logits

    def captured(self, step: Callable[[], None]) -> Callable[[], None]:
        """COLLECTIVE. `step` as a CUDA graph."""
        step()
        self.meet()
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog thread may look at its events meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        self._captured.append(step)  # holds the tensors that the graph reads
        return graph.replay

    # -- numbers ---------------------------------------------------------------------------------------------------

    def measure_layers(self) -> dict[str, Any]:
        """COLLECTIVE. How far each implementation's MoE layers are from the exact ones, on the model's own activations.

        Raises:
            AssertionError: a layer outside of the mode's gate.
        """
        modules, inputs = experts_modules(self.model), []
        hooks = [module.register_forward_pre_hook(lambda _, args: inputs.append(args)) for module in modules]
        self.implementations.use(OURS)
        self.prefill(self.random_ids(1, CHECKED_TOKENS))
        for hook in hooks:
            hook.remove()
        self.implementations.use(EXACT)
        exact = [module.forward(*args) for module, args in zip(modules, inputs, strict=True)]
        distances = {}
        for name in (OURS, *self.unfused):
            self.implementations.use(name)
            got = [module.forward(*args) for module, args in zip(modules, inputs, strict=True)]
            worst = max(rel_l2(mine, theirs) for mine, theirs in zip(got, exact, strict=True))
            distances[name] = max(self.slowest([worst]))
        assert distances[OURS] < GATE, distances
        assert max(distances.values()) < UNFUSED_GATE, distances
        return {"phase": "layers", "rel_l2_from_exact": distances, "gate": GATE}

    def row(
        self, phase: str, *, batch: int, num_tokens: int, seconds: dict[str, list[float]], logits: dict[str, Tensor]
    ) -> dict[str, Any]:
        """COLLECTIVE. One measurement as JSON; `num_tokens` per rank."""
        ms = {name: sorted(1e3 * took for took in self.slowest(times)) for name, times in seconds.items()}
        others = {name: other for name, other in logits.items() if name not in (OURS, REST)}
        return {
            "phase": phase,
            "batch_per_rank": batch,
            "tokens_per_rank": num_tokens,
            "ms": {name: {"median": median(times), "min": times[0], "max": times[-1]} for name, times in ms.items()},
            "logits_rel_l2": {
                name: max(self.slowest([median_rel_l2(logits[OURS], other)])) for name, other in others.items()
            },
        }

    def random_ids(self, batch: int, num_tokens: int) -> Tensor:
        """Token ids `[batch, num_tokens]` of this rank."""
        rng = torch.Generator().manual_seed(1000 * batch + self.context.rank)
        return torch.randint(0, self.model.config.vocab_size, (batch, num_tokens), generator=rng).to(self.device)


def drawn(names: list[str], round_: int) -> list[str]:
    """The round's order, the same on every rank: what runs before leaves the GPU warm or cool."""
    return random.Random(round_).sample(names, len(names))


def rel_l2(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|."""
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def median_rel_l2(got: Tensor, expected: Tensor) -> float:
    """Of the rows: some differ by more, where rounding turns the router's choice between two experts."""
    rows = (got.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    return float(rows.median())


def measure(context: RankContext, options: Options) -> None:
    """COLLECTIVE. Body of a rank's process; rank 0 reports each row as it comes."""
    logging.getLogger("megamoe").setLevel(logging.INFO)
    with torch.no_grad():
        began = time.perf_counter()
        rank = Rank(context, options)
        context.report(f"built in {time.perf_counter() - began:.1f} s")
        for row in rows(rank):
            if context.rank == 0:
                context.report(row)
        context.report(f"done after {time.perf_counter() - began:.1f} s")
    rank.adapter.close()
    dist.destroy_process_group()


def rows(rank: Rank) -> Iterator[dict[str, Any]]:
    """COLLECTIVE. All measurements."""
    yield rank.measure_layers()
    yield rank.measure_prefill()
    for batch in rank.options.size.batches:
        yield rank.measure_decode(batch)


def describe(options: Options) -> dict[str, Any]:
    """What was measured, and where."""
    gpu = torch.cuda.get_device_name(0) if options.gpu else ""
    config = transformers.DeepseekV3Config(**options.size.config)
    names = ("hidden_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "vocab_size")
    return {
        "bench": "end-to-end",
        "commit": current_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": gpu,
        "num_gpus": options.num_ranks if options.gpu else 0,
        "ep_size": options.num_ranks,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gemm": options.gemm if options.gpu else "exact",
        "num_moe_layers": options.num_moe_layers,
        "context": options.size.context,
        **{name: getattr(config, name) for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--output", type=Path, default=Path("end-to-end.json"))
    parser.add_argument("--ranks", type=int, default=2, help="a process each, on GPUs a GPU each; EP1 with one")
    parser.add_argument("--layers", type=int, default=3, help="MoE layers")
    parser.add_argument("--experts", type=int, help="of a layer, over all ranks; default: the model's 256")
    parser.add_argument("--repeats", type=int, default=5, help="of a prompt; four times as many of a decoding step")
    parser.add_argument("--prompt", type=int, help="tokens of each rank's prompt")
    parser.add_argument("--gemm", choices=("deep_gemm", "torch"), help="of the unfused block; default: what is there")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    size = TINY if arguments.tiny or not gpu else DEEPSEEK_V3
    experts = {"n_routed_experts": arguments.experts} if arguments.experts else {}
    options = Options(
        size=replace(size, prompt=arguments.prompt or size.prompt, config=size.config | experts),
        num_ranks=arguments.ranks,
        num_moe_layers=arguments.layers,
        repeats=arguments.repeats,
        gpu=gpu,
        gemm=arguments.gemm or ("deep_gemm" if find_spec("deep_gemm") else "torch"),
    )
    result = describe(options) | {"rows": []}

    def report(rank: int, message: Any) -> None:
        print(f"rank {rank}: {message}", flush=True)
        if isinstance(message, dict):
            result["rows"].append(message)
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    run_ranks(measure, options.num_ranks, options, timeout_s=600, on_report=report)


if __name__ == "__main__":
    main()

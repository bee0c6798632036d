"""A/B: the layer split over two kernels on disjoint SM partitions, against the fused kernel.

    python split_partitions.py --tokens 512,2048,8192 --gemm1-sms 88

One kernel multiplies GEMM1's tiles, the other GEMM2's, at the same time on the other SMs. They meet through the flags
that the fused kernel's CTAs meet through (a2_written, block_retired, the joins); both stage, route, pull and combine,
which is more than a first kernel alone could. Both are compiled from the installed headers with the few lines of
PATCHES replaced: together their CTAs are the fused kernel's. Partitions are green contexts, or, with --streams, what
the driver makes of two ordinary streams: a CTA fills an SM either way. One GPU, EP1, the seed's shape, a8w8. Prints a
JSON line per token count: median microseconds of fused and split, launched directly, and of fused from a graph.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from cuda.bindings import driver

from megamoe.bench.results import Timing
from megamoe.launch import RankContext, run_ranks
from megamoe.problem import MoEProblem
from megamoe_cuda.backend import CudaBackend
from megamoe_cuda.bench.inputs import Inputs, make_experts, make_inputs
from megamoe_cuda.bench.rank import NUM_ROUTINGS, barrier, captured
from megamoe_cuda.bench.timing import Contender, time_interleaved
from megamoe_cuda.driver import check
from megamoe_cuda.heuristics import session_config
from megamoe_cuda.jit import codegen, compiler
from megamoe_cuda.kernel_config import KernelConfig
from megamoe_cuda.launcher import LoadedKernel

NUM_SMS = 132
Streams: TypeAlias = tuple[torch.cuda.Stream, ...]
TIME_LIMIT_S = 300.0

CLAIM = "atomicAdd(cta.workspace.claimed_units(cta.epoch), "
PATCHES = {
    "symm/cta.cuh": {"kNumVirtualRanks == 1 ? blockIdx.x :": "kNumVirtualRanks == 1 ? blockIdx.x + {first}u :"},
    "schedule/units.cuh": {"u = unit_at(unit, plan.num_blocks());": "u{{{is_gemm2}, unit / {tiles}, unit % {tiles}}};"},
    "roles/load.cuh": {
        "units = num_units(plan.num_blocks());": "units = plan.num_blocks() * {tiles};",
        "uint32_t unit = cta.index / cfg::kClusterSize": "uint32_t unit = cta.index - {first}u",
    },
    "pipeline/cluster.cuh": {  # one word counts both kernels' claims, 16 bits each
        f"    unit = kClusters + {CLAIM}1u);": f"    unit = {{number}} + ({CLAIM}{{one}}) >> {{shift}} & 65535);",
    },
    "sm90_mega_moe.cuh": {
        "if (threadIdx.x == kWarpSize) prefetch": "if (!{is_gemm2} && threadIdx.x == kWarpSize) prefetch",
    },
}


@contextmanager
def patched_headers(**values: object) -> Iterator[None]:
    """The compiler reads headers with PATCHES."""
    original = codegen.INCLUDE_DIR
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(shutil.copytree(original, Path(folder) / "include"))
        for name, replacements in PATCHES.items():
            file = tree / "megamoe" / name
            text = file.read_text(encoding="utf-8")
            for old, new in replacements.items():
                if text.count(old) != 1:
                    raise SystemExit(f"{name} has changed: {old!r} is there {text.count(old)} times")
                text = text.replace(old, new.format(**values))
            file.write_text(text, encoding="utf-8")
        compiler.INCLUDE_DIR = tree  # type: ignore[attr-defined]
        try:
            yield
        finally:
            compiler.INCLUDE_DIR = original  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Part:
    """The kernel of one partition: `number` CTAs of the fused kernel, from `first` on."""

    config: KernelConfig
    is_gemm2: bool
    first: int
    number: int

    def compile(self) -> compiler.CompiledKernel:
        tiles = "cfg::kGemm2NTiles" if self.is_gemm2 else "cfg::kGemm1NTiles"
        values = {"is_gemm2": str(self.is_gemm2).lower(), "tiles": tiles, "first": self.first, "number": self.number}
        with patched_headers(**values, one="65536u" if self.is_gemm2 else "1u", shift=16 * self.is_gemm2):
            return compiler.compile_kernel(self.config)


def parts(problem: MoEProblem, gemm1_sms: int) -> tuple[Part, Part]:
    """Those of a full call."""
    chosen = session_config(problem, None)
    tile = chosen.tile_for(problem, problem.num_max_tokens_per_rank)
    config = chosen.kernel(problem, tile, num_virtual_ranks=1, ctas_per_rank=NUM_SMS)
    return (
        Part(config=config, is_gemm2=False, first=0, number=gemm1_sms),
        Part(config=config, is_gemm2=True, first=gemm1_sms, number=NUM_SMS - gemm1_sms),
    )


def launch_config(num_ctas: int, num_threads: int, dynamic_smem_bytes: int) -> Any:
    """Not cooperative: the driver runs one cooperative kernel at a time."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = num_ctas, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
    config.sharedMemBytes = dynamic_smem_bytes
    return config


class SplitKernel:
    """Launches both kernels where a session launches one."""

    def __init__(self, compiled: Sequence[tuple[Part, compiler.CompiledKernel]], streams: Streams) -> None:
        self.config = compiled[0][0].config
        self._streams = streams
        self._parts = []
        for part, code in compiled:
            kernel = LoadedKernel(code)
            kernel._launch = launch_config(part.number, part.config.tile.num_threads, code.dynamic_smem_bytes)
            self._parts.append(kernel)

    def launch(self, *, stream: int, **arguments: Any) -> None:  # `stream` is the current one
        caller = torch.cuda.current_stream()
        for kernel, partition in zip(self._parts, self._streams, strict=True):
            partition.wait_stream(caller)
            kernel.launch(stream=partition.cuda_stream, **arguments)
        for partition in self._streams:
            caller.wait_stream(partition)

    def unload(self) -> None:
        for kernel in self._parts:
            kernel.unload()


def green_streams(gemm1_sms: int) -> Streams:
    """A stream in a green context of `gemm1_sms` SMs, and one in that of all others."""
    device = check(driver.cuDeviceGet(torch.cuda.current_device()))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    groups, _, rest = check(
        driver.cuDevSmResourceSplitByCount(1, check(driver.cuDeviceGetDevResource(device, kind)), 0, gemm1_sms)
    )
    sizes = (groups[0].sm.smCount, rest.sm.smCount)
    if sizes != (gemm1_sms, NUM_SMS - gemm1_sms):
        raise SystemExit(f"the driver makes partitions of {sizes} SMs instead of {gemm1_sms} and the rest")
    streams = []
    for resource in (groups[0], rest):
        description = check(driver.cuDevResourceGenerateDesc([resource], 1))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = check(driver.cuGreenCtxCreate(description, device, flags))
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        streams.append(torch.cuda.ExternalStream(int(check(driver.cuGreenCtxStreamCreate(context, flags, 0)))))
    return tuple(streams)


def direct(session: Any, weights: Any, rounds: list[Inputs], out: torch.Tensor) -> Contender:
    """The session's calls, launched one by one."""
    now: list[Inputs] = [rounds[0]]

    def load(round_: int) -> None:
        now[0] = rounds[round_ % len(rounds)]

    def call() -> None:
        inputs = now[0]
        session.forward((inputs.payload, inputs.scales), inputs.topk_ids, inputs.topk_weights, weights, out=out)

    return Contender(load=load, call=call)


def problem_of(num_tokens: int) -> MoEProblem:
    return MoEProblem(
        hidden_size=4096, intermediate_size=2048, num_experts=32, top_k=8, num_max_tokens_per_rank=num_tokens
    )


Compiled: TypeAlias = dict[int, list[tuple[Part, compiler.CompiledKernel]]]


def measure(context: RankContext, arguments: argparse.Namespace, compiled: Compiled) -> list[dict[str, object]]:
    context.join_gpus(context.gpu)
    streams = (torch.cuda.Stream(), torch.cuda.Stream()) if arguments.streams else green_streams(arguments.gemm1_sms)
    weights, rows = None, []
    for num_tokens in arguments.tokens:
        problem = problem_of(num_tokens)
        inputs = partial(make_inputs, problem, num_tokens=num_tokens, routing_name="uniform", rank=0)
        rounds = [inputs(seed=seed) for seed in range(NUM_ROUTINGS)]
        backend = CudaBackend()
        plan = backend.plan(problem)
        with backend.open(plan) as fused, backend.open(plan) as split:
            weights = weights or fused.prepare(make_experts(problem, 0))
            fused.warmup()
            tile = plan.config.tile_for(problem, num_tokens)
            split._kernels[tile.name] = SplitKernel(compiled[num_tokens], streams)
            outs = [torch.empty_like(rounds[0].hidden_states) for _ in range(2)]
            contenders = {
                "fused": direct(fused, weights, rounds, outs[0]),
                "split": direct(split, weights, rounds, outs[1]),
            }
            for contender in contenders.values():
                contender.call()
            fused.check()
            split.check()
            contenders["fused, from a graph"] = captured(fused, weights, rounds, quantized=True)
            seconds = time_interleaved(contenders, repeats=arguments.repeats, barrier=barrier())
            fused.check()
            split.check()
        us = {name: round(Timing.of([times]).us_median, 1) for name, times in seconds.items()}
        same = bool(torch.equal(*outs))
        rows.append({"num_tokens": num_tokens, "tile": tile.name, "us_median": us, "same_bits": same})
    dist.destroy_process_group()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="8,128,512,2048,8192", type=lambda text: [int(t) for t in text.split(",")])
    parser.add_argument("--gemm1-sms", type=int, default=88, help="GEMM1 has two thirds of the FLOPs")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--streams", action="store_true", help="two ordinary streams instead of green contexts")
    arguments = parser.parse_args()
    both = {num_tokens: parts(problem_of(num_tokens), arguments.gemm1_sms) for num_tokens in arguments.tokens}
    with ProcessPoolExecutor() as pool:
        codes = pool.map(Part.compile, chain.from_iterable(both.values()))
        compiled = {num_tokens: [(part, next(codes)) for part in pair] for num_tokens, pair in both.items()}
    (rows,) = run_ranks(measure, 1, arguments, compiled, timeout_s=TIME_LIMIT_S)
    for row in rows:
        print(json.dumps({"gemm1_sms": arguments.gemm1_sms, "green": not arguments.streams, **row}), flush=True)


if __name__ == "__main__":
    main()

"""A/B: the layer split over two kernels on disjoint SM partitions, against the fused kernel.

    python split_partitions.py --tokens 512,2048,8192 --gemm1-sms 80,88,96

One kernel multiplies GEMM1's tiles, the other GEMM2's, at the same time on the other SMs. They meet through the flags
that the fused kernel's CTAs meet through (a2_written, block_retired, the joins); both stage, route, pull and combine,
which is more than a first kernel alone could. Both are compiled from the installed headers with the few lines of
PATCHES replaced: together their CTAs are the fused kernel's. Partitions are green contexts, or, with --streams, what
the driver makes of two ordinary streams: a CTA fills an SM either way. One GPU, EP1, the seed's shape, a8w8. Prints a
JSON line per token count: median microseconds of fused and of each split (by the SMs of GEMM1), launched directly, and
of fused from a graph, all taking turns; which had the bits of fused; and what a split that did not run says.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from cuda.bindings import driver

from megamoe.bench.results import Timing
from megamoe.errors import MegaMoEError
from megamoe.launch import RankContext, run_ranks
from megamoe.problem import MoEProblem
from megamoe.tensors import PreparedWeights
from megamoe_cuda.backend import CudaBackend
from megamoe_cuda.bench.inputs import Inputs, make_experts, make_inputs
from megamoe_cuda.bench.rank import NUM_ROUTINGS, barrier, captured
from megamoe_cuda.bench.timing import Contender, time_interleaved
from megamoe_cuda.driver import check
from megamoe_cuda.heuristics import session_config
from megamoe_cuda.jit import codegen, compiler
from megamoe_cuda.kernel_config import KernelConfig
from megamoe_cuda.launcher import LoadedKernel
from megamoe_cuda.weights import prepare

NUM_SMS = 132
Streams: TypeAlias = tuple[torch.cuda.Stream, ...]
TIME_LIMIT_S = 300.0
WAIT_S = "5"  # of a kernel for the other: neither compiles meanwhile

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


def parts(num_tokens: int, gemm1_sms: int) -> tuple[Part, Part]:
    """Those of a full call."""
    problem = problem_of(num_tokens)
    chosen = session_config(problem, None)
    tile = chosen.tile_for(problem, num_tokens)
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


Compiled: TypeAlias = tuple[Part, compiler.CompiledKernel]


class SplitKernel:
    """Launches both kernels where a session launches one."""

    def __init__(self, compiled: Sequence[Compiled], streams: Streams) -> None:
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
        raise ValueError(f"the driver makes partitions of {sizes} SMs instead of {gemm1_sms} and the rest")
    streams = []
    for resource in (groups[0], rest):
        description = check(driver.cuDevResourceGenerateDesc([resource], 1))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = check(driver.cuGreenCtxCreate(description, device, int(flags)))
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        streams.append(torch.cuda.ExternalStream(int(check(driver.cuGreenCtxStreamCreate(context, int(flags), 0)))))
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


Layer: TypeAlias = dict[int, tuple[Compiled, Compiled]]
"""The two kernels of each split, by SMs of the first."""


def compile_all(tokens: Sequence[int], splits: Sequence[int]) -> dict[int, Layer]:
    """By token count."""
    pairs = {(number, sms): parts(number, sms) for number in tokens for sms in splits}
    with ProcessPoolExecutor() as pool:
        codes = pool.map(Part.compile, (part for pair in pairs.values() for part in pair))
        compiled = {key: ((pair[0], next(codes)), (pair[1], next(codes))) for key, pair in pairs.items()}
    return {number: {sms: compiled[number, sms] for sms in splits} for number in tokens}


def measure(context: RankContext, repeats: int, green: bool, layers: dict[int, Layer]) -> None:
    """Reports a row per token count."""
    faulthandler.enable()
    context.join_gpus(context.gpu)
    streams = {}
    for sms in sorted({sms for layer in layers.values() for sms in layer}):
        try:
            streams[sms] = green_streams(sms) if green else (torch.cuda.Stream(), torch.cuda.Stream())
        except (MegaMoEError, ValueError) as error:
            context.report({"green": green, "gemm1_sms": sms, "failed": str(error)})
    problem = problem_of(8)  # weights suit all
    weights = prepare(make_experts(problem, 0), problem, context.gpu)
    for num_tokens, layer in layers.items():
        context.report({"green": green, **measure_layer(num_tokens, layer, streams, weights, repeats)})
    dist.destroy_process_group()


def measure_layer(
    num_tokens: int, layer: Layer, streams: dict[int, Streams], weights: PreparedWeights, repeats: int
) -> dict[str, object]:
    """A split that fails is left out: the others go on, if the GPU does."""
    problem, backend = problem_of(num_tokens), CudaBackend()
    plan = backend.plan(problem)
    tile = plan.config.tile_for(problem, num_tokens).name
    inputs = partial(make_inputs, problem, num_tokens=num_tokens, routing_name="uniform", rank=0)
    rounds = [inputs(seed=seed) for seed in range(NUM_ROUTINGS)]
    outs, contenders, failed = {}, {}, {}
    with ExitStack() as stack:
        splits = [sms for sms in layer if sms in streams]
        sessions = {name: stack.enter_context(backend.open(plan)) for name in ("fused", *map(str, splits))}
        sessions["fused"].warmup()
        for sms in splits:
            sessions[str(sms)]._kernels[tile] = SplitKernel(layer[sms], streams[sms])
        for name, session in sessions.items():
            out = torch.empty_like(rounds[0].hidden_states)
            contender = direct(session, weights, rounds, out)
            try:
                contender.call()
                torch.cuda.synchronize()
                session.check()
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
            else:
                outs[name], contenders[name] = out, contender
        same = [name for name, out in outs.items() if torch.equal(out, outs["fused"])]
        contenders["fused, from a graph"] = captured(sessions["fused"], weights, rounds, quantized=True)
        seconds = time_interleaved(contenders, repeats=repeats, barrier=barrier())
        for name in outs:
            sessions[name].check()
    us = {name: round(Timing.of([times]).us_median, 1) for name, times in seconds.items()}
    return {"num_tokens": num_tokens, "tile": tile, "us_median": us, "same_bits": same, "failed": failed}


def print_row(_: int, row: object) -> None:
    print(json.dumps(row), flush=True)


def run(layers: dict[int, Layer], *, repeats: int, green: bool) -> None:
    """Measure, and print each row when it is there."""
    os.environ.setdefault("MEGAMOE_TIMEOUT_S", WAIT_S)
    run_ranks(measure, 1, repeats, green, layers, timeout_s=TIME_LIMIT_S, on_report=print_row)


def numbers(text: str) -> list[int]:
    """Of an argument, separated by commas."""
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="8,128,512,2048,8192", type=numbers)
    parser.add_argument("--gemm1-sms", default="80,88,96", type=numbers, help="GEMM1 has two thirds of the FLOPs")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--streams", action="store_true", help="two ordinary streams instead of green contexts")
    arguments = parser.parse_args()
    run(compile_all(arguments.tokens, arguments.gemm1_sms), repeats=arguments.repeats, green=not arguments.streams)


if __name__ == "__main__":
    main()

"""Seeded faults in the kernel's headers. Each that changes results must be caught by a comparison with the reference.

    python mutations.py [name ...]      # on a machine with a Hopper GPU; exit 1 where a fault goes unnoticed

Each mutant is compiled from a copy of the headers and runs in a process of its own: some corrupt memory, some hang
until the watchdog ends them. `none` is the kernel as it is, and must pass.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from edits import Edit, edited_headers, spin, use_headers

from megamoe.backend import VirtualRanks
from megamoe.errors import MegaMoEError
from megamoe.problem import ActFormat, MoEProblem, QuantMode, Transport
from megamoe.reference.staged import staged
from megamoe.tensors import ExpertWeights
from megamoe.testing.data import make_weights, shard, with_tensors
from megamoe.testing.tolerances import rel_l2, staged_bounds
from megamoe_cuda import backend
from megamoe_cuda.heuristics import tiles_of
from megamoe_cuda.jit import codegen

TIMEOUT_S = 3.0
PROCESS_LIMIT_S = 60.0  # most compile a kernel or two before the fault shows, the harmless ones all
MUTANTS_AT_ONCE = 8  # on one GPU, which they share in turns


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One fault: `old` becomes `new` in the header `file`, at its only place.

    `may_be_harmless`: why results may stay right without it, on this machine or at all; reported, not required.
    `slowed`: an edit beside the fault that holds up the thread which the fault no longer waits for. Alone it must pass.
    `test`: of the tests of what follows a failure, those that show it (`pytest -k`), where comparisons don't.
    `mode`: whose calls show it.
    """

    name: str
    file: str
    old: str
    new: str
    may_be_harmless: str = ""
    slowed: Edit | None = None
    test: str = ""
    mode: QuantMode = QuantMode.A8W8

    @property
    def edits(self) -> tuple[Edit, ...]:
        fault = Edit(file=self.file, old=self.old, new=self.new)
        return (fault,) if self.slowed is None else (fault, self.slowed)


MUTATIONS = (
    Mutation(
        name="clamp dropped",
        file="numerics/activation.cuh",
        old="gate = ptx::min_keep_nan(gate, cfg::kLimit);",
        new="",
    ),
    Mutation(
        name="gate and up swapped",
        file="roles/gemm1_epilogue.cuh",
        old="activate(values[8 * p + i], values[8 * p + 4 + i])",
        new="activate(values[8 * p + 4 + i], values[8 * p + i])",
    ),
    Mutation(
        name="A2 scale of 64 channels",
        file="roles/gemm1_epilogue.cuh",
        old="    amax_bits[0] = max(amax_bits[0], others[0]);\n",
        new="",
    ),
    Mutation(
        name="activation scale dropped",
        file="pipeline/main_loop.cuh",
        old="{load_row_scale(stage, 0), load_row_scale(stage, 8)}",
        new="{1.f, load_row_scale(stage, 8)}",
    ),
    Mutation(
        name="weight scale of gate used for up",
        file="roles/load.cuh",
        old="kGemm1Rows + tile.n_tile) * k_blocks;",
        new="tile.n_tile) * k_blocks;",
    ),
    Mutation(
        name="weight scales not announced",
        file="roles/load.cuh",
        old="num_bytes + (in_bulk ? 2 * rows.num_bytes : 0)",
        new="num_bytes",
    ),
    Mutation(
        name="weight scales overwritten while they are read",
        file="pipeline/tile_queue.cuh",
        old="turn % kQueueSlots * (2 * cfg::kWeightScaleRowBytes)",
        new="turn * 0",
    ),
    Mutation(
        name="the other warpgroup's weight scale",
        file="pipeline/main_loop.cuh",
        old="return is_gemm2 ? MathThread::identify().warpgroup /",
        new="return is_gemm2 ? (MathThread::identify().warpgroup ^ 2 / kSwappedHalves) /",
    ),
    Mutation(
        name="a stage taken for full when it is not",
        file="pipeline/stage_reader.cuh",
        old="position.phase ^ wraps)",
        new="position.phase ^ !wraps)",
        slowed=Edit(
            file="roles/load.cuh",
            old="        load(position.stage, ring.full(position), k);\n",
            new=spin(5_000) + "        load(position.stage, ring.full(position), k);\n",
        ),
    ),
    Mutation(
        name="router weight dropped",
        file="roles/gemm2_epilogue.cuh",
        old="ptx::pack_bf16x2(__fmul_rn(pair[0], weight[i & 1]), __fmul_rn(pair[1], weight[i & 1]))",
        new="ptx::pack_bf16x2(pair[0], pair[1])",
    ),
    Mutation(
        name="swapped operands: gate and up swapped",
        file="roles/swapped_epilogues.cuh",
        old="activate(pair[0], pair[2])",
        new="activate(pair[2], pair[0])",
    ),
    Mutation(
        name="swapped operands: A2 scale of 64 channels",
        file="roles/swapped_epilogues.cuh",
        old="max_over_lanes<StagedRows<kChannels>::kReaders>(amax_bits)",
        new="max_over_lanes<StagedRows<kChannels>::kReaders / 2>(amax_bits)",
    ),
    Mutation(
        name="swapped operands: a row's scale used for its neighbour",
        file="pipeline/swapped_loop.cuh",
        old="{__fmul_rn(row[0], gate), __fmul_rn(row[1], gate),",
        new="{__fmul_rn(row[0], gate), __fmul_rn(row[0], gate),",
    ),
    Mutation(
        name="swapped operands: router weight dropped",
        file="roles/swapped_epilogues.cuh",
        old="values[i] = __fmul_rn(values[i], meta.weight);",
        new=";",
    ),
    Mutation(
        name="the last copy of activations left out",
        file="roles/load.cuh",
        old="ceil_div(tile.num_rows, cfg::kBoxRows) * cfg::kBoxRows;",
        new="max(tile.num_rows / cfg::kBoxRows, 1u) * cfg::kBoxRows;",
    ),
    Mutation(
        name="transport scale rounded down",
        file="numerics/e8m0.cuh",
        old="((amax_bits & 0x7fffffu) > 0x600000u ? 1 : 0)",
        new="0",
    ),
    Mutation(
        name="scale of a zero block is zero",
        file="numerics/fp8_block.cuh",
        old="constexpr float kAmaxFloor = 1e-10f;",
        new="constexpr float kAmaxFloor = 0.f;",
    ),
    Mutation(
        name="-1 taken for an expert",
        file="roles/route.cuh",
        old="return valid ? static_cast<uint32_t>(id) : kNoExpert;",
        new="return valid ? static_cast<uint32_t>(id) : 0;",
    ),
    Mutation(
        name="counters not cleared",
        file="roles/stage.cuh",
        old="i < cfg::kCounterWords; i += kThreadsPerRank) counters[i] = 0;",
        new="i < cfg::kCounterWords; i += kThreadsPerRank) (void)counters;",
    ),
    Mutation(
        name="a tile not published",
        file="roles/publish.cuh",
        old="if (!is_awaited || ring.gave_up()) continue;",
        new="if (!is_awaited || ring.gave_up() || turn == 0) continue;",
    ),
    Mutation(
        name="a tile published before it is stored",
        file="roles/publish.cuh",
        old="queue.await_end_of_tile(turn);",
        new="ptx::mbarrier_arrive(queue.done(turn));",
    ),
    Mutation(
        name="a tile published without a release",
        file="roles/publish.cuh",
        old="ptx::red_add_release_gpu(flags + tile.block, tile.arrivals());",
        new="atomicAdd(flags + tile.block, tile.arrivals());",
        may_be_harmless="stores have mostly reached the L2 cache when the math warps' arrivals are seen",
    ),
    Mutation(
        name="row maxima overwritten while they are read",
        file="roles/gemm1_epilogue.cuh",
        old="    ptx::named_barrier_sync(kMathBarrier, kMathThreads);  // those of the tile before have been read\n",
        new="",
        may_be_harmless="a tile of more K blocks than stages ends only after all warps have begun it",
    ),
    Mutation(
        name="rows not waited for",
        file="roles/load.cuh",
        old="const uint32_t target = tile.is_gemm2 ? cfg::kGemm1Arrivals : tile.block_rows;",
        new="const uint32_t target = tile.is_gemm2 ? cfg::kGemm1Arrivals : 0;",
    ),
    Mutation(
        name="ring slots not waited for",
        file="roles/dispatch.cuh",
        old="if (!cfg::kRingWraps || block < cfg::kRingBlocks) return true;",
        new="return true;",
        slowed=Edit(  # GEMM1 of the first block, whose rows those of a later block overwrite
            file="roles/load.cuh",
            old="        if (tile.is_end()) return;\n",
            new=f"        if (tile.is_end()) return;\nif (!tile.is_gemm2 && tile.block == 0) {{\n{spin(200_000)}}}\n",
        ),
    ),
    Mutation(
        name="finish not waited for",
        file="roles/combine.cuh",
        old="done = wait_until(cta.watchdog(), Phase::kCombine, owner, owner, cta.epoch,",
        new="done = wait_until(cta.watchdog(), Phase::kCombine, owner, owner, cta.epoch - 1,",
    ),
    Mutation(
        name="combine: the next piece's rows",
        file="roles/combine.cuh",
        old="LaneColumns::load(row(turn, k))",
        new="LaneColumns::load(row(turn + 1, k))",
    ),
    Mutation(
        name="fence before bulk reads of A2 dropped",
        file="roles/gemm1_epilogue.cuh",
        old="    ptx::fence_proxy_async_global();  // GEMM2 reads A2 with bulk copies\n",
        new="",
        may_be_harmless="the loader fences too, behind its acquire",
    ),
    Mutation(
        name="a launch behind a failed call takes part",
        file="symm/cta.cuh",
        old='"r"(aborted ? 0 : 1)',
        new='"r"(1)',
        test="behind_a_timed_out_call",
    ),
    Mutation(
        name="a rank that gives up tells nobody",
        file="roles/combine.cuh",
        old="if (math_thread < cfg::kNumRanks && math_thread != cta.rank) {",
        new="if (false) {",
        test="tells_its_peers",
    ),
    Mutation(
        name="counts of peers not checked",
        file="schedule/pool_plan.cuh",
        old="if (rows <= kMaxPicks) return true;",
        new="return true;",
        test="impossible_counts",
    ),
    Mutation(
        name="cluster: stages given back to the own CTA only",
        file="pipeline/stage_reader.cuh",
        old="if (condition && alive && peer_empty != 0) ptx::mbarrier_arrive_in_cluster(peer_empty + 8 * stage);",
        new="if (condition && peer_empty != 0) ptx::mbarrier_arrive(ring.empty(stage));",
        mode=QuantMode.BF16,
        # The other CTA has read the stage and loads the next into both, while this one has not begun to read.
        slowed=Edit(
            file="pipeline/main_loop_bf16.cuh",
            old="        await_full(stage);\n",
            new=f"        await_full(stage);\nif (stage == 2 && rank_in_cluster() == 1) {{\n{spin(20_000)}}}\n",
        ),
    ),
    Mutation(
        name="cluster: empty stages count one CTA's warps",
        file="pipeline/ring.cuh",
        old="cfg::kMathWarps * cfg::kClusterSize",
        new="cfg::kMathWarps",
        mode=QuantMode.BF16,
    ),
    Mutation(
        name="cluster: weights not multicast",
        file="roles/load.cuh",
        old="constexpr uint16_t kAllCtas = (1 << cfg::kClusterSize) - 1;",
        new="const uint16_t kAllCtas = 1 << rank_in_cluster();",
        mode=QuantMode.BF16,
    ),
    Mutation(
        name="cluster: the other CTA's half of the weights",
        file="roles/load.cuh",
        old="row + own * kRows, full, kAllCtas",
        new="row + (own ^ 1) * kRows, full, kAllCtas",
        mode=QuantMode.BF16,
    ),
    Mutation(
        name="cluster: a claim read before it came",
        file="pipeline/cluster.cuh",
        old="leads ? phase ^ 1 : phase)",
        new="phase ^ 1)",
        mode=QuantMode.BF16,
    ),
    Mutation(
        name="cluster: a claim sent over one that was not taken",
        file="pipeline/cluster.cuh",
        old="if (!wait_mbarrier(cta.watchdog().secondary(), Phase::kPipeline, cta.rank, leads ? taken()",
        new="if (!leads && !wait_mbarrier(cta.watchdog().secondary(), Phase::kPipeline, cta.rank, leads ? taken()",
        mode=QuantMode.BF16,
        # Of two claims with no tile between them, the second is sent while the other CTA has not asked for the first.
        slowed=Edit(
            file="pipeline/cluster.cuh",
            old="        else ptx::mbarrier_arrive_expect_tx(sent(), sizeof(unit));\n",
            new=f"        else {{\n{spin(100_000)}ptx::mbarrier_arrive_expect_tx(sent(), sizeof(unit));\n}}\n",
        ),
    ),
    Mutation(
        name="cluster: flags of a short block raised once",
        file="schedule/units.cuh",
        old="return cfg::kClusterSize == 1 || shares_weights() ? 1 : cfg::kClusterSize;",
        new="return 1;",
        mode=QuantMode.BF16,
    ),
    Mutation(
        name="cluster: both CTAs take the first one's rows",
        file="schedule/units.cuh",
        old="            tile.ring_slot += rank;\n",
        new="",
        mode=QuantMode.BF16,
    ),
    Mutation(
        name="cluster: CTAs don't meet before they write to each other",
        file="sm90_mega_moe.cuh",
        old="        ptx::cluster_arrive();\n        ptx::cluster_wait();\n",
        new="",
        mode=QuantMode.BF16,
        may_be_harmless="nobody has counts before all CTAs set up their barriers (Join::kRouted)",
    ),
    Mutation(
        name="cluster: a CTA ends before its peer",
        file="roles/math.cuh",
        old="    if constexpr (kInCluster) ptx::cluster_wait();\n",
        new="",
        mode=QuantMode.BF16,
        # Where nothing fails, Join::kFinished keeps both CTAs.
        test="writes_late",
        may_be_harmless="no other kernel has that shared memory before the launch ends, and an H200 reports nothing",
    ),
    Mutation(
        name="scratch not fenced before bulk copies overwrite it",
        file="sm90_mega_moe.cuh",
        old="    ptx::fence_proxy_async_shared();\n",
        new="",
        may_be_harmless="what was stored before the barrier has reached shared memory",
    ),
    Mutation(
        name="converters: operands not fenced",
        file="roles/convert.cuh",
        old="            ptx::fence_proxy_async_shared();\n",
        new="",
        mode=QuantMode.A8W4,
        may_be_harmless="a warp's stores have reached shared memory when it arrives",
    ),
    Mutation(
        name="converters: operands overwritten while they are read",
        file="roles/convert.cuh",
        old="if (!await_or_give_up(ring, ring.empty(previous % cfg::kNumStages), previous",
        new="if (previous == 0 && !await_or_give_up(ring, ring.empty(previous % cfg::kNumStages), previous",
        mode=QuantMode.A8W4,
    ),
    Mutation(
        name="converters: packed weights not waited for",
        file="roles/convert.cuh",
        old="if (!await_or_give_up(ring, ring.packed_full(packed.stage), packed.phase)) return;",
        new="",
        mode=QuantMode.A8W4,
    ),
    Mutation(
        name="converters: a stage is full after one warp",
        file="pipeline/ring.cuh",
        old="1 + (kConverts ? kConverterGroupWarps : 1)",
        new="2",
        mode=QuantMode.A8W4,
    ),
    Mutation(
        name="converters: a packed stage is empty after one warp",
        file="pipeline/ring.cuh",
        old="ptx::mbarrier_init(packed_empty(stage), kConverterGroupWarps);",
        new="ptx::mbarrier_init(packed_empty(stage), 1);",
        mode=QuantMode.A8W4,
    ),
    Mutation(
        name="converters: into the next buffer",
        file="roles/convert.cuh",
        old="converter.convert(packed.stage, block % cfg::kNumWeightBuffers);",
        new="converter.convert(packed.stage, (block + 1) % cfg::kNumWeightBuffers);",
        mode=QuantMode.A8W4,
    ),
    Mutation(
        name="weights in registers: the second of two stages not waited for",
        file="pipeline/register_loop.cuh",
        old="            loop.await_full(stages[i]);\n",
        new="            if (i == 0) loop.await_full(stages[i]);\n",
        mode=QuantMode.A8W4,
    ),
    Mutation(
        name="converted ahead: a tile's weights not waited for",
        file="roles/load.cuh",
        old="min(stages, cfg::kCtasPerRank) * kConverterGroupWarps,",
        new="0,",
        mode=QuantMode.A8W4,
        slowed=Edit(
            file="roles/convert_ahead.cuh",
            old="    if (stage >= stages) return;\n",
            new=f"    if (stage >= stages) return;\n{spin(50_000)}",
        ),
    ),
    Mutation(
        name="converted ahead: weights overwritten while they are read",
        file="roles/convert_ahead.cuh",
        old="if (before < max(cfg::kConvertedExperts, 1u)) return true;",
        new="return true;",
        mode=QuantMode.A8W4,
        slowed=Edit(  # the tiles of an expert whose slot another one gets
            file="roles/load.cuh",
            old="    ptx::fence_proxy_async_global();  // ordinary stores wrote what bulk copies read\n",
            new="    ptx::fence_proxy_async_global();\n    if (tile.expert == 0) {\n" + spin(100_000) + "}\n",
        ),
    ),
    Mutation(
        name="converters: both groups take every stage",
        file="roles/convert.cuh",
        old="if (kGroups > 1 && block % kGroups != group) continue;",
        new="",
        mode=QuantMode.A8W4,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Calls that are compared: a problem, tokens per rank, and what the inputs are like."""

    problem: MoEProblem
    num_tokens: int
    hot_rank: bool = False  # all picks on the last rank: its ring wraps
    flat_rows: bool = False  # every column of a pick's row is 1.9: a transport scale that is too small cuts it to 1.75


def cases(mode: QuantMode = QuantMode.A8W8) -> Iterator[Case]:
    """Calls of a mode. In mode bf16 the 100 tokens give clusters units without tiles, and 1,200 shared weights."""
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 512, "num_experts": 8, "top_k": 2, "ep_size": 2}
    sizes |= {"num_max_tokens_per_rank": 1200, "swiglu_limit": 1.5, "quant": mode}
    if mode is not QuantMode.A8W8:
        problem = MoEProblem(**sizes, act_format=ActFormat.FP8_1X128 if mode is QuantMode.A8W4 else None)
        yield Case(problem=problem, num_tokens=100)
        yield Case(problem=problem, num_tokens=1200, hot_rank=True)
        return
    for transport in Transport:
        problem = MoEProblem(**sizes, transport=transport)
        yield Case(problem=problem, num_tokens=100)
        yield Case(problem=problem, num_tokens=1200, hot_rank=True)
    problem = MoEProblem(**sizes, transport=Transport.FP8_BLOCKWISE_1X32)
    yield Case(problem=problem, num_tokens=100, flat_rows=True)


def inputs(case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gaussian rows, some of them zero, some with outliers; a tenth of the picks are -1."""
    rng = torch.Generator().manual_seed(rank)
    problem = case.problem
    hidden = torch.randn(case.num_tokens, problem.hidden_size, generator=rng)
    hidden[::7] *= 8
    hidden[3::11, :256] = 0
    hidden[5::13] = 0
    first = problem.first_expert(problem.ep_size - 1) if case.hot_rank else 0
    ids = torch.randint(first, problem.num_experts, (case.num_tokens, problem.top_k), generator=rng)
    ids[torch.rand(ids.shape, generator=rng) < 0.1] = -1
    return hidden.bfloat16().cuda(), ids.cuda(), torch.rand(ids.shape, generator=rng).cuda() - 0.3


def flat_w2(weights: ExpertWeights) -> ExpertWeights:
    """The same, but all of w2 is 0.02."""
    tensors = dict(weights.tensors())
    ones = torch.ones_like(tensors["w2_weight"].float()).to(torch.float8_e4m3fn)
    scale = torch.full_like(tensors["w2_weight_scale"], 0.02)
    return with_tensors(weights, tensors | {"w2_weight": ones, "w2_weight_scale": scale})


def one_flat_pick(
    problem: MoEProblem, hidden: list[torch.Tensor], ids: list[torch.Tensor], weights: list[ExpertWeights]
) -> list[torch.Tensor]:
    """Leaves each token its first pick; returns router weights that make its row 1.9 in every column.

    A row is a sum of A2. Where it all but cancels out, weights would scale up the noise of its terms: they are 0.
    """
    for each in ids:
        each[:, 1:] = -1
    with torch.device("cuda"):
        ones = [torch.ones(each.shape) for each in ids]
        outputs = staged(replace(problem, transport=Transport.BF16), hidden, ids, ones, weights).outputs
    values = [y[:, :1].float() for y in outputs]
    least = torch.cat(values).std()
    return [torch.where(v.abs() < least, 0.0, 1.9 / v).expand(each.shape).contiguous() for v, each in zip(values, ids)]


def fault_in(case: Case) -> str | None:
    """What a comparison finds wrong with the kernel, or None."""
    problem = case.problem
    whole = make_weights(problem, torch.device("cuda"))
    weights = shard(flat_w2(whole) if case.flat_rows else whole, problem.ep_size)
    hidden, ids, router = (list(part) for part in zip(*(inputs(case, rank) for rank in range(problem.ep_size))))
    if case.flat_rows:
        router = one_flat_pick(problem, hidden, ids, weights)
    with torch.device("cuda"):
        expected = torch.cat(staged(problem, hidden, ids, router, weights).outputs).float()
    cuda = backend.CudaBackend()
    for config in reversed(tiles_of(problem)):  # m256 before what has no clusters
        with cuda.open(cuda.plan(problem, config=config), VirtualRanks(), timeout_s=TIMEOUT_S) as session:
            prepared = [session.prepare(share) for share in weights]
            for call in range(4):  # both parities, and counters that were left behind
                try:
                    got = torch.cat(session.forward(hidden, ids, router, prepared)).float()
                    session.check()
                except MegaMoEError as error:
                    return f"{config}, call {call}: {error}"
                distance = rel_l2(got, expected)
                if not distance < staged_bounds(problem).y_rel_l2:
                    return f"{config}, call {call}: relL2 {distance:.3g}"
    return None


def run_mutant(headers: Path, mode: QuantMode) -> None:
    """Body of a mutant's process: prints the first fault that a case shows, as a JSON line."""
    use_headers(headers)
    backend.SEEN_RIGHT_ON = "under test"
    fault = next((fault for fault in map(fault_in, cases(mode)) if fault), None)
    print(json.dumps({"fault": fault}), flush=True)


def mutant(mutation: Mutation, directory: Path) -> Path:
    """Headers with the fault in them, in `directory`."""
    return edited_headers(mutation.edits, directory, mutation.name)


def failure_tests(headers: Path, names: str) -> None:
    """Body of a mutant's process: tests of what follows a failure."""
    use_headers(headers)
    tests = [str(Path(__file__).with_name(name)) for name in ("test_session_gpu.py", "test_stuck_gpu.py")]
    sys.exit(pytest.main(["-q", "-x", "--tb=line", "-p", "no:cacheprovider", "--timeout=30", "-k", names, *tests]))


def outcome(headers: Path, mode: QuantMode, test: str = "") -> str | None:
    """How the mutant was caught, or None."""
    command = [sys.executable, __file__, "--failures" if test else "--mutant", str(headers), test or mode.value]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"hung for {PROCESS_LIMIT_S:g} s"
    if test:
        failed = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
        return failed[0] if failed else f"tests ended with {run.returncode}" if run.returncode else None
    faults = [json.loads(line)["fault"] for line in run.stdout.splitlines() if line.startswith('{"fault"')]
    if run.returncode != 0:
        return f"crashed: {run.stderr.strip().splitlines()[-1] if run.stderr.strip() else run.returncode}"
    return next((fault for fault in faults if fault), None)


def without_faults(chosen: list[Mutation], directory: Path) -> Iterator[tuple[Path, QuantMode, str]]:
    """What must pass: every mode and test that shall show a fault, and the edits that only slow a mutant down."""
    yield from ((codegen.INCLUDE_DIR, mode, "") for mode in {each.mode for each in chosen if not each.test})
    if tests := " or ".join(each.test for each in chosen if each.test):
        yield codegen.INCLUDE_DIR, QuantMode.A8W8, tests
    for index, each in enumerate(chosen):
        if each.slowed is not None:
            yield edited_headers([each.slowed], directory / f"slowed-{index}", each.name), each.mode, ""


def main() -> None:
    if sys.argv[1:2] == ["--mutant"]:
        return run_mutant(Path(sys.argv[2]), QuantMode(sys.argv[3]))
    if sys.argv[1:2] == ["--failures"]:
        return failure_tests(Path(sys.argv[2]), sys.argv[3])
    chosen = [mutation for mutation in MUTATIONS if not sys.argv[1:] or mutation.name in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as directory:
        headers = [mutant(each, Path(directory) / str(index)) for index, each in enumerate(chosen)]
        missed = []
        with ThreadPoolExecutor(MUTANTS_AT_ONCE) as pool:
            untouched = [pool.submit(outcome, *each) for each in without_faults(chosen, Path(directory))]
            runs = {pool.submit(outcome, path, each.mode, each.test): each for each, path in zip(chosen, headers)}
            faults = [fault for fault in (run.result() for run in untouched) if fault]
            print(f"none: {faults or 'passes'}", flush=True)
            for run in as_completed(runs):
                mutation, caught = runs[run], run.result()
                print(f"{mutation.name}: {caught or f'NOT CAUGHT {mutation.may_be_harmless}'}", flush=True)
                if caught is None and not mutation.may_be_harmless:
                    missed.append(mutation.name)
    sys.exit(f"not caught: {', '.join(missed)}" if missed else bool(faults))


if __name__ == "__main__":
    main()

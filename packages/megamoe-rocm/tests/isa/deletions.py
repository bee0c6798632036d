"""Single instructions deleted from the product's kernels, one at a time: running what is left has to show it.

    python packages/megamoe-rocm/tests/isa/deletions.py benchmarks/results/deletions [KERNEL ...] [--sample 60]
    python packages/megamoe-rocm/tests/isa/deletions.py benchmarks/results/deletions --table

A kernel is executed in scenes: parts of a call of two ranks, with the kernels that it meets. What came before one is
executed once; each mutant starts from there, and everything that it leaves in memory is compared with what the whole
kernel leaves. Waits that end without their flag have scenes of their own. Tiles are those of small calls, m32, as they
are shipped; K is 2304 columns in the GEMM that is looked at, nine steps: the main loop goes round, its last trip and
the remainder are executed too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megamoe_rocm.aot.compiler import TRITON_VERSION
from megamoe_rocm.heuristics import buckets
from megamoe_rocm.isa import Program
from megamoe_rocm.isa.device import Device, Programs
from megamoe_rocm.isa.mutation import EQUIVALENT, Outcome, Report, delete_each, explain, kind_of, sites, watch
from megamoe_rocm.kernels.launch import GFX950
from megamoe_rocm.kernels.workspace import RankMemory

STEPS_AT_MOST = 4  # times what the whole kernel takes
LONG = 1 << 20  # patience that no run comes to the end of; to use another word for a time does
SEEDS = (1, 2, 3)
MORE_SEEDS = tuple(range(4, 16))  # for what these do not show, unless it is proven to be equivalent
MANY_SEEDS = tuple(range(16, 416))  # in one scene, for what has no reason then
HARNESS = Path(__file__).parents[1] / "kernels/interpreted/harness.py"


def load_harness() -> ModuleType:
    """The layer of the checks in Triton's interpreter."""
    spec = importlib.util.spec_from_file_location("interpreted_harness", HARNESS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def nothing(scene: Scene) -> None:
    """No change to memory."""


def give_up_first(scene: Scene) -> None:
    """Rank 1 has given this call up, and has told rank 0 so."""
    memory = scene.layer.memory[0]
    memory.words("abort")[1] = memory.words("epoch")[0] + 1


def lose_end(scene: Scene) -> None:
    """Rank 1 has not finished, for all that rank 0 knows."""
    memory = scene.layer.memory[0]
    memory.words("rank_finished")[1] = memory.words("epoch")[0]


def lose_end_and_give_up(scene: Scene) -> None:
    """Rank 1 has not finished, and has told rank 0 that it will not."""
    lose_end(scene)
    give_up_first(scene)


def give_up(scene: Scene) -> None:
    """A wait of each rank has given up."""
    for memory in scene.layer.memory:
        memory.words("status")[0] = 1


def lose_end_after_giving_up(scene: Scene) -> None:
    """Rank 1 has not finished, for all that rank 0 knows, which has given up before."""
    lose_end(scene)
    give_up(scene)


def lose_rows(scene: Scene) -> None:
    """The rows of each rank's first block never suffice."""
    for memory in scene.layer.memory:
        memory.words("counters").view(2, -1)[:, 0] = -(1 << 20)


def lose_rows_after_giving_up(scene: Scene) -> None:
    """They never suffice, and a wait of each rank has given up."""
    lose_rows(scene)
    give_up(scene)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A scene's name and what it is made of.

    Args:
        name: for records.
        first, last: kernels between which the scene plays; of `last`, every launch.
        changes: of the harness's problem.
        tokens: of each rank.
        absent: ranks that launch nothing in the scene.
        ahead: ranks that have run `first` before it.
        num_programs: of the persistent launches.
        patience: of waits, in units of 1024 instructions of all waves.
        prepare: changes memory before the scene.
        quantized: whether tokens come in the mode's format.
        stray_ids: whether some ids name no expert.
        many: whether it is run under MANY_SEEDS.
    """

    name: str
    first: str
    last: str
    changes: Mapping[str, Any]
    tokens: tuple[int, int] = (37, 9)
    absent: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()
    num_programs: int = 2
    patience: int = LONG
    prepare: Callable[[Scene], None] = nothing
    quantized: bool = False
    stray_ids: bool = False
    many: bool = False


class Scene:
    """Part of a call, ready to be run again and again with one kernel replaced.

    Args:
        harness: `load_harness()`.
        setting: which part.
        quant, transport: of the layer.
        programs: shared by the scenes of a kernel.
    """

    def __init__(self, harness: ModuleType, setting: Setting, quant: str, transport: str, programs: Programs) -> None:
        self.setting = setting
        self.programs = programs
        fields = {"num_experts": 2, "top_k": 1, "num_max_tokens_per_rank": 40} | dict(setting.changes)
        problem = harness.problem(quant=quant, transport=transport, **fields)
        self.layer = harness.Layer(
            problem=problem,
            tile=buckets()[0].tile,
            num_programs=setting.num_programs,
            patience=setting.patience,
            target=GFX950,
        )
        self.layout = self.layer.memory[0].layout
        device = Device(num_ranks=2, programs=programs)
        self.layer.memory = [
            RankMemory(
                self.layout, device.workspace(rank=rank, num_bytes=self.layout.num_bytes, arrays=self.layout.arrays)
            )
            for rank in range(2)
        ]
        for memory in self.layer.memory:
            memory.workspace.fill_(harness.FILL)
            memory.start(self.layer.last_epoch)
        inputs = harness.random_inputs(problem, setting.tokens, low=-1)
        if setting.stray_ids:
            for ids in inputs.topk_ids:
                ids[::7, 0] = problem.num_experts + 1
        if setting.quantized:
            inputs = harness.Inputs(
                hidden_states=[harness.as_format(problem, rows) for rows in inputs.hidden_states],
                topk_ids=inputs.topk_ids,
                topk_weights=inputs.topk_weights,
            )
        self.ids = inputs.topk_ids
        limits = [max(count - 2, 0) for count in setting.tokens]  # the rest is padding
        self.outs, launches = self.layer.launches(inputs, limits)
        names = [launch.kernel.__name__ for launch in launches[0]]
        begins = [names.index(setting.first) + (rank in setting.ahead) for rank in range(2)]
        end = len(names) - names[::-1].index(setting.last)
        device.run([queue[:begin] for queue, begin in zip(launches, begins, strict=True)])
        setting.prepare(self)
        self.launches = [
            [] if rank in setting.absent else queue[begin:end]
            for rank, (queue, begin) in enumerate(zip(launches, begins, strict=True))
        ]
        self.before = [tensor.clone() for tensor in self._tensors()]
        self.steps = device.run(self.launches)
        self.after = self._results()

    def is_right(self, program: Program, mutant: Program, seed: int) -> bool:
        """Run the scene with `mutant` in the place of `program`; whether memory is as the whole kernel leaves it."""
        device = Device(num_ranks=2, seed=seed, programs=self.programs.with_other(program, mutant))
        for tensor, content in zip(self._tensors(), self.before, strict=True):
            tensor.copy_(content)
        for rank, memory in enumerate(self.layer.memory):
            device.adopt(memory.workspace, rank=rank, arrays=self.layout.arrays)
        device.run(self.launches, max_steps=STEPS_AT_MOST * self.steps)
        return all(got.equal(right) for got, right in zip(self._results(), self.after, strict=True))

    def _tensors(self) -> list[Tensor]:
        return [*(memory.workspace for memory in self.layer.memory), *self.outs, self.layer.reports]

    def _results(self) -> list[Tensor]:
        """All that the kernels may write, with what they may choose put in order: picks' places among an expert's."""
        copies = [tensor.clone() for tensor in self._tensors()]
        for ids, copy in zip(self.ids, copies, strict=False):
            places = RankMemory(self.layout, copy).words("pick_places")
            flat = ids.flatten()
            for expert in flat.unique():
                picks = (flat == expert).nonzero().flatten()
                places[picks] = places[picks].sort().values
        # NaN's bits, not its value.
        return [copy.view(torch.int16) if copy.is_floating_point() else copy for copy in copies]


WIDE = {"hidden_size": 1280, "intermediate_size": 256}  # two programs along a row in the kernels that take 1024 columns
# More than the 64 experts a rank, and the 256 picks a program, that the kernels take at a time.
ROUTING = {"num_experts": 144, "top_k": 4, "hidden_size": 256, "num_max_tokens_per_rank": 104}
TWO_BLOCKS = {"hidden_size": 512, "intermediate_size": 256, "num_experts": 4}
COUNT, PUSH, PLAN, STAGE_1, STAGE_2, COMBINE = (
    "count_picks", "push_entries", "plan_blocks", "dispatch_gemm1", "gemm2_p2p", "combine_rows",
)  # fmt: skip

SETTINGS: Mapping[str, Sequence[Setting]] = {
    "quantize_input": [Setting(name="call", first="quantize_input", last="quantize_input", changes=WIDE)],
    "copy_input": [Setting(name="call", first="copy_input", last="copy_input", changes=WIDE, quantized=True)],
    COUNT: [Setting(name="call", first=COUNT, last=COUNT, changes=ROUTING, tokens=(103, 70), stray_ids=True)],
    PUSH: [Setting(name="call", first=PUSH, last=PLAN, changes=ROUTING, tokens=(103, 70), many=True)],
    PLAN: [
        Setting(name="call", first=PUSH, last=PLAN, changes=ROUTING, tokens=(103, 70), many=True),
        Setting(name="late", first=PUSH, last=PLAN, changes=ROUTING, tokens=(103, 70), absent=(1,), patience=3),
        Setting(
            name="aborted", first=PUSH, last=PLAN, changes=ROUTING, tokens=(103, 70), absent=(1,),
            prepare=give_up_first,
        ),
        Setting(
            name="given up", first=PUSH, last=PLAN, changes=ROUTING, tokens=(103, 70), absent=(1,), prepare=give_up,
        ),
    ],
    STAGE_1: [
        Setting(name="call", first=STAGE_1, last=STAGE_1, changes={"hidden_size": 2304, "intermediate_size": 256}),
        Setting(
            name="late", first=STAGE_1, last=STAGE_1, changes={"hidden_size": 512, "intermediate_size": 256},
            tokens=(20, 5), patience=60, prepare=lose_rows,
        ),
        # A block of few rows waits for less than the number of a ticket, which is in LDS before.
        Setting(name="few rows", first=STAGE_1, last=STAGE_1, changes=TWO_BLOCKS, tokens=(2, 1)),
        Setting(
            name="one row", first=STAGE_1, last=STAGE_1, changes={"hidden_size": 512, "intermediate_size": 256},
            tokens=(3, 2), many=True,
        ),
        Setting(  # one program: its rows are there, whether it waits for them or not
            name="given up", first=STAGE_1, last=STAGE_1, changes=TWO_BLOCKS, tokens=(20, 5), num_programs=1,
            prepare=lose_rows_after_giving_up,
        ),
    ],
    STAGE_2: [
        Setting(name="call", first=STAGE_2, last=COMBINE, changes={"hidden_size": 256, "intermediate_size": 2304}),
        Setting(
            name="given up", first=STAGE_2, last=STAGE_2, changes=TWO_BLOCKS, prepare=give_up,
        ),
    ],
    COMBINE: [
        Setting(name="alone", first=COMBINE, last=COMBINE, changes=WIDE | {"top_k": 2}, tokens=(12, 9)),
        Setting(name="call", first=STAGE_2, last=COMBINE, changes=WIDE | {"top_k": 2}, tokens=(12, 9), many=True),
        Setting(
            name="late", first=COMBINE, last=COMBINE, changes=WIDE, tokens=(12, 9), absent=(1,), patience=3,
            prepare=lose_end,
        ),
        Setting(
            name="aborted", first=COMBINE, last=COMBINE, changes=WIDE, tokens=(12, 9), absent=(1,),
            prepare=lose_end_and_give_up,
        ),
        Setting(
            name="given up", first=COMBINE, last=COMBINE, changes=WIDE, tokens=(12, 9), absent=(1,),
            prepare=lose_end_after_giving_up,
        ),
    ],
}  # fmt: skip
MODES = (("a4w4", "fp8_blockwise_1x32"), ("a8w4", "bf16"))
# Those whose code does not depend on the mode.
ONE_MODE = frozenset(("copy_input", COUNT, PUSH, PLAN))


# Why a kernel may do without an instruction, by mnemonic, or by its text where registers tell it apart; with a cache
# operation goes its wait. It is deleted all the same: where one of several is needed, its deletion is noticed.
PUBLISHES = "equivalent: it moves those that publish to the first lanes, where they are"
RARE = "shows only where a flag is raised after the launch began and before its first look: in none of these schedules"
ITS_OWN = "equivalent: only the lane that has the value already uses it"
ARRIVES = "equivalent: the wave waits for its stores once more where it arrives"
ARGUED: Mapping[tuple[str, str], str] = {
    (COUNT, "buffer_wbl2"): "equivalent: later launches read what it stored; its last program reads what atomics did",
    (PUSH, "buffer_inv"): "equivalent: what is read after it, earlier launches have written",
    (PUSH, "s_waitcnt vmcnt(0)"): ARRIVES,
    (PLAN, "ds_read_b32 v5, v6"): ITS_OWN,
    (STAGE_1, "buffer_inv"): "outside of the model: a launch begins with all that was in memory then",
    (STAGE_1, "s_waitcnt vmcnt(0)"): ARRIVES,
    (STAGE_2, "buffer_inv"): "equivalent: it is followed by a read of status alone, past the caches",
    (STAGE_2, "ds_permute_b32"): PUBLISHES,
    (STAGE_2, "s_waitcnt vmcnt(0)"): ARRIVES,
    (COMBINE, "buffer_inv"): RARE,
    (COMBINE, "s_barrier"): "equivalent: it publishes that a wait has given up, and nothing else stored before is read",
    (COMBINE, "buffer_wbl2"): "equivalent: later launches and the host alone read what it stored",
    (COMBINE, "ds_read_b32 v5, v7"): ITS_OWN,
    (COMBINE, "ds_permute_b32"): PUBLISHES,
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """Deletions of one kernel in one mode."""

    kernel: str
    quant: str
    transport: str
    program: Program = field(repr=False)
    num_sites: int
    report: Report = field(repr=False)
    seconds: float

    def record(self) -> dict[str, Any]:
        """For a JSON file: figures, and every survivor with its reason."""
        executed = self.report.executed
        kinds = sorted({item.kind for item in executed})
        return {
            "kernel": self.kernel,
            "quant": self.quant,
            "transport": self.transport,
            "sha256": self.program.code.sha256,
            "triton": TRITON_VERSION,
            "sites": self.num_sites,
            "deleted": len(self.report.outcomes),
            "executed": len(executed),
            "noticed": len(executed) - len(self.report.survivors),
            "noticed_of_executed": {kind: _noticed([item for item in executed if item.kind == kind]) for kind in kinds},
            "seconds": round(self.seconds),
            "survivors": [{"instruction": item.instruction, "reason": item.reason} for item in self.report.survivors],
            "not_executed": [item.instruction for item in self.report.outcomes if item not in executed],
        }


def _noticed(outcomes: Sequence[Outcome]) -> str:
    return f"{sum(item.noticed for item in outcomes)} of {len(outcomes)}"


def delete(
    harness: ModuleType, kernel: str, quant: str, transport: str, sample: int | None, only: Sequence[str] | None = None
) -> Result:
    """Delete instructions of a kernel, all of them if `sample` is None; or `only` those, as records name them."""
    start = time.perf_counter()
    programs = Programs()
    scenes = [Scene(harness, setting, quant, transport, programs) for setting in SETTINGS[kernel]]
    (program,) = (item for item in programs.loaded() if item.code.name == kernel)

    def subject(mutant: Program, seed: int) -> bool:
        return all(scene.is_right(program, mutant, seed) for scene in scenes)

    known = reasons(program, subject)
    indices = sites(program, sample=sample, seed=1)
    if only is not None:
        indices = [index for index in sites(program) if str(program.instructions[index]) in only]
    report = delete_each(program, subject, indices, seeds=SEEDS, reasons=known)
    unexplained = [item.index for item in report.survivors if item.reason not in EQUIVALENT]
    more = delete_each(program, subject, unexplained, seeds=MORE_SEEDS, reasons=known)
    many = many_schedules(program, scenes, [item.index for item in more.unexplained])
    again = {item.index: item for item in (*more.outcomes, *many)}
    return Result(
        kernel=kernel,
        quant=quant,
        transport=transport,
        program=program,
        num_sites=len(sites(program)),
        report=Report(kernel=kernel, outcomes=tuple(again.get(item.index, item) for item in report.outcomes)),
        seconds=time.perf_counter() - start,
    )


def many_schedules(program: Program, scenes: Sequence[Scene], indices: Sequence[int]) -> Sequence[Outcome]:
    """Delete in a scene in which all take part, under schedules that come about rarely."""
    if not indices:
        return ()
    (scene,) = (item for item in scenes if item.setting.many)

    def subject(mutant: Program, seed: int) -> bool:
        return mutant is program or scene.is_right(program, mutant, seed)

    outcomes = delete_each(program, subject, indices, seeds=MANY_SEEDS).outcomes
    return [outcome for outcome in outcomes if outcome.noticed]  # others need not be executed there


def reasons(program: Program, subject: Callable[[Program, int], bool]) -> dict[int, str]:
    """Why deletions may survive: what runs of the whole kernel show, what its code shows, and what was argued."""
    watched, seen = watch(program)
    for seed in SEEDS:
        assert subject(watched, seed)
    found = {**seen, **explain(program)}
    for at, item in enumerate(program.instructions):
        reason = ARGUED.get((program.code.name, item.mnemonic)) or ARGUED.get((program.code.name, item.text))
        if reason is not None:
            found.setdefault(at, reason)
            if kind_of(item) == "fence":
                found.setdefault(at + 1 if item.mnemonic == "buffer_wbl2" else at - 1, reason)  # its wait
    return found


def joined(earlier: dict[str, Any], result: Result) -> dict[str, Any]:
    """An earlier record whose survivors have been deleted again."""
    again = result.record()
    assert again["sha256"] == earlier["sha256"], "another code object: delete from it anew"
    by_kind = dict(earlier["noticed_of_executed"])
    for outcome in result.report.executed:
        if outcome.noticed:
            noticed, _, executed = by_kind[outcome.kind].partition(" of ")
            by_kind[outcome.kind] = f"{int(noticed) + 1} of {executed}"
    return {
        **earlier,
        "noticed": earlier["executed"] - len(again["survivors"]),
        "noticed_of_executed": by_kind,
        "seconds": earlier["seconds"] + again["seconds"],
        "survivors": again["survivors"],
    }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row a record, and one for all."""
    lines = [
        "| kernel | mode, transport | sites | deleted | executed | noticed | survivors proven | argued |",
        "|---|---|---|---|---|---|---|---|",
    ]
    keys = ("sites", "deleted", "executed", "noticed", "proven", "argued")
    rows = []
    for record in records:
        proven = sum(survivor["reason"] in EQUIVALENT for survivor in record["survivors"])
        argued = sum(bool(survivor["reason"]) for survivor in record["survivors"]) - proven
        rows.append([*(record[key] for key in keys[:4]), proven, argued])
        mode = f"{record['quant']}, {record['transport']}"
        lines.append(f"| `{record['kernel']}` | {mode} | {' | '.join(map(str, rows[-1]))} |")
    lines.append(f"| all | | {' | '.join(str(sum(column)) for column in zip(*rows, strict=True))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="one JSON file a kernel and mode")
    parser.add_argument("kernels", nargs="*", help="names; by default all")
    parser.add_argument("--sample", type=int, help="deletions of a kernel; by default every one")
    parser.add_argument("--quant", help="one mode only")
    parser.add_argument("--table", action="store_true", help="print what the folder has, and delete nothing")
    parser.add_argument("--again", action="store_true", help="only what survived: scenes or reasons have been added")
    arguments = parser.parse_args()
    if arguments.table:
        print(table([json.loads(path.read_text()) for path in sorted(arguments.folder.glob("*.json"))]))
        return
    torch.set_num_threads(1)
    harness = load_harness()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for kernel in arguments.kernels or SETTINGS:
        modes = [mode for mode in MODES if arguments.quant in (None, mode[0])]
        for quant, transport in modes[: 1 if kernel in ONE_MODE else None]:
            path = arguments.folder / f"{kernel}-{quant}-{transport}.json"
            earlier = json.loads(path.read_text()) if arguments.again else None
            only = [survivor["instruction"] for survivor in earlier["survivors"]] if earlier else None
            result = delete(harness, kernel, quant, transport, arguments.sample, only)
            print(result.report.table(), flush=True)
            record = joined(earlier, result) if earlier else result.record()
            path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

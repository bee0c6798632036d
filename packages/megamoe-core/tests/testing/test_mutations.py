"""Wrong backends must fail the matrix: each mutation breaks one stage of the reference and has to be caught.

The first four are those of docs/numerics.md. A mutation names the checks that it must fail; the unbroken reference
passes all of them on the same case, so that none of these tests can pass by a check that always fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.formats import FP8_1X128, ActivationFormat, Quantized, TransportFormat
from megamoe.problem import Activation
from megamoe.reference import executor, session
from megamoe.reference.backend import ReferenceBackend
from megamoe.schedule.protocol import CombineTokens, Gemm1
from megamoe.stages.route import Routing
from megamoe.stages.swiglu_quant import SwiGLU
from megamoe.tensors import PreparedWeights
from megamoe.testing import agent, checks
from megamoe.testing.cases import A4W4, A8W4, A8W8, BF16, Case, InputKind, Layer, Mode, build
from megamoe.testing.conformance import test_bits, test_calls, test_values, test_weights
from megamoe.testing.workbench import Workbench

REAL = {
    name: getattr(executor, name) for name in ("route", "gemm1", "swiglu_quant", "gemm2", "send_rows", "combine_tokens")
}
Replacements = dict[str, Any]


def per_64_scale() -> Replacements:
    """A2 rounded with a scale per 64 channels. What is stored stays per 128; GEMM2 reads the other values."""
    rounded: dict[bytes, Tensor] = {}

    def swiglu_quant(gate_up: Tensor, activation: SwiGLU, fmt: ActivationFormat) -> Quantized:
        stored: Quantized = REAL["swiglu_quant"](gate_up, activation, fmt)
        halves = activation(*gate_up.chunk(2, dim=-1)).unflatten(-1, (-1, 64))
        padded = torch.nn.functional.pad(halves, (0, 64))  # one 64-half to a 128-block: zeros do not move its scale
        values = FP8_1X128.quantize(padded.flatten(-2)).dequantize().unflatten(-1, (-1, 128))[..., :64].flatten(-2)
        rounded.update({_key(row): value for row, value in zip(stored.dequantize(), values)})
        return stored

    def gemm2(a2: Tensor, *rest: Any) -> Tensor:
        return REAL["gemm2"](torch.stack([rounded.get(_key(row), row) for row in a2]), *rest)

    return {"swiglu_quant": swiglu_quant, "gemm2": gemm2}


def _key(row: Tensor) -> bytes:
    return row.numpy().tobytes()


def dropped_clamp() -> Replacements:
    """`swiglu_limit` ignored."""

    def swiglu_quant(gate_up: Tensor, activation: SwiGLU, fmt: ActivationFormat) -> Quantized:
        return REAL["swiglu_quant"](gate_up, replace(activation, limit=None), fmt)

    return {"swiglu_quant": swiglu_quant}


def one_sided_clamp() -> Replacements:
    """up bounded from above only, as gate is."""

    def swiglu_quant(gate_up: Tensor, activation: SwiGLU, fmt: ActivationFormat) -> Quantized:
        assert activation.limit is not None
        gate, up = gate_up.clamp(max=activation.limit).chunk(2, dim=-1)
        return fmt.quantize(replace(activation, limit=None)(gate, up))

    return {"swiglu_quant": swiglu_quant}


def weight_before_a2() -> Replacements:
    """The router weight folded into the activation, before A2 is quantised, instead of into GEMM2's rows."""
    rows = threading.local()
    real_gemm1 = executor.RankExecutor._gemm1

    def _gemm1(self: Any, op: Any) -> None:
        first = op.block.slot * self.shape.block_m
        meta = self._memory.rows("pool_meta", torch.int32)[first : first + op.block.num_rows]
        rows.weights = executor.pad_rows(meta[:, 2].view(torch.float32))
        real_gemm1(self, op)

    def swiglu_quant(gate_up: Tensor, activation: SwiGLU, fmt: ActivationFormat) -> Quantized:
        return fmt.quantize(activation(*gate_up.chunk(2, dim=-1)) * rows.weights.unsqueeze(1))

    return {"swiglu_quant": swiglu_quant, "gemm2": _unweighted_gemm2, "_BODIES": {**executor._BODIES, Gemm1: _gemm1}}


def weight_after_transport() -> Replacements:
    """Rows travel unweighted, and the home rank weighs what it decodes."""

    def _combine_tokens(self: Any, op: Any) -> None:
        tokens = slice(op.first, op.first + op.num)
        wire = self._memory.rows("combine")[:, tokens, : self._transport.row_bytes(self.problem.hidden_size)]
        weights = self._arguments.topk_weights[tokens].masked_fill(~self._valid[tokens], 0).t().unsqueeze(2)
        self._arguments.out[tokens] = (self._transport.decode(wire) * weights).sum(0).to(torch.bfloat16)

    return {"gemm2": _unweighted_gemm2, "_BODIES": {**executor._BODIES, CombineTokens: _combine_tokens}}


def _unweighted_gemm2(a2: Tensor, w2: Tensor, w2_bias: Tensor | None, topk_weights: Tensor) -> Tensor:
    return REAL["gemm2"](a2, w2, w2_bias, torch.ones_like(topk_weights))


def weight_twice() -> Replacements:
    """The router weight applied to GEMM2's rows and once more."""

    def gemm2(a2: Tensor, w2: Tensor, w2_bias: Tensor | None, topk_weights: Tensor) -> Tensor:
        return REAL["gemm2"](a2, w2, w2_bias, topk_weights * topk_weights)

    return {"gemm2": gemm2}


def swapped_gate_and_up() -> Replacements:
    """silu(up) * gate."""

    def gemm1(*arguments: Any) -> Tensor:
        gate, up = REAL["gemm1"](*arguments).chunk(2, dim=-1)
        return torch.cat((up, gate), dim=-1)

    return {"gemm1": gemm1}


def scale_of_the_next_block() -> Replacements:
    """A2's scales off by one block."""

    def swiglu_quant(*arguments: Any) -> Quantized:
        a2: Quantized = REAL["swiglu_quant"](*arguments)
        assert a2.scales is not None
        return replace(a2, scales=a2.scales.roll(1, -1))

    return {"swiglu_quant": swiglu_quant}


def bf16_gate_up() -> Replacements:
    """GEMM1's accumulators rounded to BF16 on their way to the activation."""
    return {"gemm1": lambda *arguments: REAL["gemm1"](*arguments).bfloat16().float()}


def bf16_activation() -> Replacements:
    """The activation rounded to BF16 before A2 is quantised, as an unfused pipeline does."""

    def swiglu_quant(gate_up: Tensor, activation: SwiGLU, fmt: ActivationFormat) -> Quantized:
        return fmt.quantize(activation(*gate_up.chunk(2, dim=-1)).bfloat16().float())

    return {"swiglu_quant": swiglu_quant}


def masked_ids_are_expert_0() -> Replacements:
    """-1 taken for an index: the pick goes to expert 0, and its row is combined."""
    return {
        "route": lambda ids, weights, num_experts: REAL["route"](ids.clamp(min=0), weights, num_experts),
        "is_expert": lambda ids, num_experts: ids < num_experts,
    }


def stale_rows_of_masked_slots() -> Replacements:
    """Combine sums every slot, those without an expert too: what an earlier call left there."""
    return {"is_expert": lambda ids, num_experts: torch.ones_like(ids, dtype=torch.bool)}


def duplicates_merged() -> Replacements:
    """An expert that a row names twice is computed once."""

    def route(ids: Tensor, weights: Tensor, num_experts: int) -> Routing:
        repeats = torch.zeros_like(ids, dtype=torch.bool)
        for slot in range(1, ids.shape[1]):
            repeats[:, slot] = (ids[:, :slot] == ids[:, slot : slot + 1]).any(-1)
        return REAL["route"](ids.masked_fill(repeats, -1), weights, num_experts)

    return {"route": route}


def next_slot() -> Replacements:
    """Rows land in the slot after their own."""

    def send_rows(wire: Tensor, picks: Tensor, combine: Tensor) -> None:
        top_k = combine.shape[0]
        REAL["send_rows"](wire, picks - picks % top_k + (picks + 1) % top_k, combine)

    return {"send_rows": send_rows}


def one_lost_row() -> Replacements:
    """One row in hundreds is never sent: too small for a measure over the whole output."""

    def send_rows(wire: Tensor, picks: Tensor, combine: Tensor) -> None:
        kept = picks != 17
        REAL["send_rows"](wire[kept], picks[kept], combine)

    return {"send_rows": send_rows}


def bias_after_weight() -> Replacements:
    """w2's bias added after the router weight."""

    def gemm2(a2: Tensor, w2: Tensor, w2_bias: Tensor | None, topk_weights: Tensor) -> Tensor:
        assert w2_bias is not None
        return REAL["gemm2"](a2, w2, None, topk_weights).add_(w2_bias)

    return {"gemm2": gemm2}


def bias_dropped() -> Replacements:
    """w13's bias forgotten."""
    return {"gemm1": lambda x, w13, bias: REAL["gemm1"](x, w13, None)}


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One way of being wrong.

    Args:
        make: what it puts in place of functions of the reference's executor.
        mode: quant mode.
        caught_by: checks that must fail.
        fields: of the case.
    """

    make: Callable[[], Replacements]
    mode: Mode
    caught_by: tuple[str, ...]
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        transport = "-fp8p2p" if "transport" in self.fields else ""
        return f"{self.make.__name__}-{self.mode.id}{transport}"

    def case(self) -> Case:
        fields = {"tokens": (48, 21), **self.fields}
        return build(Layer.EDGE, "mutation", self.mode, device_class="cpu", **fields)


FP8_P2P = {"transport": "fp8_blockwise_1x32"}
LIMIT = {"swiglu_limit": 10.0, "inputs": InputKind.OUTLIERS}
MUTATIONS = [
    # The four of docs/numerics.md.
    Mutation(make=per_64_scale, mode=A8W8, caught_by=("staged",)),
    Mutation(make=per_64_scale, mode=A8W8, caught_by=("staged",), fields=FP8_P2P),
    Mutation(make=dropped_clamp, mode=A8W8, caught_by=("staged", "taps"), fields=LIMIT),
    Mutation(make=dropped_clamp, mode=A4W4, caught_by=("staged", "taps"), fields=LIMIT),
    Mutation(make=weight_before_a2, mode=A8W8, caught_by=("taps",)),  # FP32 scales absorb it: the output can't show it
    Mutation(make=weight_before_a2, mode=A8W8, caught_by=("staged", "taps"), fields={"expert_bias": True}),
    Mutation(make=weight_before_a2, mode=A8W4, caught_by=("staged", "taps")),
    Mutation(make=weight_before_a2, mode=BF16, caught_by=("taps",)),
    Mutation(make=weight_after_transport, mode=A8W8, caught_by=("staged", "taps"), fields=FP8_P2P),
    Mutation(make=weight_after_transport, mode=A8W8, caught_by=("taps",)),
    Mutation(make=swapped_gate_and_up, mode=A8W8, caught_by=("oracle", "staged", "taps")),
    Mutation(make=swapped_gate_and_up, mode=A4W4, caught_by=("oracle", "staged", "taps")),
    # More.
    Mutation(
        make=swapped_gate_and_up,
        mode=A8W8,
        caught_by=("oracle", "staged", "taps"),
        fields={"activation": Activation.SWIGLU_OAI},
    ),
    Mutation(make=one_sided_clamp, mode=A8W8, caught_by=("staged", "taps"), fields=LIMIT),
    Mutation(make=weight_twice, mode=A8W8, caught_by=("oracle", "staged", "taps")),
    Mutation(make=scale_of_the_next_block, mode=A8W8, caught_by=("oracle", "staged", "taps")),
    Mutation(make=scale_of_the_next_block, mode=A8W4, caught_by=("oracle", "staged", "taps")),
    Mutation(make=scale_of_the_next_block, mode=A4W4, caught_by=("staged", "taps")),
    Mutation(make=bf16_gate_up, mode=A8W8, caught_by=("taps",)),
    Mutation(make=bf16_activation, mode=A8W8, caught_by=("taps",)),
    Mutation(make=masked_ids_are_expert_0, mode=A8W8, caught_by=("counts", "oracle", "staged", "taps"),
             fields={"routing": "masked_some"}),
    Mutation(make=masked_ids_are_expert_0, mode=A8W8, caught_by=("shape",), fields={"routing": "masked_rows"}),
    Mutation(make=stale_rows_of_masked_slots, mode=A8W8, caught_by=("oracle", "staged"),
             fields={"routing": "masked_some"}),
    Mutation(make=duplicates_merged, mode=A8W8, caught_by=("counts", "oracle", "staged"),
             fields={"routing": "duplicates"}),
    Mutation(make=next_slot, mode=A8W8, caught_by=("oracle", "staged"), fields={"routing": "masked_some"}),
    Mutation(make=one_lost_row, mode=A8W8, caught_by=("oracle", "staged"), fields={"tokens": (400, 400)}),
    Mutation(make=bias_after_weight, mode=A8W8, caught_by=("oracle", "staged", "taps"), fields={"expert_bias": True}),
    Mutation(make=bias_dropped, mode=A8W8, caught_by=("oracle", "staged", "taps"), fields={"expert_bias": True}),
]  # fmt: skip


@pytest.fixture(scope="module")
def workbench() -> Workbench:
    return Workbench(ReferenceBackend(), torch.device("cpu"), "virtual", (1, 2))


def failed_checks(workbench: Workbench, case: Case) -> set[str]:
    """Run the case as the matrix does, after a call with other tokens, and name the checks that fail."""
    problem = case.problem
    weights, calls = workbench.weights(case), workbench.calls(case)
    with workbench.open(problem) as session:
        prepared = session.prepare(workbench.shards(case))
        session.keep_taps()
        full = [
            replace(call, topk_ids=call.topk_ids.clamp(0, problem.num_experts - 1))
            for call in workbench.calls(case, round_=1)
        ]
        session.forward(full, prepared)  # leaves rows in every slot
        outputs = session.forward(calls, prepared)
        counts, taps = session.receive_counts(), session.taps()
    staged = workbench.staged(problem, weights, calls)
    oracle = workbench.oracle(problem, weights, calls)
    of_name: dict[str, Callable[[], None]] = {
        "shape": lambda: checks.check_shape(problem, calls, outputs),
        "oracle": lambda: checks.check_oracle(problem, outputs, oracle),
        "staged": lambda: checks.check_staged(problem, outputs, staged.outputs),
        "taps": lambda: checks.check_taps(problem, taps, staged.taps),
        "counts": lambda: checks.check_receive_counts(problem, calls, counts),
    }
    failed = set()
    for name, check in of_name.items():
        try:
            check()
        except AssertionError:
            failed.add(name)
    return failed


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.id)
def test_mutation_is_caught(workbench: Workbench, mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    case = mutation.case()
    allowed = {"oracle"} if case.inputs is InputKind.OUTLIERS else set()
    assert failed_checks(workbench, case) <= allowed, "the unbroken reference fails"
    for name, replacement in mutation.make().items():
        monkeypatch.setattr(f"megamoe.reference.executor.{name}", replacement)
    assert failed_checks(workbench, case) >= set(mutation.caught_by)


def reversed_slots() -> Replacements:
    """Slots summed from the last to the first: other bits in a few places, where rows nearly cancel."""

    def combine_tokens(wire: Tensor, valid: Tensor, *rest: Any) -> Tensor:
        return REAL["combine_tokens"](wire.flip(0), valid.flip(1), *rest)

    return {"executor.combine_tokens": combine_tokens}


def masked_slots_times_zero() -> Replacements:
    """Slots without an expert multiplied by 0 instead of left out: NaN times 0 is NaN."""

    def combine_tokens(wire: Tensor, valid: Tensor, transport: TransportFormat, hidden_size: int) -> Tensor:
        return (transport.decode(wire) * valid.t().unsqueeze(2)).sum(0).to(torch.bfloat16)

    return {"executor.combine_tokens": combine_tokens}


def bits_of_the_tile() -> Replacements:
    """A row's bits depend on how many rows its expert has, as with a K split chosen by tile shape."""

    def gemm1(x: Tensor, *rest: Any) -> Tensor:
        return REAL["gemm1"](x, *rest).mul_(1 + x.shape[0] * 2.0**-20)

    return {"executor.gemm1": gemm1}


def cut_ids() -> Replacements:
    """int64 ids cut to 32 bits."""
    return {"executor.route": lambda ids, *rest: REAL["route"](ids.int(), *rest),
            "executor.is_expert": lambda ids, num_experts: (ids.int() >= 0) & (ids.int() < num_experts)}  # fmt: skip


def signed_scale_bytes() -> Replacements:
    """E8M0 bytes loaded as signed: those from 128 on turn into tiny powers of two."""

    def pull_rows(source: Tensor, picks: Tensor, top_k: int, out: Tensor) -> None:
        executor_pull_rows(source, picks, top_k, out=out)
        if out.shape[1] < 64:  # scales, not payload
            out.copy_(out.view(torch.int8).clamp(min=0).view(torch.uint8))

    return {"executor.pull_rows": pull_rows}


def copied_expert_tensors() -> Replacements:
    """`expert_tensors` hands out copies: a moved expert is moved nowhere."""

    def expert_tensors(prepared: PreparedWeights) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in prepared.tensors.items()}

    return {"agent.expert_tensors": expert_tensors}


def padding_is_computed() -> Replacements:
    """`num_tokens` ignored."""
    real = session.ReferenceSession.forward

    def forward(self: Any, *arguments: Any, num_tokens: Any = None, **named: Any) -> Any:
        return real(self, *arguments, **named)

    return {"session.ReferenceSession.forward": forward}


executor_pull_rows = executor.pull_rows
BROKEN_PROMISES: list[tuple[Callable[[], Replacements], Callable[..., None], dict[str, Any]]] = [
    (reversed_slots, test_bits.test_slot_order, {"mode": A8W8}),
    (masked_slots_times_zero, test_values.test_poison_of_an_earlier_call, {"mode": A8W8, "transport": "bf16"}),
    (bits_of_the_tile, test_bits.test_rest_of_the_batch, {"mode": BF16}),
    (bits_of_the_tile, test_bits.test_other_ranks_tokens, {"mode": BF16}),
    (cut_ids, test_calls.test_wide_ids_are_not_cut, {}),
    (signed_scale_bytes, test_values.test_e8m0_byte, {"mode": A8W4, "byte": 128}),
    (copied_expert_tensors, test_weights.test_move_expert_in_place, {"mode": A8W8}),
    (padding_is_computed, test_calls.test_num_tokens, {"mode": A8W8, "device_scalar": False}),
]


@pytest.mark.parametrize(
    "mutation, conformance_test, arguments", BROKEN_PROMISES, ids=lambda value: getattr(value, "__name__", "")
)
def test_broken_promise_is_caught(
    workbench: Workbench,
    mutation: Callable[[], Replacements],
    conformance_test: Callable[..., None],
    arguments: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Faults that no bound on numbers shows: the conformance test of the promise itself must fail."""
    conformance_test(workbench, **arguments)
    modules = {"executor": executor, "session": session, "agent": agent}
    for name, replacement in mutation().items():
        module, _, attribute = name.partition(".")
        monkeypatch.setattr(f"{modules[module].__name__}.{attribute}", replacement)
    with pytest.raises(AssertionError):
        conformance_test(workbench, **arguments)

"""The whole layer over virtual ranks, stage by stage and at its output, against the staged reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import FILL, SMALL, Inputs, Layer, as_format, problem, random_inputs, rel_l2, run_in_turn
from torch import Tensor

from megamoe.formats import activation_format
from megamoe.layouts import BLOCKS_16, SCALE_SHUFFLE
from megamoe_rocm import weights as kernel_weights

MODES = [("a4w4", "bf16"), ("a4w4", "fp8_blockwise_1x32"), ("a8w4", "bf16"), ("a8w4", "fp8_blockwise_1x32")]
BOUND = 1e-2  # of y, as docs/numerics.md starts from: A2 codes may flip where exp() differs in its last bit


@pytest.mark.parametrize("quant, transport", MODES)
def test_three_calls_in_a_row(quant: str, transport: str) -> None:
    """Across the wrap of the epoch at 2^32, with other routings and token counts each time."""
    layer = Layer(problem=problem(quant=quant, transport=transport))
    for call, tokens in enumerate([(24, 9), (1, 24), (0, 7)]):
        inputs = random_inputs(layer.problem, tokens, seed=call, low=-1)
        outs = layer.forward(inputs)
        for out, expected in zip(outs, layer.reference(inputs).outputs, strict=True):
            assert len(expected) == 0 or rel_l2(out, expected) < BOUND
        assert [memory.words("epoch").item() for memory in layer.memory] == [call - 1] * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"swiglu_limit": 0.5},
        {"activation": "swiglu_oai", "swiglu_limit": 0.7, "expert_bias": True},
        {"expert_bias": True, "quant": "a8w4", "transport": "fp8_blockwise_1x32"},
    ],
    ids=["limit", "oai+bias", "bias+fp8"],
)
def test_activations_and_biases(changes: dict) -> None:
    layer = Layer(problem=problem(**changes))
    inputs = random_inputs(layer.problem, (12, 5))
    expected = layer.reference(inputs).outputs
    for out, reference in zip(layer.forward(inputs), expected, strict=True):
        assert rel_l2(out, reference) < BOUND
    plain = Layer(problem=replace(layer.problem, swiglu_limit=None))
    assert not changes.get("swiglu_limit") or rel_l2(plain.forward(inputs)[0], expected[0]) > BOUND


@pytest.mark.parametrize("quant", ["a4w4", "a8w4"])
def test_stages_one_by_one(quant: str) -> None:
    """Pool rows, meta and accumulators exactly; A2 within what exp() may change."""
    layer = Layer(problem=problem(quant=quant))
    inputs = random_inputs(layer.problem, (24, 17), low=-1)
    _, lists = layer.launches(inputs)
    columns = 2 * layer.problem.intermediate_size
    taps = []
    for launches in lists:
        launch = next(launch for launch in launches if launch.kernel.__name__ == "dispatch_gemm1")
        taps.append(torch.full((layer.ring.num_rows, columns), torch.nan))
        tapped = replace(
            launch,
            arguments={**launch.arguments, "gate_up_tap": taps[-1]},
            constants={**launch.constants, "TAP": True},
        )
        launches[launches.index(launch)] = tapped
    run_in_turn(lists, until="dispatch_gemm1")

    for rank, (memory, expected) in enumerate(zip(layer.memory, layer.reference(inputs).taps, strict=True)):
        rows = valid_rows(layer, rank)
        meta = memory.words("pool_meta").view(-1, 4)[rows]
        # The reference orders an expert's rows by home rank and pick.
        key = torch.stack((row_experts(layer, rank), meta[:, 0], meta[:, 1]), 1).tolist()
        order = torch.tensor(sorted(range(len(key)), key=key.__getitem__))
        rows, meta = rows[order], meta[order]
        assert torch.equal(meta[:, 0], expected.src_rank)
        assert torch.equal(meta[:, 1], expected.src_pick)
        gate_up = BLOCKS_16.invert(taps[rank][rows].unsqueeze(0).transpose(1, 2)).transpose(1, 2)[0]
        assert expected.gate_up is not None
        assert rel_l2(gate_up, expected.gate_up) < 1e-6
        fmt = activation_format(quant)
        payload = memory.bytes("a2_payload")[rows][:, : fmt.payload_bytes(columns // 2)]
        scales = slot_scales(layer, memory.bytes("a2_scales"), columns // 2)[rows]
        assert expected.a2.scales is not None
        assert (scales != expected.a2.scales).float().mean() < 1e-3
        codes = expected.a2.payload.view(torch.uint8)
        assert (payload != codes).float().mean() < 1e-2
        untouched = torch.ones(layer.ring.num_rows, dtype=torch.bool)
        untouched[rows] = False
        assert (memory.bytes("pool_payload")[untouched] == FILL).all()


def valid_rows(layer: Layer, rank: int) -> Tensor:
    """Ring rows that hold a row."""
    memory = layer.memory[rank]
    table = memory.words("block_table").view(-1, 4)[: memory.words("num_blocks").item()]
    return torch.cat([torch.arange(int(n)) + slot * layer.tile.block_m for slot, n in enumerate(table[:, 2])])


def row_experts(layer: Layer, rank: int) -> Tensor:
    memory = layer.memory[rank]
    table = memory.words("block_table").view(-1, 4)[: memory.words("num_blocks").item()]
    return table[:, 0].repeat_interleave(table[:, 2])


def slot_scales(layer: Layer, stored: Tensor, columns: int) -> Tensor:
    """Scales `[ring rows, columns / 32]` of slots in operand order."""
    slots = stored.reshape(layer.ring.ring_blocks, -1)[:, : layer.tile.block_m * columns // 32]
    return SCALE_SHUFFLE.invert(slots.reshape(layer.ring.ring_blocks, layer.tile.block_m, columns // 32)).flatten(0, 1)


def test_tiles_and_rings_give_equal_bits() -> None:
    """Tile shapes, order of units, programs and rounds of the ring; rows of a full block and of a sparse one."""
    inputs = random_inputs(problem(), (24, 24), seed=3)
    inputs.topk_ids[0][:] = 1  # 48 rows and more for one expert: two blocks
    expected = Layer(problem=problem()).forward(inputs)
    variants = [
        Layer(problem=problem(), tile=replace(SMALL, name="wide", block_m=64, gemm1_block_n=256, gemm2_block_n=256)),
        Layer(problem=problem(), tile=replace(SMALL, name="tall", block_m=64, pull_rows=8, lead_blocks=3)),
        Layer(problem=problem(), tile=replace(SMALL, name="runs", units_per_ticket=3), num_programs=5),
        Layer(problem=problem(), pool_blocks=1),
    ]
    for variant in variants:
        for out, other in zip(variant.forward(inputs), expected, strict=True):
            assert torch.equal(out, other)


def test_given_quantised_rows_change_nothing() -> None:
    layer = Layer(problem=problem(quant="a8w4"))
    inputs = random_inputs(layer.problem, (10, 3))
    expected = layer.forward(inputs)
    given = Inputs(
        hidden_states=[as_format(layer.problem, x) for x in inputs.hidden_states],
        topk_ids=inputs.topk_ids,
        topk_weights=inputs.topk_weights,
    )
    for out, other in zip(layer.forward(given), expected, strict=True):
        assert torch.equal(out, other)


def test_nan_stays_in_its_row_and_rows_without_experts_move_nothing() -> None:
    layer = Layer(problem=problem(transport="fp8_blockwise_1x32"))
    inputs = random_inputs(layer.problem, (12, 12))
    expected = layer.forward(inputs)
    inputs.topk_ids[0][3] = -1
    inputs.hidden_states[0][3] = torch.nan
    inputs.hidden_states[1][5, 77] = torch.inf
    outs = layer.forward(inputs)
    assert (outs[0][3] == 0).all()
    assert outs[1][5].isnan().all()
    keep = [torch.arange(12) != 3, torch.arange(12) != 5]
    for out, other, rows in zip(outs, expected, keep, strict=True):
        assert torch.equal(out[rows], other[rows])


def test_zero_tokens_everywhere_and_all_picks_without_an_expert() -> None:
    layer = Layer(problem=problem())
    assert [len(out) for out in layer.forward(random_inputs(layer.problem, (0, 0)))] == [0, 0]
    inputs = random_inputs(layer.problem, (4, 2))
    for ids in inputs.topk_ids:
        ids[:] = -1
    assert all((out == 0).all() for out in layer.forward(inputs))


def test_rows_past_num_tokens_are_zero() -> None:
    layer = Layer(problem=problem())
    inputs = random_inputs(layer.problem, (12, 6))
    outs = layer.forward(inputs, num_tokens=(5, 6))
    cut = Inputs(
        hidden_states=[inputs.hidden_states[0][:5], inputs.hidden_states[1]],
        topk_ids=[inputs.topk_ids[0][:5], inputs.topk_ids[1]],
        topk_weights=[inputs.topk_weights[0][:5], inputs.topk_weights[1]],
    )
    expected = layer.reference(cut).outputs
    assert rel_l2(outs[0][:5], expected[0]) < BOUND
    assert rel_l2(outs[1], expected[1]) < BOUND
    assert (outs[0][5:] == 0).all()


def test_a_rank_that_does_not_come_ends_in_a_named_timeout_and_nan() -> None:
    layer = Layer(problem=problem())
    inputs = random_inputs(layer.problem, (4, 4))
    outs, lists = layer.launches(inputs)
    for launch in lists[0]:
        launch.run()
    happened, rank, peer, phase, epoch, index, _, target = layer.memory[0].words("status").tolist()
    assert (happened, rank, peer, phase, epoch, index, target) == (1, 0, 1, 2, -1, 1, -1)
    assert outs[0].isnan().all()
    assert layer.reports[0].tolist() == layer.memory[0].words("status").tolist()
    assert layer.memory[1].words("rank_finished")[0].item() == -2  # nobody is told that rank 0 has finished


def test_a_mixed_up_gate_and_a_misplaced_router_weight_would_be_seen() -> None:
    """Controls of the bound: what must break it does."""
    layer = Layer(problem=problem(quant="a8w4"))
    inputs = random_inputs(layer.problem, (12, 12))
    expected = layer.reference(inputs).outputs[0]
    swapped = dict(layer.prepared[0])
    inter = layer.problem.intermediate_size
    for name in ("w13_weight", "w13_weight_scale"):
        weights = getattr(layer.weights[0], name)
        other = replace(layer.weights[0], **{name: weights.roll(inter, 1)})
        swapped[name] = kernel_weights.prepare(other, layer.problem).tensors[name]
    layer.prepared[0] = swapped
    assert rel_l2(layer.forward(inputs)[0], expected) > 10 * BOUND
    inputs.topk_weights[0] *= 1.05
    assert rel_l2(Layer(problem=layer.problem).forward(inputs)[0], expected) > 2 * BOUND

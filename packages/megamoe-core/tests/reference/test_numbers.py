"""The reference's numbers: against the oracle, the staged reference, and a hand-written layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layers import MODES, TRANSPORTS, make_layer, mode_id, rel_l2

from megamoe import VirtualRanks
from megamoe.backend import StageTaps
from megamoe.errors import SessionError
from megamoe.formats import activation_format
from megamoe.reference.backend import ReferenceBackend
from megamoe.reference.oracle import oracle
from megamoe.reference.staged import staged
from megamoe.tensors import make_weights

BACKEND = ReferenceBackend()
GATES = {"bf16": 0.01, "a8w8": 0.06, "a8w4": 0.06, "a4w4": 0.25}  # docs/numerics.md


def run_virtual(layer, *, config=None, num_calls=1, **forward):
    """Outputs of a session that drives all ranks."""
    plan = BACKEND.plan(layer.problem, config=config)
    with BACKEND.open(plan, VirtualRanks(), timeout_s=20) as session:
        weights = [session.prepare(owned) for owned in layer.all_weights()]
        for _ in range(num_calls):
            outputs = session.forward(*layer.all_tokens(), weights, **forward)
    return outputs


@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_every_mode_meets_its_gate_and_has_the_staged_bits(mode, transport: str, ep_size: int) -> None:
    layer = make_layer(
        quant=mode[0],
        act_format=mode[1],
        transport=transport,
        ep_size=ep_size,
        num_tokens=32,
        expert_bias=ep_size % 4 == 2,
        swiglu_limit=10.0 if ep_size == 8 else None,
    )
    layer = replace(layer, topk_weights=layer.topk_weights.softmax(1))
    outputs = run_virtual(layer)
    x, ids, topk_weights = layer.all_tokens()
    expected = oracle(layer.problem, layer.hidden_states, layer.topk_ids, layer.topk_weights, layer.all_weights())
    # The FP8 transport's own rounding error of 2.6% comes on top of the mode's.
    gate = (GATES[mode[0]] ** 2 + (0.03**2 if transport != "bf16" else 0)) ** 0.5
    assert rel_l2(torch.cat(outputs), expected) < gate
    same = staged(layer.problem, x, ids, topk_weights, layer.all_weights()).outputs
    assert all(torch.equal(got, want) for got, want in zip(outputs, same, strict=True))


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
def test_the_oracle_is_the_formula(activation: str) -> None:
    """Written out once more, in double precision, token by token."""
    layer = make_layer(num_tokens=5, ep_size=2, expert_bias=True, activation=activation, swiglu_limit=1.5)
    got = oracle(layer.problem, layer.hidden_states, layer.topk_ids, layer.topk_weights, layer.all_weights())
    w13, w2 = layer.w13.bfloat16().double(), layer.w2.bfloat16().double()
    expected = torch.zeros(5, layer.problem.hidden_size, dtype=torch.float64)
    for token in range(5):
        for slot in range(layer.problem.top_k):
            expert = int(layer.topk_ids[token, slot])
            gate_up = w13[expert] @ layer.hidden_states[token].double() + layer.w13_bias[expert]
            gate, up = gate_up.chunk(2)
            gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
            if activation == "swiglu":
                hidden = gate / (1 + (-gate).exp()) * up
            else:
                hidden = gate / (1 + (-1.702 * gate).exp()) * (up + 1)
            row = w2[expert] @ hidden + layer.w2_bias[expert]
            expected[token] += layer.topk_weights[token, slot] * row
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", [("bf16", None), ("a8w8", None), ("a4w4", None)], ids=mode_id)
def test_interleaved_rows_give_the_bits_of_packed_rows(mode) -> None:
    layer = make_layer(quant=mode[0], act_format=mode[1], expert_bias=True)
    packed = layer.weights(0)
    if mode[0] == "a8w8":
        # Blocks of 128 rows would mix gate and up: give both orders the same scales.
        packed = replace(packed, w13_weight_scale=torch.full_like(packed.w13_weight_scale, 2.0**-8))

    def alternate(tensor):
        gate, up = tensor.view(torch.uint8 if tensor.itemsize == 1 else tensor.dtype).chunk(2, dim=1)
        return torch.stack((gate, up), dim=2).flatten(1, 2).view(tensor.dtype)

    scale = getattr(packed, "w13_weight_scale", None)
    if mode[0] == "a4w4":
        scale = alternate(scale)
    w13 = alternate(packed.w13_weight)
    interleaved = make_weights(
        layer.problem,
        w13 if scale is None else (w13, scale),
        packed.w2_weight if scale is None else (packed.w2_weight, packed.w2_weight_scale),
        layout="interleaved",
        w13_bias=alternate(packed.w13_bias),
        w2_bias=packed.w2_bias,
    )
    with BACKEND.open(BACKEND.plan(layer.problem)) as session:
        outputs = [session.forward(*layer.tokens(0), session.prepare(weights)) for weights in (packed, interleaved)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("mode", MODES[1:], ids=mode_id)
def test_quantised_input_gives_the_bits_of_bf16_input(mode) -> None:
    layer = make_layer(quant=mode[0], act_format=mode[1])
    x, ids, topk_weights = layer.tokens(0)
    quantized = activation_format(*mode).quantize(x)
    with BACKEND.open(BACKEND.plan(layer.problem)) as session:
        weights = session.prepare(layer.weights(0))
        expected = session.forward(x, ids, topk_weights, weights)
        assert torch.equal(session.forward(quantized, ids, topk_weights, weights), expected)
        pair = (quantized.payload, quantized.scales)
        assert torch.equal(session.forward(pair, ids, topk_weights, weights), expected)
        if quantized.scales.dtype == torch.uint8:
            pair = (quantized.payload, quantized.scales.view(torch.float8_e8m0fnu))
            assert torch.equal(session.forward(pair, ids, topk_weights, weights), expected)


def by_pick(taps: StageTaps) -> torch.Tensor:
    """Order of rows that no schedule changes."""
    return (taps.src_rank.long() * 10**6 + taps.src_pick).argsort()


@pytest.mark.parametrize("config", ["default", "tight"])
def test_taps_show_what_stands_between_the_stages(config: str) -> None:
    layer = make_layer(quant="a8w8", ep_size=2, num_tokens=100, expert_bias=True)
    plan = BACKEND.plan(layer.problem, config=config)
    with BACKEND.open(plan, VirtualRanks()) as session:
        weights = [session.prepare(owned) for owned in layer.all_weights()]
        session.forward(*layer.all_tokens(), weights)
        with pytest.raises(SessionError, match="keep_taps"):
            session.taps()
        session.keep_taps()
        session.forward(*layer.all_tokens(), weights)
        taps = session.taps()
    expected = staged(layer.problem, *layer.all_tokens(), layer.all_weights()).taps
    assert sum(len(tap.src_pick) for tap in taps) == layer.topk_ids.numel()
    for got, want in zip(taps, expected, strict=True):
        rows, wanted = by_pick(got), by_pick(want)
        for name in ("src_rank", "src_pick", "local_expert", "gate_up", "contribution"):
            assert torch.equal(getattr(got, name)[rows], getattr(want, name)[wanted]), name
        assert torch.equal(got.a2.payload.view(torch.uint8)[rows], want.a2.payload.view(torch.uint8)[wanted])
        assert torch.equal(got.a2.scales[rows], want.a2.scales[wanted])


def test_a_rank_without_rows_has_no_taps() -> None:
    layer = make_layer(ep_size=2)
    layer = replace(layer, topk_ids=layer.topk_ids % layer.problem.num_local_experts)
    with BACKEND.open(BACKEND.plan(layer.problem), VirtualRanks()) as session:
        session.keep_taps()
        session.forward(*layer.all_tokens(), [session.prepare(owned) for owned in layer.all_weights()])
        assert [taps is None for taps in session.taps()] == [False, True]
        assert [int(counts.sum()) for counts in session.receive_counts()] == [layer.topk_ids.numel(), 0]

"""The promise of docs/numerics.md: a row's bits depend on the row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layers import MODES, TRANSPORTS, make_layer, mode_id

from megamoe import VirtualRanks
from megamoe.reference.backend import ReferenceBackend

BACKEND = ReferenceBackend()


def run(layer, config=None, num_calls=1):
    """Outputs of all ranks, as one tensor in the tokens' order."""
    with BACKEND.open(BACKEND.plan(layer.problem, config=config), VirtualRanks(), timeout_s=20) as session:
        weights = [session.prepare(owned) for owned in layer.all_weights()]
        for _ in range(num_calls):
            outputs = session.forward(*layer.all_tokens(), weights)
    return torch.cat(outputs)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_ep_sizes_configurations_and_repetitions(mode, transport: str) -> None:
    layer = make_layer(quant=mode[0], act_format=mode[1], transport=transport, num_tokens=70)
    expected = run(layer)
    for ep_size in (2, 4, 8):
        assert torch.equal(run(layer.over(ep_size)), expected), f"EP{ep_size}"
    assert torch.equal(run(layer.over(4), config="tight", num_calls=5), expected)


@pytest.mark.parametrize("num_threads", [2, 4])
def test_threads(num_threads: int) -> None:
    layer = make_layer(quant="a8w8", num_tokens=70)
    expected = run(layer)
    torch.set_num_threads(num_threads)
    assert torch.equal(run(layer.over(2), num_calls=3), expected)
    assert torch.equal(run(layer.over(2), config="tight", num_calls=3), expected)
    assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize("mode", [("bf16", None), ("a8w8", None)], ids=mode_id)
def test_a_row_alone_and_in_a_batch_of_a_thousand(mode) -> None:
    layer = make_layer(quant=mode[0], act_format=mode[1], num_tokens=1000, top_k=2)
    together = run(layer)
    with BACKEND.open(BACKEND.plan(layer.problem)) as session:
        weights = session.prepare(layer.weights(0))
        for token in (0, 1, 499, 999):
            row = [tensor[token : token + 1] for tensor in layer.tokens(0)]
            assert torch.equal(session.forward(*row, weights)[0], together[token])
            assert torch.equal(run_with_capacity_1(layer, row)[0], together[token])


def test_sizes_that_no_vector_divides() -> None:
    """Elementwise code may treat the last elements of a tensor in another way; they are never a row's own matter."""
    layer = make_layer(num_tokens=50, hidden_size=41, intermediate_size=27, activation="swiglu_oai")
    together = run(layer)
    assert torch.equal(run(layer.over(4), config="tight"), together)
    for token in range(0, 50, 7):
        row = [tensor[token : token + 1] for tensor in layer.tokens(0)]
        assert torch.equal(run_with_capacity_1(layer, row)[0], together[token])


def run_with_capacity_1(layer, row):
    """A session for single tokens: smaller blocks."""
    alone = replace(layer, problem=replace(layer.problem, num_max_tokens_per_rank=1))
    with BACKEND.open(BACKEND.plan(alone.problem)) as session:
        return session.forward(*row, session.prepare(alone.weights(0)))


def test_the_peers_tokens_do_not_matter() -> None:
    layer = make_layer(quant="a8w8", ep_size=2, num_tokens=40)
    expected = run(layer)[:20]
    other = make_layer(quant="a8w8", ep_size=2, num_tokens=40, seed=1)
    peers = replace(
        layer,
        hidden_states=torch.cat((layer.hidden_states[:20], other.hidden_states[20:])),
        topk_ids=torch.cat((layer.topk_ids[:20], torch.zeros(20, 3, dtype=torch.int32))),
        topk_weights=torch.cat((layer.topk_weights[:20], other.topk_weights[20:])),
    )
    assert torch.equal(run(peers)[:20], expected)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_poison_in_a_masked_row_reaches_nobody(mode, poison: float) -> None:
    layer = make_layer(quant=mode[0], act_format=mode[1], ep_size=2)
    expected = run(layer)
    ids, x = layer.topk_ids.clone(), layer.hidden_states.clone()
    ids[5], x[5] = -1, poison
    got = run(replace(layer, topk_ids=ids, hidden_states=x))
    others = torch.arange(len(ids)) != 5
    assert torch.equal(got[others], expected[others])
    assert not got[5].any()


def test_nan_in_a_valid_row_stays_there() -> None:
    layer = make_layer(quant="a4w4", transport="fp8_blockwise_1x32", ep_size=2)
    expected = run(layer)
    x = layer.hidden_states.clone()
    x[3, 7] = float("nan")
    got = run(replace(layer, hidden_states=x))
    others = torch.arange(len(x)) != 3
    assert torch.equal(got[others], expected[others])
    assert got[3].isnan().all()

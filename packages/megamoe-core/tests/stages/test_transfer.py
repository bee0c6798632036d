"""The stages that move rows: quantise, pull, send home, sum."""

from __future__ import annotations

import pytest
import torch

from megamoe.formats import BF16, BF16_TRANSPORT, FP8_1X128, FP8_BLOCKWISE_1X32, TransportFormat
from megamoe.stages.combine import combine_tokens
from megamoe.stages.dispatch import pull_rows
from megamoe.stages.p2p import send_rows
from megamoe.stages.quantize_input import quantize_input

TRANSPORTS = [BF16_TRANSPORT, FP8_BLOCKWISE_1X32]
H, K, T = 64, 3, 5


def test_bf16_input_is_taken_as_it_is() -> None:
    x = torch.randn(T, H).bfloat16()
    assert torch.equal(quantize_input(x, BF16).payload, x)


def test_a_row_is_quantised_alone() -> None:
    x = torch.randn(T, 256).bfloat16()
    alone = quantize_input(x[2:3], FP8_1X128)
    x[1] = float("nan")
    together = quantize_input(x, FP8_1X128)
    assert torch.equal(alone.payload[0].view(torch.uint8), together.payload[2].view(torch.uint8))


def test_pull_takes_the_picks_tokens() -> None:
    source = torch.arange(T * 4, dtype=torch.uint8).view(T, 4)
    out = torch.empty(3, 4, dtype=torch.uint8)
    pull_rows(source, torch.tensor([14, 0, 5], dtype=torch.int32), K, out)
    assert torch.equal(out, source[[4, 0, 1]])


@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda transport: transport.name)
def test_rows_come_home_and_add_up_in_slot_order(transport: TransportFormat) -> None:
    rows = torch.randn(K, T, H, generator=torch.Generator().manual_seed(1)) * 100
    combine = torch.zeros(K, T, transport.row_bytes(H), dtype=torch.uint8)
    picks = torch.tensor([token * K + slot for slot in range(K) for token in range(T)], dtype=torch.int32)
    shuffled = torch.randperm(K * T, generator=torch.Generator().manual_seed(2))
    send_rows(transport.encode(rows.view(-1, H))[shuffled], picks[shuffled], combine)
    got = combine_tokens(combine, torch.ones(T, K, dtype=torch.bool), transport, H)
    decoded = transport.decode(transport.encode(rows))
    expected = ((decoded[0] + decoded[1]) + decoded[2]).bfloat16()
    assert torch.equal(got, expected)


@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda transport: transport.name)
def test_slots_without_an_expert_add_zero_whatever_their_bytes(transport: TransportFormat) -> None:
    combine = torch.full((K, T, transport.row_bytes(H)), 0xFF, dtype=torch.uint8)  # NaN in both transports
    combine[1] = transport.encode(torch.ones(T, H))
    valid = torch.zeros(T, K, dtype=torch.bool)
    valid[:, 1] = True
    valid[3] = False
    got = combine_tokens(combine, valid, transport, H)
    assert torch.equal(got[[0, 1, 2, 4]], torch.ones(4, H).bfloat16())
    assert not got[3].any()

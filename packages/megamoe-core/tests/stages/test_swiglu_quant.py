"""SwiGLU and requantisation against values worked out by hand, and the mistakes that have been made elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from megamoe.formats import BF16, FP8_1X128, MXFP4, MXFP8, ActivationFormat
from megamoe.problem import MoEProblem
from megamoe.stages.swiglu_quant import SwiGLU, swiglu_quant

GPT_OSS = {"alpha": 1.702, "beta": 1.0}


@dataclass(frozen=True)
class Case:
    id: str
    gate: float
    up: float
    activation: SwiGLU
    expected: float


CASES = [
    Case("plain", 1.0, 2.0, SwiGLU(), 1.4621172),
    Case("gate-clamped-above-only", -20.0, 2.0, SwiGLU(limit=10.0), -8.2446e-8),
    Case("gate-clamped-above", 30.0, 1.0, SwiGLU(limit=10.0), 9.999546),
    Case("up-clamped-both-sides", 1.0, -30.0, SwiGLU(limit=10.0), -7.310586),
    Case("gpt-oss", 1.0, 2.0, SwiGLU(**GPT_OSS), 3.0 / (1.0 + math.exp(-1.702))),
    Case("gpt-oss-clamps-up-before-adding-one", 1.0, 9.0, SwiGLU(limit=7.0, **GPT_OSS), 8 / (1 + math.exp(-1.702))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_value(case: Case) -> None:
    got = case.activation(torch.tensor([case.gate]), torch.tensor([case.up]))
    torch.testing.assert_close(got, torch.tensor([case.expected]), rtol=1e-5, atol=0)


def test_a_problem_names_its_activation() -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_experts": 2, "top_k": 1, "num_max_tokens_per_rank": 1}
    assert SwiGLU.of(MoEProblem(**sizes, swiglu_limit=10.0)) == SwiGLU(limit=10.0)
    oai = MoEProblem(**sizes, activation="swiglu_oai", swiglu_limit=7.0)
    assert SwiGLU.of(oai) == SwiGLU(limit=7.0, **GPT_OSS)


def test_one_scale_covers_128_channels() -> None:
    """Per-64 scales passed a loose gate in a public kernel and cost end-to-end accuracy."""
    gate_up = torch.ones(1, 512)
    gate_up[:, 256] = 1000.0  # up of channel 0: its block's amax, and no other block's
    quantized = swiglu_quant(gate_up, SwiGLU(), FP8_1X128)
    assert quantized.scales is not None
    assert quantized.scales.shape == (1, 2)
    assert quantized.scales[0, 0] > 100 * quantized.scales[0, 1]


@pytest.mark.parametrize("fmt", [BF16, FP8_1X128, MXFP8, MXFP4], ids=lambda fmt: fmt.name)
def test_nan_stays_in_its_row(fmt: ActivationFormat) -> None:
    gate_up = torch.randn(4, 512, generator=torch.Generator().manual_seed(0))
    clean = swiglu_quant(gate_up, SwiGLU(), fmt)
    gate_up[2] = float("nan")
    dirty = swiglu_quant(gate_up, SwiGLU(), fmt)
    for row in (0, 1, 3):
        assert torch.equal(clean.payload[row].view(torch.uint8), dirty.payload[row].view(torch.uint8))
    assert dirty.dequantize()[2].isnan().all()

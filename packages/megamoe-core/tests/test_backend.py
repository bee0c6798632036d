"""What all backends share: which claim each problem needs."""

from __future__ import annotations

from typing import Any

import pytest

from megamoe.backend import Capability, Reason, missing_capability
from megamoe.problem import ActFormat, Activation, MoEProblem, QuantMode, Transport
from megamoe.reference.backend import ReferenceBackend


def problem(**fields: Any) -> MoEProblem:
    return MoEProblem(
        hidden_size=256, intermediate_size=128, num_experts=4, top_k=2, num_max_tokens_per_rank=8, **fields
    )


ALL = frozenset(Capability)


@pytest.mark.parametrize("quant", QuantMode)
@pytest.mark.parametrize("transport", Transport)
@pytest.mark.parametrize("activation", Activation)
def test_every_format_has_a_capability(quant: str, transport: str, activation: str) -> None:
    layer = problem(quant=quant, transport=transport, activation=activation, expert_bias=True)
    assert missing_capability(layer, ALL).ok
    assert not missing_capability(layer, frozenset()).ok


@pytest.mark.parametrize(
    "fields, capability, reason",
    [
        ({"quant": "bf16"}, Capability.QUANT_BF16, Reason.QUANT),
        ({"quant": "a8w8"}, Capability.QUANT_A8W8, Reason.QUANT),
        ({"quant": "a8w4"}, Capability.QUANT_A8W4, Reason.QUANT),
        ({"quant": "a8w4", "act_format": ActFormat.MXFP8}, Capability.QUANT_A8W4, Reason.ACT_FORMAT),
        ({"quant": "a8w4", "act_format": ActFormat.FP8_1X128}, Capability.QUANT_A8W4_FP8_1X128, Reason.ACT_FORMAT),
        ({"quant": "a4w4"}, Capability.QUANT_A4W4, Reason.QUANT),
        ({"transport": "bf16"}, Capability.TRANSPORT_BF16, Reason.TRANSPORT),
        ({"transport": "fp8_blockwise_1x32"}, Capability.TRANSPORT_FP8_BLOCKWISE_1X32, Reason.TRANSPORT),
        ({"activation": "swiglu"}, Capability.ACTIVATION_SWIGLU, Reason.ACTIVATION),
        ({"activation": "swiglu_oai"}, Capability.ACTIVATION_SWIGLU_OAI, Reason.ACTIVATION),
        ({"expert_bias": True}, Capability.EXPERT_BIAS, Reason.BIAS),
    ],
)
def test_one_missing_claim_is_the_reason(fields: dict[str, Any], capability: Capability, reason: Reason) -> None:
    """Everything else claimed: exactly this one is named, and only for problems that need it."""
    verdict = missing_capability(problem(**fields), ALL - {capability})
    assert (verdict.ok, verdict.reason) == (False, reason)
    assert capability in verdict.detail
    assert missing_capability(problem(**fields), ALL).ok


def test_one_line_of_the_log_says_what_was_opened(caplog: pytest.LogCaptureFixture) -> None:
    backend = ReferenceBackend()
    with caplog.at_level("INFO", "megamoe"):
        backend.open(backend.plan(problem())).close()
    (line,) = [record.getMessage() for record in caplog.records if "opens" in record.getMessage()]
    assert "\n" not in line
    assert line.startswith("MegaMoE opens backend reference, configuration default, for CPU, ")
    assert "hidden_size=256" in line

"""What all backends share: which claim each problem needs, and the checks of a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megamoe.backend import Capability, Reason, check_call, missing_capability
from megamoe.errors import CapacityError, InputError
from megamoe.formats import FP8_1X128, MXFP8
from megamoe.problem import ActFormat, Activation, MoEProblem, QuantMode, Transport
from megamoe.reference.backend import ReferenceBackend

H, K, CAPACITY = 256, 2, 8


def problem(**fields: Any) -> MoEProblem:
    return MoEProblem(
        hidden_size=H, intermediate_size=128, num_experts=4, top_k=K, num_max_tokens_per_rank=CAPACITY, **fields
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


def call(num_tokens: int = 5, **changes: Any) -> dict[str, Any]:
    return {
        "hidden_states": torch.zeros(num_tokens, H, dtype=torch.bfloat16),
        "topk_ids": torch.zeros(num_tokens, K, dtype=torch.int64),
        "topk_weights": torch.zeros(num_tokens, K),
        "out": None,
        **changes,
    }


def check(arguments: dict[str, Any], *, mxfp8: bool = False) -> int:
    if mxfp8:
        shapes: dict[str, Any] = {
            "payload_shape": (H, torch.float8_e4m3fn),
            "scale_shape": (H // 32, torch.uint8),
        }
    else:
        shapes = {"payload_shape": (H, torch.float8_e4m3fn), "scale_shape": (H // 128, torch.float32)}
    layer = problem(quant="a8w4" if mxfp8 else "a8w8")
    return check_call(
        layer, arguments["hidden_states"], arguments["topk_ids"], arguments["topk_weights"], arguments["out"], **shapes
    )


@pytest.mark.parametrize("num_tokens", [0, 1, CAPACITY])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_good_calls(num_tokens: int, ids: torch.dtype) -> None:
    out = torch.empty(num_tokens, H, dtype=torch.bfloat16)
    arguments = call(num_tokens, topk_ids=torch.zeros(num_tokens, K, dtype=ids), out=out)
    assert check(arguments) == num_tokens


def test_over_capacity() -> None:
    with pytest.raises(CapacityError, match=r"got 9; expected at most num_max_tokens_per_rank = 8.*larger capacity"):
        check(call(CAPACITY + 1))


@pytest.mark.parametrize(
    "name, value, match",
    [
        ("hidden_states", torch.zeros(5, H), "hidden_states has the wrong dtype; got torch.float32.*bfloat16"),
        ("hidden_states", torch.zeros(5, H - 1, dtype=torch.bfloat16), r"wrong shape; got \(5, 255\); expected"),
        ("hidden_states", torch.zeros(H, dtype=torch.bfloat16), "hidden_states is not a matrix"),
        ("topk_ids", torch.zeros(5, K, dtype=torch.int16), "topk_ids has the wrong dtype; got torch.int16.*int32 or"),
        ("topk_ids", torch.zeros(4, K, dtype=torch.int64), "topk_ids has the wrong shape"),
        ("topk_ids", torch.zeros(5, K + 1, dtype=torch.int64), "topk_ids has the wrong shape"),
        ("topk_weights", torch.zeros(5, K, dtype=torch.bfloat16), "topk_weights has the wrong dtype"),
        ("topk_weights", torch.zeros(5), "topk_weights has the wrong shape"),
        ("out", torch.zeros(5, H), "out has the wrong dtype"),
        ("out", torch.zeros(6, H, dtype=torch.bfloat16), "out has the wrong shape"),
        ("out", torch.zeros(H, 5, dtype=torch.bfloat16).t(), "out is not contiguous"),
        ("topk_ids", torch.zeros(5, K, dtype=torch.int64, device="meta"), "several devices.*cpu.*meta"),
    ],
)  # fmt: skip
def test_bad_calls(name: str, value: torch.Tensor, match: str) -> None:
    with pytest.raises(InputError, match=match):
        check(call(**{name: value}))


def test_quantised_input() -> None:
    quantized = FP8_1X128.quantize(torch.randn(5, H, generator=torch.Generator().manual_seed(0)))
    assert check(call(hidden_states=quantized)) == 5
    assert check(call(hidden_states=(quantized.payload, quantized.scales))) == 5
    assert quantized.scales is not None
    for payload, scales, match in (
        (quantized.payload.view(torch.uint8), quantized.scales, "payload has the wrong dtype"),
        (quantized.payload[:, :-1], quantized.scales, "payload has the wrong shape"),
        (quantized.payload, quantized.scales[:, :1], "scales has the wrong shape"),
        (quantized.payload, quantized.scales[:4], "scales has the wrong shape"),
        (quantized.payload, quantized.scales.double(), "scales has the wrong dtype"),
    ):
        with pytest.raises(InputError, match=match):
            check(call(hidden_states=(payload, scales)))


def test_e8m0_scales_are_bytes_of_either_name() -> None:
    quantized = MXFP8.quantize(torch.randn(5, H, generator=torch.Generator().manual_seed(0)))
    assert quantized.scales is not None
    for scales in (quantized.scales, quantized.scales.view(torch.float8_e8m0fnu)):
        assert check(call(hidden_states=(quantized.payload, scales)), mxfp8=True) == 5
    with pytest.raises(InputError, match="scales has the wrong dtype; got torch.int8"):
        check(call(hidden_states=(quantized.payload, quantized.scales.view(torch.int8))), mxfp8=True)


def test_a_mode_without_scales_takes_no_pair() -> None:
    pair = (torch.zeros(5, H, dtype=torch.bfloat16), torch.ones(5, 1))
    arguments = call(hidden_states=pair)
    with pytest.raises(InputError, match="mode bf16 has no activation scales"):
        check_call(
            problem(quant="bf16"),
            arguments["hidden_states"],
            arguments["topk_ids"],
            arguments["topk_weights"],
            None,
            payload_shape=(H, torch.bfloat16),
            scale_shape=None,
        )


def test_one_line_of_the_log_says_what_was_opened(caplog: pytest.LogCaptureFixture) -> None:
    backend = ReferenceBackend()
    with caplog.at_level("INFO", "megamoe"):
        backend.open(backend.plan(problem())).close()
    (line,) = [record.getMessage() for record in caplog.records if "opens" in record.getMessage()]
    assert "\n" not in line
    assert line.startswith("MegaMoE opens backend reference, configuration default, for CPU, ")
    assert "hidden_size=256" in line

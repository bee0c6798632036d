"""MoEProblem: what contradicts itself is refused by name, what is equal is equal."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe.errors import ConfigError
from megamoe.problem import MAX_TOP_K, ActFormat, Activation, MoEProblem, QuantMode, Transport

GOOD: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_experts": 8,
    "top_k": 2,
    "num_max_tokens_per_rank": 16,
    "ep_size": 4,
}


def test_names_become_members() -> None:
    problem = MoEProblem(
        **GOOD, quant="a8w4", transport="fp8_blockwise_1x32", activation="swiglu_oai", act_format="fp8_1x128"
    )
    assert problem.quant is QuantMode.A8W4
    assert problem.transport is Transport.FP8_BLOCKWISE_1X32
    assert problem.activation is Activation.SWIGLU_OAI
    assert problem.act_format is ActFormat.FP8_1X128
    assert problem == MoEProblem(
        **GOOD,
        quant=QuantMode.A8W4,
        transport=Transport.FP8_BLOCKWISE_1X32,
        activation=Activation.SWIGLU_OAI,
        act_format=ActFormat.FP8_1X128,
    )


def test_equal_problems_hash_equally() -> None:
    assert hash(MoEProblem(**GOOD)) == hash(MoEProblem(**GOOD, quant="a8w8", transport="bf16"))


def test_equal_problems_print_equally() -> None:
    """Ranks compare their plans by what they print: 7 on one and 7.0 on another is one problem."""
    assert repr(MoEProblem(**GOOD, swiglu_limit=7)) == repr(MoEProblem(**GOOD, swiglu_limit=7.0))


def test_frozen_and_keyword_only() -> None:
    with pytest.raises(FrozenInstanceError):
        MoEProblem(**GOOD).top_k = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        MoEProblem(256, 128, 8, 2, 16)  # type: ignore[misc]


def test_shares_of_ranks() -> None:
    problem = MoEProblem(**GOOD)
    assert problem.num_local_experts == 2
    assert [problem.first_expert(rank) for rank in range(4)] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    "field", ["hidden_size", "intermediate_size", "num_experts", "top_k", "num_max_tokens_per_rank", "ep_size"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, None])
def test_sizes_are_positive_integers(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} is not a positive integer"):
        MoEProblem(**{**GOOD, field: value})


@pytest.mark.parametrize(
    "field, value, match",
    [
        ("quant", "a16w16", "unknown quant.*a16w16.*a8w8"),
        ("transport", "fp4", "unknown transport.*fp4.*bf16"),
        ("activation", "gelu", "unknown activation.*gelu.*swiglu"),
        ("act_format", "fp6", "unknown act_format.*fp6.*mxfp8"),
        ("top_k", MAX_TOP_K + 1, "top_k is too large.*17.*1 to 16"),
        ("ep_size", 257, "ep_size is too large"),
        ("swiglu_limit", 0.0, "swiglu_limit is not a clamp"),
        ("swiglu_limit", -7.0, "swiglu_limit is not a clamp"),
        ("swiglu_limit", float("inf"), "swiglu_limit is not a clamp"),
        ("swiglu_limit", float("nan"), "swiglu_limit is not a clamp"),
        ("swiglu_limit", "7", "swiglu_limit is not a clamp"),
        ("swiglu_limit", True, "swiglu_limit is not a clamp"),
        ("expert_bias", "no", "expert_bias is not a bool.*'no'"),
        ("expert_bias", None, "expert_bias is not a bool"),
    ],
)
def test_refused(field: str, value: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        MoEProblem(**{**GOOD, "num_experts": 512, "ep_size": 1, field: value})


def test_ep_size_divides_experts_or_the_error_says_what_would() -> None:
    with pytest.raises(ConfigError, match="ep_size does not divide num_experts.*10 experts over 4 ranks.*up to 12"):
        MoEProblem(**{**GOOD, "num_experts": 10})


@pytest.mark.parametrize("quant", ["bf16", "a8w8", "a4w4"])
def test_only_a8w4_has_a_choice_of_activation_format(quant: str) -> None:
    with pytest.raises(ConfigError, match="act_format is a choice of a8w4 only"):
        MoEProblem(**GOOD, quant=quant, act_format="mxfp8")


@given(ranks=st.integers(1, 256), share=st.integers(1, 64))
def test_every_expert_has_one_owner(ranks: int, share: int) -> None:
    problem = MoEProblem(**{**GOOD, "num_experts": ranks * share, "ep_size": ranks})
    owned = [
        expert
        for rank in range(ranks)
        for expert in range(problem.first_expert(rank), problem.first_expert(rank) + problem.num_local_experts)
    ]
    assert owned == list(range(ranks * share))


def test_replace_checks_again() -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        replace(MoEProblem(**GOOD), ep_size=3)

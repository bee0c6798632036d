"""What is to be computed: one expert-parallel MoE layer, in plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from megamoe.errors import ConfigError


class QuantMode(StrEnum):
    """Formats of the two GEMMs, activations first. docs/numerics.md holds the contract of each."""

    BF16 = "bf16"
    A8W8 = "a8w8"
    A8W4 = "a8w4"
    A4W4 = "a4w4"


class Transport(StrEnum):
    """How a finished row travels from the expert's rank to the token's home rank."""

    BF16 = "bf16"
    FP8_BLOCKWISE_1X32 = "fp8_blockwise_1x32"


class Activation(StrEnum):
    """What stands between the two GEMMs."""

    SWIGLU = "swiglu"  # silu(gate) * up, with an optional clamp
    SWIGLU_OAI = "swiglu_oai"  # gpt-oss: gate * sigmoid(1.702 * gate) * (up + 1), both clamped


class ActFormat(StrEnum):
    """Activation format of `a8w4`, the one mode that has two."""

    MXFP8 = "mxfp8"  # e4m3fn, E8M0 scale per 1x32
    FP8_1X128 = "fp8_1x128"  # e4m3fn, FP32 scale per 1x128: SM90 has no block-scaled MMA


_E = TypeVar("_E", bound=StrEnum)

MAX_TOP_K = 16
MAX_EP_SIZE = 256


@dataclass(frozen=True, kw_only=True)
class MoEProblem:
    """Sizes and formats of one MoE layer. Frozen and hashable; all ranks of a group use equal problems.

    Args:
        hidden_size: H, elements of a token.
        intermediate_size: I, elements after the activation (w13 has 2I rows).
        num_experts: E, global *physical* experts, redundant copies included; `ep_size` divides it.
        top_k: K, picks per token, 1 to 16. May be above `num_experts`: a token may pick an expert several times.
        num_max_tokens_per_rank: capacity; a call may bring 0 to this many tokens on each rank.
        ep_size: ranks that the experts are spread over, contiguous: rank r owns [r * E/R, (r+1) * E/R).
        quant: formats of the GEMMs.
        transport: format of the rows on their way home.
        activation: what stands between the GEMMs.
        swiglu_limit: clamp L > 0 of the activation's inputs, or None (DeepSeek-V4-Pro: 10; gpt-oss: 7).
        expert_bias: whether experts have FP32 biases w13_bias `[E_local, 2I]` and w2_bias `[E_local, H]`.
        act_format: activation format of `a8w4`; None is `mxfp8`. Other modes have one format and take None.

    Raises:
        ConfigError: a field that contradicts another; the message names it.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_max_tokens_per_rank: int
    ep_size: int = 1
    quant: QuantMode | str = QuantMode.A8W8
    transport: Transport | str = Transport.BF16
    activation: Activation | str = Activation.SWIGLU
    swiglu_limit: float | None = None
    expert_bias: bool = False
    act_format: ActFormat | str | None = None

    def __post_init__(self) -> None:
        for name, enum in (("quant", QuantMode), ("transport", Transport), ("activation", Activation)):
            object.__setattr__(self, name, member(name, enum, getattr(self, name)))
        if self.act_format is not None:
            object.__setattr__(self, "act_format", member("act_format", ActFormat, self.act_format))
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k", "num_max_tokens_per_rank", "ep_size"):
            require_positive(name, getattr(self, name))
        if self.top_k > MAX_TOP_K:
            raise ConfigError("top_k is too large", got=self.top_k, expected=f"1 to {MAX_TOP_K}")
        if self.ep_size > MAX_EP_SIZE:
            raise ConfigError("ep_size is too large", got=self.ep_size, expected=f"1 to {MAX_EP_SIZE}")
        if self.num_experts % self.ep_size:
            raise ConfigError(
                "ep_size does not divide num_experts",
                got=f"{self.num_experts} experts over {self.ep_size} ranks",
                expected="a multiple of ep_size",
                hint=f"add redundant experts up to {-(-self.num_experts // self.ep_size) * self.ep_size}",
            )
        if self.swiglu_limit is not None:
            limit = self.swiglu_limit
            if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < float("inf"):
                raise ConfigError("swiglu_limit is not a clamp", got=repr(limit), expected="a number > 0, or None")
            object.__setattr__(self, "swiglu_limit", float(limit))  # 7 and 7.0 are one problem, in its repr too
        if not isinstance(self.expert_bias, bool):
            raise ConfigError("expert_bias is not a bool", got=repr(self.expert_bias), expected="True or False")
        if self.act_format is not None and self.quant is not QuantMode.A8W4:
            raise ConfigError(
                f"act_format is a choice of a8w4 only, not of {self.quant}", got=str(self.act_format), expected="None"
            )

    @property
    def num_local_experts(self) -> int:
        """Experts that each rank owns."""
        return self.num_experts // self.ep_size

    def first_expert(self, ep_rank: int) -> int:
        """Global id of the first expert of `ep_rank`."""
        return ep_rank * self.num_local_experts


def require_problem(problem: object) -> None:
    """Raise ConfigError for what is no `MoEProblem`."""
    if not isinstance(problem, MoEProblem):
        raise ConfigError(
            "this is no problem to plan",
            got=type(problem).__name__,
            expected="a megamoe.MoEProblem",
            hint="MoEProblem(hidden_size=..., intermediate_size=..., num_experts=..., top_k=..., ...)",
        )


def require_positive(name: str, value: object) -> None:
    """Raise ConfigError, which calls it `name`, for what is no int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is not a positive integer", got=repr(value), expected="an int >= 1")


def member(name: str, enum: type[_E], value: object) -> _E:
    """The member of `enum` that `value` is or spells; `name` says in the error what was given.

    Raises:
        ConfigError: there is none; lists those that there are.
    """
    try:
        return enum(value)  # type: ignore[arg-type]
    except ValueError:
        raise ConfigError(f"unknown {name}", got=repr(value), expected=" or ".join(map(str, enum))) from None

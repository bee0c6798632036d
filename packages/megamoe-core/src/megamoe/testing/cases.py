"""The table of cases: which layers a backend is run on, in layers from `smoke` to `stress`.

A case is plain data: a problem, the tokens of each rank, a routing, a kind of input and a seed. Everything random about
it follows from these, so a case is replayed by its id. `cases(device_class)` gives small sizes for "cpu" and the sizes
of real models for "gpu". Whether a backend supports a case is asked of the backend, never written here.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import cycle, islice
from typing import Any, Literal

from megamoe.problem import MAX_TOP_K, ActFormat, Activation, MoEProblem, QuantMode, Transport
from megamoe.testing.routings import ROUTINGS

DeviceClass = Literal["cpu", "gpu"]


class Layer(StrEnum):
    """Layers of the matrix; each is a pytest marker."""

    SMOKE = "smoke"
    SHAPES = "shapes"
    EDGE = "edge"
    STRESS = "stress"


class InputKind(StrEnum):
    """What the hidden states look like."""

    GAUSSIAN = "gaussian"  # N(0, 1): what the oracle gates are stated for
    OUTLIERS = "outliers"  # one row in three is 8 times as large: the clamp bites on most of its channels
    HEAVY_TAIL = "heavy_tail"  # Student's t with 3 degrees of freedom: a few elements own their block's scale
    ZERO_BLOCKS = "zero_blocks"  # Gaussian, with whole rows and whole 128-blocks of zeros


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A quant mode with its activation format; `MODES` lists all that exist."""

    quant: QuantMode
    act_format: ActFormat | None = None

    @property
    def id(self) -> str:
        return str(self.quant) if self.act_format is None else f"{self.quant}-{self.act_format}"


BF16 = Mode(quant=QuantMode.BF16)
A8W8 = Mode(quant=QuantMode.A8W8)
A8W4 = Mode(quant=QuantMode.A8W4)
A8W4_FP8 = Mode(quant=QuantMode.A8W4, act_format=ActFormat.FP8_1X128)
A4W4 = Mode(quant=QuantMode.A4W4)
MODES = (A8W8, A8W4, BF16, A8W4_FP8, A4W4)
TRANSPORTS = (Transport.BF16, Transport.FP8_BLOCKWISE_1X32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of one layer.

    Args:
        id: unique; names what is special about the case.
        layer: of the matrix.
        problem: what is computed.
        tokens: tokens of each rank.
        routing: a name of `megamoe.testing.routings.ROUTINGS`.
        inputs: kind of hidden states.
        signed_weights: whether half of the router weights are negative.
        seed: of ids, router weights and hidden states.
    """

    id: str
    layer: Layer
    problem: MoEProblem
    tokens: tuple[int, ...]
    routing: str = "uniform"
    inputs: InputKind = InputKind.GAUSSIAN
    signed_weights: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        assert len(self.tokens) == self.problem.ep_size, self.id
        assert max(self.tokens) <= self.problem.num_max_tokens_per_rank, self.id
        assert self.routing in ROUTINGS, self.id


def uneven(most: int, ep_size: int) -> tuple[int, ...]:
    """Token counts that differ between ranks: the largest, about half, none, one less than the largest, one, ..."""
    pattern = (most, most // 2 + 1, 0, max(most - 1, 0), 1, most, most // 3, most)
    return tuple(islice(cycle(pattern), ep_size))


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes that a case takes where it does not say its own, by device class."""

    hidden_size: int
    intermediate_size: int
    experts_per_rank: int
    top_k: int
    tokens: int


# CPU: two 128-blocks in each direction, so that a wrong block is a wrong number; small enough for hundreds of cases.
# GPU: several tiles in each direction, ring and pool wrapping around.
SIZES: dict[DeviceClass, Sizes] = {
    "cpu": Sizes(hidden_size=256, intermediate_size=256, experts_per_rank=4, top_k=4, tokens=24),
    "gpu": Sizes(hidden_size=2048, intermediate_size=1024, experts_per_rank=8, top_k=8, tokens=200),
}

GATED_HIDDEN_SIZES = (2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
EXPERTS_PER_RANK = (1, 31, 32, 48, 56, 64)


@dataclass(frozen=True, kw_only=True)
class Model:
    """MoE layer of a published model: sizes of its config.json; experts are one rank's share at its usual EP size."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_local_experts: int
    top_k: int
    swiglu_limit: float | None = None
    activation: Activation = Activation.SWIGLU
    expert_bias: bool = False


MODELS = (
    Model(name="deepseek-v3", hidden_size=7168, intermediate_size=2048, num_local_experts=32, top_k=8),
    Model(
        name="deepseek-v4-pro",
        hidden_size=7168,
        intermediate_size=3072,
        num_local_experts=48,
        top_k=6,
        swiglu_limit=10.0,
    ),
    Model(name="deepseek-v2-lite", hidden_size=2048, intermediate_size=1408, num_local_experts=64, top_k=6),
    Model(name="qwen3-235b", hidden_size=4096, intermediate_size=1536, num_local_experts=16, top_k=8),
    Model(name="qwen3-30b", hidden_size=2048, intermediate_size=768, num_local_experts=16, top_k=8),
    Model(name="mixtral-8x7b", hidden_size=4096, intermediate_size=14336, num_local_experts=2, top_k=2),
    Model(name="glm-4.5", hidden_size=5120, intermediate_size=1536, num_local_experts=20, top_k=8),
    Model(
        name="gpt-oss-120b",
        hidden_size=2880,
        intermediate_size=2880,
        num_local_experts=16,
        top_k=4,
        swiglu_limit=7.0,
        activation=Activation.SWIGLU_OAI,
        expert_bias=True,
    ),
)


def cases(device_class: DeviceClass) -> list[Case]:
    """All cases but the stress layer, in the order in which they run.

    Args:
        device_class: "cpu" for small sizes, "gpu" for those of real models.
    """
    table = [*_smoke(device_class), *_shapes(device_class), *_edge(device_class)]
    assert len({case.id for case in table}) == len(table), "two cases with one id"
    return table


def build(
    layer: Layer,
    what: str,
    mode: Mode,
    *,
    device_class: DeviceClass,
    ep_size: int = 2,
    tokens: tuple[int, ...] | int | None = None,
    capacity: int | None = None,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    experts_per_rank: int | None = None,
    top_k: int | None = None,
    routing: str = "uniform",
    inputs: InputKind = InputKind.GAUSSIAN,
    signed_weights: bool = False,
    **problem_fields: Any,
) -> Case:
    """A case with the device class's sizes wherever none is given.

    Args:
        layer: of the matrix.
        what: what is special about it; becomes part of the id.
        mode: quant mode.
        device_class: whose sizes.
        ep_size: ranks.
        tokens: of each rank, or the most of `uneven`.
        capacity: of the session; None is the largest of `tokens`.
        hidden_size, intermediate_size, experts_per_rank, top_k: of the problem.
        routing, inputs, signed_weights: of the case.
        problem_fields: further fields of `MoEProblem`.
    """
    sizes = SIZES[device_class]
    if tokens is None or isinstance(tokens, int):
        tokens = uneven(sizes.tokens if tokens is None else tokens, ep_size)
    experts = (experts_per_rank or sizes.experts_per_rank) * ep_size
    problem = MoEProblem(
        hidden_size=hidden_size or sizes.hidden_size,
        intermediate_size=intermediate_size or sizes.intermediate_size,
        num_experts=experts,
        top_k=top_k or sizes.top_k,
        num_max_tokens_per_rank=capacity or max(*tokens, 1),
        ep_size=ep_size,
        quant=mode.quant,
        act_format=mode.act_format,
        **problem_fields,
    )
    short = "" if problem.transport is Transport.BF16 else "-fp8p2p"
    case_id = f"{what}-{mode.id}{short}-ep{ep_size}"
    return Case(
        id=case_id,
        layer=layer,
        problem=problem,
        tokens=tokens,
        routing=routing,
        inputs=inputs,
        signed_weights=signed_weights,
        seed=zlib.crc32(case_id.encode()),
    )


def _smoke(device: DeviceClass) -> Iterator[Case]:
    """Every mode with every transport, and every EP size."""
    for mode in MODES:
        for transport in TRANSPORTS:
            yield build(Layer.SMOKE, "plain", mode, device_class=device, transport=transport)
    for mode, ep_size in zip(cycle(MODES), (1, 4, 8)):
        yield build(Layer.SMOKE, "plain", mode, device_class=device, ep_size=ep_size)
    yield build(Layer.SMOKE, "masked_some", A8W8, device_class=device, routing="masked_some")


def _shapes(device: DeviceClass) -> Iterator[Case]:
    yield from _shapes_of_formats(device)
    yield from _shapes_of_sizes(device)
    if device == "gpu":
        yield from _shapes_of_models()
    else:
        yield from _shapes_of_many_rows()


def _shapes_of_formats(device: DeviceClass) -> Iterator[Case]:
    """Modes x transports x EP sizes, and every activation with biases and a clamp that bites."""
    for mode in MODES:
        for ep_size in (1, 2, 4, 8):
            for transport in TRANSPORTS:
                yield build(
                    Layer.SHAPES, "ep", mode, device_class=device, ep_size=ep_size, transport=transport, routing="zipf"
                )
        for name, fields in (
            ("limit", {"swiglu_limit": 10.0}),
            ("oai", {"swiglu_limit": 7.0, "activation": Activation.SWIGLU_OAI}),
            ("oai-unlimited", {"activation": Activation.SWIGLU_OAI}),
            ("bias", {"expert_bias": True}),
            ("oai-bias", {"swiglu_limit": 7.0, "activation": Activation.SWIGLU_OAI, "expert_bias": True}),
        ):
            inputs = InputKind.OUTLIERS if "swiglu_limit" in fields else InputKind.GAUSSIAN
            yield build(Layer.SHAPES, name, mode, device_class=device, inputs=inputs, **fields)


def _shapes_of_sizes(device: DeviceClass) -> Iterator[Case]:
    """One size at a time, the modes taking turns: H, I, experts per rank, top_k, and token counts around tile edges."""
    small: dict[str, Any] = {"intermediate_size": 128, "device_class": device}
    turns = cycle(MODES)
    for hidden_size in GATED_HIDDEN_SIZES:
        for mode in dict.fromkeys((A8W8, next(turns))):
            yield build(
                Layer.SHAPES,
                f"h{hidden_size}",
                mode,
                hidden_size=hidden_size,
                experts_per_rank=2,
                tokens=9,
                top_k=2,
                **small,
            )
    for intermediate_size in (96, 128, 192, 384, 640, 1408):
        for mode in MODES:
            yield build(
                Layer.SHAPES,
                f"i{intermediate_size}",
                mode,
                device_class=device,
                intermediate_size=intermediate_size,
                experts_per_rank=2,
                top_k=2,
            )
    for experts_per_rank in EXPERTS_PER_RANK:
        for mode in dict.fromkeys((A8W8, next(turns))):
            yield build(
                Layer.SHAPES,
                f"experts{experts_per_rank}",
                mode,
                experts_per_rank=experts_per_rank,
                top_k=min(8, experts_per_rank * 2),
                **small,
            )
    for top_k in range(1, MAX_TOP_K + 1):
        yield build(Layer.SHAPES, f"top_k{top_k}", next(turns), experts_per_rank=8, top_k=top_k, **small)
    for tokens in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129):
        yield build(Layer.SHAPES, f"tokens{tokens}", next(turns), tokens=(tokens, tokens), top_k=2, **small)


def _shapes_of_many_rows() -> Iterator[Case]:
    """The largest layers that a CPU is given: several row blocks of every expert, and more than a ring of them."""
    for mode in MODES:
        yield build(
            Layer.SHAPES,
            "many-rows",
            mode,
            device_class="cpu",
            ep_size=4,
            tokens=300,
            hidden_size=1024,
            intermediate_size=640,
            experts_per_rank=2,
            routing="zipf",
        )


def _shapes_of_models() -> Iterator[Case]:
    """One rank's share of published models, on one rank and on two."""
    for model in MODELS:
        for mode in (A8W8, A8W4, A8W4_FP8, BF16, A4W4):
            for ep_size in (1, 2):
                yield build(
                    Layer.SHAPES,
                    model.name,
                    mode,
                    device_class="gpu",
                    ep_size=ep_size,
                    tokens=96,
                    hidden_size=model.hidden_size,
                    intermediate_size=model.intermediate_size,
                    experts_per_rank=max(1, model.num_local_experts // ep_size),
                    top_k=model.top_k,
                    swiglu_limit=model.swiglu_limit,
                    activation=model.activation,
                    expert_bias=model.expert_bias,
                )


def _edge(device: DeviceClass) -> Iterator[Case]:
    """Routings, counts and values that broke other implementations."""
    turns = cycle(MODES[1:])
    for routing in ROUTINGS:
        for mode in (A8W8, next(turns)):
            yield build(Layer.EDGE, routing, mode, device_class=device, ep_size=4, routing=routing)
    for routing in ("one_expert", "masked_rows", "masked_all", "out_of_range", "duplicates", "redundant"):
        yield build(Layer.EDGE, routing, A8W8, device_class=device, ep_size=1, routing=routing)
    for tokens in (256, 257):
        yield build(
            Layer.EDGE,
            f"duplicates{tokens}",
            A8W8,
            device_class=device,
            tokens=(tokens, tokens),
            experts_per_rank=64,
            top_k=4,
            routing="duplicates",
            intermediate_size=128,
        )
    for mode in MODES:
        for transport in TRANSPORTS:
            yield build(
                Layer.EDGE, "signed-weights", mode, device_class=device, signed_weights=True, transport=transport
            )
        yield build(Layer.EDGE, "heavy-tail", mode, device_class=device, inputs=InputKind.HEAVY_TAIL)
        yield build(Layer.EDGE, "zero-blocks", mode, device_class=device, inputs=InputKind.ZERO_BLOCKS)
        yield build(Layer.EDGE, "no-tokens", mode, device_class=device, tokens=(0, 0))
    for what, of_ranks in (("one-rank-has-tokens", (24, 0, 0, 0)), ("one-rank-has-none", (0, 24, 24, 24))):
        yield build(Layer.EDGE, what, A8W8, device_class=device, ep_size=4, tokens=of_ranks)
    yield build(Layer.EDGE, "roomy", A8W8, device_class=device, tokens=(3, 5), capacity=1024)
    if device == "gpu":
        yield build(  # w13 alone is 5 GiB: an expert's offset does not fit 32 bits
            Layer.EDGE,
            "beyond-4gib",
            A8W8,
            device_class="gpu",
            ep_size=1,
            hidden_size=8192,
            intermediate_size=4096,
            experts_per_rank=80,
            routing="hot_expert",
            tokens=(64,),
        )


def stress_case(seed: int, device_class: DeviceClass, accept: Callable[[MoEProblem], bool]) -> Case:
    """A random case; the same for the same seed, device class and answers of `accept`.

    Args:
        seed: of everything.
        device_class: bounds the sizes.
        accept: whether the backend supports a problem; draws are repeated until it does.

    Raises:
        RuntimeError: the backend accepts none of a thousand draws.
    """
    rng = random.Random(seed)
    for _ in range(1000):
        case = _draw(seed, rng, device_class)
        if accept(case.problem):
            return case
    raise RuntimeError("the backend accepts no problem that was drawn")


def _draw(seed: int, rng: random.Random, device: DeviceClass) -> Case:
    scale = 1 if device == "cpu" else 8
    ep_size = rng.choice((1, 2, 4, 8))
    most = rng.choice((1, 7, 20, 33, 70)) * (1 if device == "cpu" else rng.choice((1, 4, 16)))
    tokens = tuple(rng.choice((0, 1, most // 2, most, rng.randint(0, most))) for _ in range(ep_size))
    experts_per_rank = rng.randint(1, 8 if device == "cpu" else 20)
    case = build(
        Layer.STRESS,
        f"seed{seed}",
        rng.choice(MODES),
        device_class=device,
        ep_size=ep_size,
        tokens=tokens,
        capacity=max(1, most + rng.choice((0, 0, 5, 100))),
        hidden_size=128 * rng.randint(1, 4) * scale,
        intermediate_size=128 * rng.randint(1, 3) * (1 if device == "cpu" else rng.randint(1, 6)),
        experts_per_rank=experts_per_rank,
        top_k=rng.randint(1, min(MAX_TOP_K, experts_per_rank * ep_size)),
        routing=rng.choice(tuple(ROUTINGS)),
        inputs=rng.choice((InputKind.GAUSSIAN, InputKind.GAUSSIAN, InputKind.OUTLIERS, InputKind.ZERO_BLOCKS)),
        signed_weights=rng.random() < 0.5,
        transport=rng.choice(TRANSPORTS),
        activation=rng.choice(tuple(Activation)),
        swiglu_limit=rng.choice((None, 1.5, 7.0, 10.0)),
        expert_bias=rng.random() < 0.3,
    )
    return replace(case, id=f"stress-{seed}", seed=seed)

"""Weights as types: which formats a layer's experts are in is said by the class, not by flags.

A checkpoint's experts become one of `Bf16Weights`, `Fp8BlockWeights` or `Mxfp4Weights` (E_local = the experts of one
rank, in the order of their global ids). A session turns them into `PreparedWeights`, in the layout its kernels read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum

import torch
from torch import Tensor

from megamoe.errors import InputError, LayoutError
from megamoe.formats.fp8_block import FP8_BLOCK
from megamoe.formats.mxfp8 import MX_BLOCK
from megamoe.problem import MoEProblem, QuantMode
from megamoe.schedule.tiles import ceil_div


class GateUpLayout(StrEnum):
    """Order of the 2I rows of w13 in a checkpoint. There is no default: a mix-up is silent otherwise."""

    PACKED = "packed"  # gate (w1) rows 0..I-1, then up (w3) rows; DeepSeek, Qwen, Mixtral
    INTERLEAVED = "interleaved"  # gate0, up0, gate1, up1, ...; gpt-oss


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """What all weight types share.

    Args:
        layout: order of w13's rows.
        w13_bias: `[E_local, 2I]` FP32 in the order of `layout`, or None.
        w2_bias: `[E_local, H]` FP32, or None.
    """

    layout: GateUpLayout | str
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "layout", GateUpLayout(self.layout))
        except ValueError:
            raise LayoutError(
                "unknown order of w13's rows", got=repr(self.layout), expected=" or ".join(map(str, GateUpLayout))
            ) from None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, absent biases left out."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Tensor):
                yield entry.name, value


@dataclass(frozen=True, kw_only=True)
class Bf16Weights(ExpertWeights):
    """BF16 experts: w13_weight `[E_local, 2I, H]`, w2_weight `[E_local, H, I]`."""

    w13_weight: Tensor
    w2_weight: Tensor


@dataclass(frozen=True, kw_only=True)
class Fp8BlockWeights(ExpertWeights):
    """FP8 e4m3fn experts with one FP32 scale per 128x128 block (DeepSeek-V3's checkpoints).

    w13_weight `[E_local, 2I, H]`, w13_weight_scale `[E_local, ceil(2I/128), ceil(H/128)]`,
    w2_weight `[E_local, H, I]`, w2_weight_scale `[E_local, ceil(H/128), ceil(I/128)]`; value = payload * scale.
    """

    w13_weight: Tensor
    w13_weight_scale: Tensor
    w2_weight: Tensor
    w2_weight_scale: Tensor


@dataclass(frozen=True, kw_only=True)
class Mxfp4Weights(ExpertWeights):
    """MXFP4 experts: two e2m1 codes a byte (even element in the low nibble), one E8M0 byte per 32 of K.

    w13_weight `[E_local, 2I, H/2]` uint8, w13_weight_scale `[E_local, 2I, H/32]` uint8 or float8_e8m0fnu,
    w2_weight `[E_local, H, I/2]` uint8, w2_weight_scale `[E_local, H, I/32]`.
    """

    w13_weight: Tensor
    w13_weight_scale: Tensor
    w2_weight: Tensor
    w2_weight_scale: Tensor


WEIGHT_TYPE: Mapping[QuantMode, type[ExpertWeights]] = {
    QuantMode.BF16: Bf16Weights,
    QuantMode.A8W8: Fp8BlockWeights,
    QuantMode.A8W4: Mxfp4Weights,
    QuantMode.A4W4: Mxfp4Weights,
}


OTHER_WEIGHTS = "convert them (megamoe.checkpoint.convert, megamoe.formats), or plan the mode that takes them"


def make_weights(
    problem: MoEProblem,
    w13: Tensor | tuple[Tensor, Tensor],
    w2: Tensor | tuple[Tensor, Tensor],
    *,
    layout: GateUpLayout | str,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> ExpertWeights:
    """Give plain tensors the weight type of `problem.quant`.

    Args:
        problem: says which type.
        w13: BF16 tensor, or (payload, scale).
        w2: likewise.
        layout: order of w13's rows.
        w13_bias: FP32, or None.
        w2_bias: FP32, or None.

    Raises:
        InputError: a pair where the mode has no scales, or a lone tensor where it has.
    """
    names = ("w13_weight", "w2_weight")
    quantized = problem.quant is not QuantMode.BF16
    tensors: dict[str, Tensor] = {}
    for name, value in zip(names, (w13, w2), strict=True):
        parts = tuple(value) if isinstance(value, tuple | list) else (value,)
        if len(parts) != 1 + quantized or not all(isinstance(part, Tensor) for part in parts):
            raise InputError(
                f"{name} does not fit quant mode {problem.quant}",
                got=_described(parts),
                expected="(payload, scale)" if quantized else "a BF16 tensor",
                hint=OTHER_WEIGHTS,
            )
        tensors.update(zip((name, f"{name}_scale"), parts))
    for name, bias in (("w13_bias", w13_bias), ("w2_bias", w2_bias)):
        if bias is not None and not isinstance(bias, Tensor):
            raise InputError(f"{name} is not a tensor", got=type(bias).__name__, expected="FP32, or None")
    return WEIGHT_TYPE[QuantMode(problem.quant)](layout=layout, w13_bias=w13_bias, w2_bias=w2_bias, **tensors)


def _described(parts: tuple[object, ...]) -> str:
    if len(parts) > 2:
        return f"{len(parts)} of them (torch.stack makes one tensor of a list)"
    return " and ".join(
        f"a tensor of {part.dtype}" if isinstance(part, Tensor) else type(part).__name__ for part in parts
    )


def check_weights(weights: ExpertWeights, problem: MoEProblem) -> None:
    """Hold `weights` against the type, shapes and dtypes that `problem` asks for.

    Raises:
        InputError: names the tensor, what it is and what it should be.
    """
    wanted = WEIGHT_TYPE[QuantMode(problem.quant)]
    if type(weights) is not wanted:
        raise InputError(
            f"quant mode {problem.quant} takes other weights",
            got=type(weights).__name__,
            expected=wanted.__name__,
            hint=OTHER_WEIGHTS,
        )
    expected = dict(_expected_tensors(problem))
    got = dict(weights.tensors())
    for name in dict.fromkeys((*expected, *got)):
        if name not in got or name not in expected:
            raise InputError(
                f"{name} is {'missing' if name not in got else 'not expected'}",
                got=f"{sorted(got)} with expert_bias={problem.expert_bias}",
                expected=sorted(expected),
                hint="set MoEProblem(expert_bias=...) to what the checkpoint has",
            )
        shape, dtypes = expected[name]
        tensor = got[name]
        if tuple(tensor.shape) != shape:
            whole = tensor.dim() == len(shape) and tensor.shape[0] == problem.num_experts != shape[0]
            hint = f"give each of the {problem.ep_size} ranks its own experts only" if whole else None
            raise InputError(f"{name} has the wrong shape", got=tuple(tensor.shape), expected=shape, hint=hint)
        if tensor.dtype not in dtypes:
            raise InputError(
                f"{name} has the wrong dtype", got=tensor.dtype, expected=" or ".join(str(d) for d in dtypes)
            )


def _expected_tensors(problem: MoEProblem) -> Iterator[tuple[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]]:
    experts, hidden, inter = problem.num_local_experts, problem.hidden_size, problem.intermediate_size
    matrices = {"w13_weight": (2 * inter, hidden), "w2_weight": (hidden, inter)}
    for name, (rows, columns) in matrices.items():
        if problem.quant is QuantMode.BF16:
            yield name, ((experts, rows, columns), (torch.bfloat16,))
        elif problem.quant is QuantMode.A8W8:
            yield name, ((experts, rows, columns), (torch.float8_e4m3fn,))
            scales = (experts, ceil_div(rows, FP8_BLOCK), ceil_div(columns, FP8_BLOCK))
            yield f"{name}_scale", (scales, (torch.float32,))
        else:
            yield name, ((experts, rows, columns // 2), (torch.uint8,))
            yield f"{name}_scale", ((experts, rows, columns // MX_BLOCK), (torch.uint8, torch.float8_e8m0fnu))
    if problem.expert_bias:
        yield "w13_bias", ((experts, 2 * inter), (torch.float32,))
        yield "w2_bias", ((experts, hidden), (torch.float32,))


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedWeights:
    """Experts in the layout that one backend's kernels read; made by `Session.prepare_weights`.

    Not to be stored: the layout may be another one in the next version.

    Args:
        backend: name of the backend that prepared them.
        layout: the backend's name for the layout, version included; `forward` refuses any other.
        quant: the mode that they were prepared for.
        num_local_experts: experts they hold.
        hidden_size: H of the layer that they were prepared for.
        intermediate_size: I, likewise.
        expert_bias: whether they have biases.
        tensors: name -> tensor, every one with the expert as its first dimension.
    """

    backend: str
    layout: str
    quant: QuantMode
    num_local_experts: int
    hidden_size: int
    intermediate_size: int
    expert_bias: bool
    tensors: Mapping[str, Tensor] = field(repr=False)

    @classmethod
    def of(cls, problem: MoEProblem, *, backend: str, layout: str, tensors: Mapping[str, Tensor]) -> PreparedWeights:
        """One rank's experts of `problem`."""
        return cls(
            backend=backend,
            layout=layout,
            quant=QuantMode(problem.quant),
            num_local_experts=problem.num_local_experts,
            hidden_size=problem.hidden_size,
            intermediate_size=problem.intermediate_size,
            expert_bias=problem.expert_bias,
            tensors=tensors,
        )

    def require(self, *, backend: str, layout: str, problem: MoEProblem) -> None:
        """Refuse weights that were prepared for anything but this.

        Raises:
            LayoutError: names what they were prepared for.
        """
        got = (self.backend, self.layout, self.quant, self.num_local_experts)
        expected = (backend, layout, problem.quant, problem.num_local_experts)
        sizes = (self.hidden_size, self.intermediate_size, self.expert_bias)
        wanted_sizes = (problem.hidden_size, problem.intermediate_size, problem.expert_bias)
        if got != expected or sizes != wanted_sizes:
            facts = "backend {}, layout {}, mode {}, {} local experts, H = {}, I = {}, expert_bias={}"
            raise LayoutError(
                "these weights were prepared for something else",
                got=facts.format(*got, *sizes),
                expected=facts.format(*expected, *wanted_sizes),
                hint="prepare them again with this session's prepare_weights()",
            )


def is_on(device: torch.device, tensor: Tensor) -> bool:
    """Whether `tensor` is there; a device without an index is any of its type."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def require_prepared(weights: object, *, backend: str, layout: str, problem: MoEProblem, device: torch.device) -> None:
    """Refuse what is no prepared weights, or was prepared for anything but this: a session's check of an argument.

    Raises:
        InputError: these are no `PreparedWeights`, or are not on `device`.
        LayoutError: names what they were prepared for.
    """
    if not isinstance(weights, PreparedWeights):
        listed = isinstance(weights, list | tuple)
        raise InputError(
            "these weights are not prepared",
            got="a list, as sessions of VirtualRanks() take it" if listed else type(weights).__name__,
            expected="PreparedWeights" + (": this session runs one rank" if listed else ""),
            hint="make them with this session's prepare_weights()",
        )
    weights.require(backend=backend, layout=layout, problem=problem)
    for name, tensor in weights.tensors.items():
        if not is_on(device, tensor):
            raise InputError(
                f"prepared weights on another device: {name}",
                got=tensor.device,
                expected=device,
                hint="prepare them with this session's prepare_weights()",
            )


def expert_tensors(weights: PreparedWeights) -> dict[str, Tensor]:
    """Views `[E_local, ...]` that alias the memory the kernels read.

    Copying slot `src` over slot `dst` in *every* tensor moves an expert in place, between calls and under a captured
    graph: this is what expert load balancers do.
    """
    return dict(weights.tensors)

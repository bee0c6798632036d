"""What the sessions of every backend ask of the arguments of a call, before anything is launched or sent."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from megamoe.backend import HiddenStates
from megamoe.errors import CapacityError, InputError, MegaMoEError, SessionError
from megamoe.formats import Quantized, activation_format
from megamoe.problem import MoEProblem
from megamoe.stages.route import out_of_range
from megamoe.tensors import PreparedWeights, is_on

T = TypeVar("T")
ARGUMENTS = ("hidden_states", "topk_ids", "topk_weights", "weights", "out", "num_tokens")  # of `Session.forward`


def check_call(
    problem: MoEProblem,
    hidden_states: HiddenStates,
    topk_ids: Tensor,
    topk_weights: Tensor,
    out: Tensor | None,
    *,
    device: torch.device,
) -> int:
    """Check one rank's arguments of `forward` on the host, without reading a tensor's contents; returns T.

    Args:
        problem: what the session runs.
        hidden_states: BF16, or payload and scales.
        topk_ids: ids.
        topk_weights: router weights.
        out: output, or None.
        device: where the session computes.

    Raises:
        CapacityError, InputError: see `Session.forward`.
    """
    payload, scales = payload_and_scales(hidden_states)
    refuse_gradients(payload, topk_weights)
    if payload.dim() != 2:
        raise InputError("hidden_states is not a matrix", got=tuple(payload.shape), expected="[T, H]")
    num_tokens = payload.shape[0]
    if num_tokens > problem.num_max_tokens_per_rank:
        raise CapacityError(
            "more tokens than the session holds",
            got=num_tokens,
            expected=f"at most num_max_tokens_per_rank = {problem.num_max_tokens_per_rank}",
            hint="split the batch, or plan a larger capacity",
        )
    fmt = activation_format(problem.quant, problem.act_format)
    if scales is None:
        _expect("hidden_states", payload, "[T, hidden_size]", (num_tokens, problem.hidden_size), (torch.bfloat16,))
    elif fmt.scale_dtype is None:
        raise InputError(
            f"mode {problem.quant} has no activation scales", got="(payload, scales)", expected="BF16 [T, H]"
        )
    else:
        values = (num_tokens, problem.hidden_size)
        items = (num_tokens, problem.hidden_size // fmt.values_per_item)
        _expect("hidden_states payload", payload, "[T, columns of a row]", items, (fmt.payload_dtype,))
        scale_dtypes = _same_bytes(fmt.scale_dtype)
        _expect("hidden_states scales", scales, "[T, scales of a row]", fmt.scale_shape(values), scale_dtypes)
    picks = (num_tokens, problem.top_k)
    _expect("topk_ids", topk_ids, "[T, top_k]", picks, (torch.int32, torch.int64))
    _expect("topk_weights", topk_weights, "[T, top_k]", picks, (torch.float32,))
    if out is not None:
        _expect("out", out, "[T, hidden_size]", (num_tokens, problem.hidden_size), (torch.bfloat16,))
        if not out.is_contiguous():
            raise InputError(
                "out is not contiguous", got=f"strides {out.stride()}", expected=f"({problem.hidden_size}, 1)"
            )
    devices = {tensor.device for tensor in (payload, scales, topk_ids, topk_weights, out) if tensor is not None}
    if len(devices) > 1:
        raise InputError("arguments on several devices", got=sorted(map(str, devices)), expected="one device")
    if not is_on(device, payload):
        raise InputError("arguments on another device", got=payload.device, expected=device)
    return num_tokens


def last_call_failed(error: BaseException) -> SessionError:
    """What a rank's later calls raise until a reset, after `error` ended one of its calls or kept it from making it.

    Its next call would pass for the one that it did not make with its peers, weights of another layer included.
    """
    return SessionError(
        f"the last call failed ({type(error).__name__}: {error})",
        hint="call session.reset() on every rank, or open a new session",
    )


def ask_for_reset(error: BaseException) -> None:
    """Add to the hint of `error`, which kept a rank from making a call that its peers make, what is to be done."""
    if isinstance(error, MegaMoEError):
        hint = "peers that made this call end with an error too, and every rank calls session.reset()"
        error.hint = f"{error.hint}; {hint}" if error.hint else hint


def refuse_gradients(payload: Any, topk_weights: Any) -> None:
    """Raise where autograd would go on without the layer: there is no backward, and a residual would hide that.

    Args:
        payload: hidden states, or what stands in their place.
        topk_weights: router weights.

    Raises:
        InputError: grad mode is on, and one of the two requires grad.
    """
    if not torch.is_grad_enabled():
        return
    for name, value in (("hidden_states", payload), ("topk_weights", topk_weights)):
        if getattr(value, "requires_grad", False):
            raise InputError(
                "there is no backward",
                got=f"{name} that require grad",
                expected="a call under torch.no_grad() or torch.inference_mode(), or detached tensors",
            )


def require_aligned(name: str, tensor: Tensor, alignment: int) -> None:
    """Raise InputError, which calls it `name`, for a tensor whose first byte is at no multiple of `alignment`."""
    if tensor.data_ptr() % alignment:
        raise InputError(
            f"{name} is not aligned to {alignment} bytes",
            got=hex(tensor.data_ptr()),
            expected=f"a multiple of {alignment}",
        )


def require_own_memory(
    out: Tensor,
    hidden_states: HiddenStates,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: PreparedWeights,
    num_tokens: int | Tensor | None,
) -> None:
    """Raise where a rank's `out` lies over its own arguments. Over BF16 `hidden_states` it may lie, in any way.

    Args:
        out, hidden_states, topk_ids, topk_weights, weights, num_tokens: of `Session.forward`, after `check_call`.

    Raises:
        InputError: names the argument.
    """
    others = [("topk_ids", topk_ids), ("topk_weights", topk_weights)]
    if not isinstance(hidden_states, Tensor):
        payload, scales = payload_and_scales(hidden_states)
        others.append(("hidden_states payload", payload))
        if scales is not None:
            others.append(("hidden_states scales", scales))
    if isinstance(num_tokens, Tensor):
        others.append(("num_tokens", num_tokens))
    begin = out.data_ptr()
    end = begin + out.nbytes
    for name, other in (*others, *weights.tensors.items()):
        first = other.data_ptr()
        if first < end and (first >= begin or _span(other)[1] > begin) and overlaps(out, other):
            raise InputError(
                f"out shares memory with {name}",
                got=f"out from {begin:#x} on, {name} from {first:#x} on",
                expected="memory of its own, or that of BF16 hidden_states",
            )


def overlaps(first: Tensor, second: Tensor) -> bool:
    """Whether the bytes from the first to the last element of one tensor are among those of the other."""
    (begin, end), (other_begin, other_end) = _span(first), _span(second)
    return max(begin, other_begin) < min(end, other_end)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of that behind the last; equal for a tensor without elements."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous() or not tensor.numel():
        return begin, begin + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return begin, begin + (last + 1) * tensor.itemsize


def by_rank(arguments: Sequence[Any], num_ranks: int) -> list[tuple[Any, ...]]:
    """Arguments of `forward` with virtual ranks, one tuple a rank; None stands for None of each.

    Args:
        arguments: those of `ARGUMENTS`, in that order.
        num_ranks: how many entries each must have.

    Raises:
        InputError: one is not a list or tuple of `num_ranks` entries; names it. Or two ranks' `out` share memory.
    """
    entries = {name: _one_each(name, value, num_ranks) for name, value in zip(ARGUMENTS, arguments, strict=True)}
    _refuse_shared_outputs(entries["out"])
    return list(zip(*entries.values(), strict=True))


def of_each(check: Callable[..., T], rows: Sequence[Sequence[Any]], *, virtual: bool) -> list[T]:
    """`check(index, *row)` of each driven rank; with virtual ranks an error says first whose arguments they were."""
    found = []
    for index, row in enumerate(rows):
        try:
            found.append(check(index, *row))
        except MegaMoEError as error:
            if virtual:
                error.message = f"virtual rank {index}: {error.message}"
            raise
    return found


def _refuse_shared_outputs(outputs: Sequence[Any]) -> None:
    """Raise where one rank would write over what another writes."""
    given = [(rank, out) for rank, out in enumerate(outputs) if isinstance(out, Tensor)]
    for (rank, out), (other, others) in itertools.combinations(given, 2):
        if overlaps(out, others):
            raise InputError(f"out of virtual ranks {rank} and {other} share memory", expected="one of each rank's own")


def _one_each(name: str, value: Any, num_ranks: int) -> Sequence[Any]:
    if value is None:
        return (None,) * num_ranks
    if not isinstance(value, list | tuple) or len(value) != num_ranks:
        raise InputError(
            f"{name} is not one entry per virtual rank",
            got=f"{len(value)} entries" if isinstance(value, list | tuple) else type(value).__name__,
            expected=f"a list of {num_ranks}",
        )
    entries: Sequence[Any] = value
    return entries


def require_ids(topk_ids: Tensor, num_experts: int) -> None:
    """Raise for an id outside [-1, num_experts). Synchronises, hence in debug mode only.

    Args:
        topk_ids: `[T, K]`, int32 or int64; rows that are no padding.
        num_experts: global, physical.

    Raises:
        InputError: names the first and how many more there are.
    """
    wrong = out_of_range(topk_ids, num_experts).nonzero()
    if len(wrong):
        token, slot = wrong[0].tolist()
        raise InputError(
            f"topk_ids[{token}, {slot}] is no expert's id",
            got=f"{topk_ids[token, slot].item()}, and {len(wrong) - 1} more like it",
            expected=f"-1 to {num_experts - 1}",
        )


def valid_rows(num_tokens: Any, num_rows: int, device: torch.device) -> int | Tensor:
    """How many rows of a call are no padding: a number, or where the kernels find it. Does not synchronise.

    Args:
        num_tokens: argument of `forward`, not None.
        num_rows: T.
        device: where the session computes.

    Returns:
        an int from 0 to T, or the int32 scalar on `device`, whose value is not looked at.

    Raises:
        InputError: neither of the two.
    """
    if isinstance(num_tokens, int) and not isinstance(num_tokens, bool):
        if not 0 <= num_tokens <= num_rows:
            raise InputError("num_tokens is out of range", got=num_tokens, expected=f"0 to {num_rows}")
        return num_tokens
    if not isinstance(num_tokens, Tensor):
        raise InputError("num_tokens is no count", got=repr(num_tokens), expected="an int, or one int32")
    if num_tokens.dtype != torch.int32 or num_tokens.numel() != 1 or not is_on(device, num_tokens):
        raise InputError(
            "num_tokens is no device-side count",
            got=f"{tuple(num_tokens.shape)} {num_tokens.dtype} on {num_tokens.device}",
            expected=f"one int32 on {device}, or an int",
        )
    return num_tokens


def payload_and_scales(hidden_states: HiddenStates) -> tuple[Tensor, Tensor | None]:
    """The parts of an argument; BF16 rows have no scales.

    Raises:
        InputError: it is neither a tensor nor a pair of them.
    """
    if isinstance(hidden_states, Tensor):
        return hidden_states, None
    if isinstance(hidden_states, Quantized):
        return hidden_states.payload, hidden_states.scales
    pair = tuple(hidden_states) if isinstance(hidden_states, tuple | list) else ()
    if len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair):
        raise InputError(
            "hidden_states is neither a tensor nor a pair of them",
            got=f"a pair of {' and '.join(type(part).__name__ for part in pair)}"
            if len(pair) == 2
            else type(hidden_states).__name__,
            expected="BF16 [T, H], or (payload, scales)",
        )
    return pair[0], pair[1]


def _same_bytes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """An E8M0 scale is the same byte as uint8 and as float8_e8m0fnu."""
    e8m0 = (torch.uint8, torch.float8_e8m0fnu)
    return e8m0 if dtype in e8m0 else (dtype,)


def _has_no_memory(tensor: Tensor) -> bool:
    """Whether it is a subclass that keeps its elements in tensors of its own, as a DTensor does."""
    return tensor.device.type != "meta" and tensor.numel() > 0 and tensor.data_ptr() == 0


def _expect(name: str, tensor: Tensor, meaning: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name} is not a tensor", got=type(tensor).__name__, expected=f"a tensor of shape {shape}")
    if tensor.layout is not torch.strided or _has_no_memory(tensor):
        raise InputError(
            f"{name} does not hold its elements one by one in memory",
            got=f"{type(tensor).__name__} of layout {tensor.layout}",
            expected="a plain tensor",
            hint="pass a DTensor's to_local(), a sparse tensor's to_dense()",
        )
    if tuple(tensor.shape) != shape:
        raise InputError(
            f"{name} has the wrong shape",
            got=tuple(tensor.shape),
            expected=f"{shape}, which is {meaning}",
            hint="T is the number of rows of hidden_states, the other is of the problem that was planned",
        )
    if tensor.dtype not in dtypes:
        if name.startswith("hidden_states "):  # bits of a format mean nothing in another dtype
            hint = "quantise to the mode's format, or pass BF16 rows"
        else:
            hint = "leave out=None to have it made" if name == "out" else f"cast with .to({dtypes[-1]})"
        raise InputError(
            f"{name} has the wrong dtype", got=tensor.dtype, expected=" or ".join(map(str, dtypes)), hint=hint
        )

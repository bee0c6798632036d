"""`torch.ops.megamoe.forward`: a session's forward as a torch operator, for torch.compile and export.

    handle = megamoe.ops.register(session)
    weights_tag, weights_tensors = megamoe.ops.flatten_weights(weights)

    @torch.compile(fullgraph=True)
    def layer(x, topk_ids, topk_weights):
        return torch.ops.megamoe.forward(handle, x, None, topk_ids, topk_weights, weights_tag, weights_tensors, None)

An operator takes tensors and plain values only. So a session is an integer, and prepared weights are a tag and a list
of tensors; as inputs of the graph they can be exchanged, moved in place, and seen by everything that walks graphs.
COLLECTIVE like the forward that it calls: every rank of the group has to reach it, in the same order.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from megamoe.backend import Session
from megamoe.errors import InputError, SessionError
from megamoe.meter import LayerCounter
from megamoe.problem import QuantMode
from megamoe.tensors import PreparedWeights

_sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
_counters: weakref.WeakValueDictionary[int, LayerCounter] = weakref.WeakValueDictionary()
_handles: weakref.WeakKeyDictionary[Session | LayerCounter, int] = weakref.WeakKeyDictionary()
_next_handle = itertools.count(1)
_SEPARATOR = "|"


def register(session: Session, counter: LayerCounter | None = None) -> int:
    """An integer that stands for `session` in operators; the same one each time. It does not keep the session alive.

    Args:
        session: of one rank.
        counter: of a meter of that session: counts each call of the operator with this integer. It is not kept alive.

    Raises:
        InputError: a session of virtual ranks, whose forward takes lists.
    """
    session.require_open()
    if session.ep_rank is None:
        raise InputError("an operator runs one rank", got="a session of virtual ranks", expected="a session of a group")
    key = session if counter is None else counter
    if key not in _handles:
        handle = _handles[key] = next(_next_handle)
        _sessions[handle] = session
        if counter is not None:
            _counters[handle] = counter
    return _handles[key]


def flatten_weights(weights: PreparedWeights) -> tuple[str, list[Tensor]]:
    """Prepared weights as arguments of the operator: what they are, and their tensors."""
    sizes = (weights.num_local_experts, weights.hidden_size, weights.intermediate_size, int(weights.expert_bias))
    what = (weights.backend, weights.layout, weights.quant, *map(str, sizes))
    return _SEPARATOR.join((*what, *weights.tensors)), list(weights.tensors.values())


def _session(handle: int) -> Session:
    session = _sessions.get(handle)
    if session is None:
        raise SessionError("no session has this handle", got=handle, hint="the session is gone; register the new one")
    return session


@functools.cache  # once per kind of weights, not per call: a tenth of what the operator costs the host
def _read_tag(tag: str) -> tuple[dict[str, Any], list[str]]:
    """Fields of the weights, and names of their tensors."""
    try:
        backend, layout, quant, num_local_experts, hidden, inter, bias, *names = tag.split(_SEPARATOR)
        fields = {
            "backend": backend,
            "layout": layout,
            "quant": QuantMode(quant),
            "num_local_experts": int(num_local_experts),
            "hidden_size": int(hidden),
            "intermediate_size": int(inter),
            "expert_bias": bias == "1",
        }
    except ValueError:
        raise InputError(
            "weights_tag describes no weights", got=repr(tag), expected="that of flatten_weights"
        ) from None
    return fields, names


def _restore_weights(tag: str, tensors: Sequence[Tensor]) -> PreparedWeights:
    fields, names = _read_tag(tag)
    if len(names) != len(tensors):
        raise InputError("weights_tensors are not the tag's", got=f"{len(tensors)} tensors", expected=", ".join(names))
    return PreparedWeights(**fields, tensors=dict(zip(names, tensors, strict=True)))


@torch.library.custom_op("megamoe::forward", mutates_args=())
def forward(
    handle: int,
    hidden_states: Tensor,
    hidden_states_scale: Tensor | None,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights_tag: str,
    weights_tensors: Sequence[Tensor],
    num_tokens: Tensor | None,
) -> Tensor:
    """COLLECTIVE. `Session.forward` of a registered session; `[T, H]` BF16.

    Args:
        handle: made by `register`.
        hidden_states: `[T, H]` BF16, or the payload of quantised activations.
        hidden_states_scale: their scales, or None.
        topk_ids: `[T, K]`, int32 or int64.
        topk_weights: `[T, K]` FP32.
        weights_tag: made by `flatten_weights`.
        weights_tensors: likewise.
        num_tokens: int32 scalar; rows past it are padding. None: all rows are valid.

    Raises:
        SessionError: no such session, or it is closed.
        Everything that `Session.forward` raises; InputError at `backward()`, for there is none.
    """
    session = _session(handle)
    x = hidden_states if hidden_states_scale is None else (hidden_states, hidden_states_scale)
    weights = _restore_weights(weights_tag, weights_tensors)
    output: Tensor = session.forward(x, topk_ids, topk_weights, weights, num_tokens=num_tokens)
    counter = _counters.get(handle)
    if counter is not None:
        counter()
    return output


@forward.register_fake
def _forward_fake(
    handle: int,
    hidden_states: Tensor,
    hidden_states_scale: Tensor | None,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights_tag: str,
    weights_tensors: Sequence[Tensor],
    num_tokens: Tensor | None,
) -> Tensor:
    """Shape and dtype only: nothing is launched or sent, so tracing is no collective."""
    session = _session(int(handle))  # with dynamic shapes it comes as a symbol: the graph is for this session
    num_rows = hidden_states.shape[0]
    return hidden_states.new_empty((num_rows, session.plan.problem.hidden_size), dtype=torch.bfloat16)


@forward.register_autograd
def _backward(*_: Any) -> NoReturn:
    raise InputError(
        "there is no backward",
        got="backward() through torch.ops.megamoe.forward",
        expected="a call under torch.no_grad() or torch.inference_mode(), or detached tensors",
    )

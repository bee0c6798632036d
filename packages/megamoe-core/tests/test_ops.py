"""The torch operator: opcheck, torch.compile, and what it refuses."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from torch import Tensor

from megamoe import MoEProblem, VirtualRanks, ops
from megamoe.errors import InputError, LayoutError, SessionError
from megamoe.formats import MXFP4
from megamoe.reference.backend import ReferenceBackend

BACKEND = ReferenceBackend()
PROBLEM = MoEProblem(
    hidden_size=64, intermediate_size=32, num_experts=4, top_k=2, num_max_tokens_per_rank=16, quant="a4w4"
)


def open_layer(problem: MoEProblem = PROBLEM, **options):
    """A session, its handle, flat weights, and arguments of 5 tokens."""
    g = torch.Generator().manual_seed(0)
    session = BACKEND.open(BACKEND.plan(problem), **options)
    w13 = MXFP4.quantize(torch.randn(4, 64, 64, generator=g))
    w2 = MXFP4.quantize(torch.randn(4, 64, 32, generator=g))
    weights = session.prepare_weights((w13.payload, w13.scales), (w2.payload, w2.scales), layout="packed")
    x = torch.randn(5, 64, generator=g).bfloat16()
    ids = torch.randint(-1, 4, (5, 2), generator=g, dtype=torch.int32)
    return session, weights, (x, ids, torch.rand(5, 2, generator=g))


def arguments(session, weights, tokens, *, scale: Tensor | None = None, num_tokens: Tensor | None = None):
    x, ids, topk_weights = tokens
    return (ops.register(session), x, scale, ids, topk_weights, *ops.flatten_weights(weights), num_tokens)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_opcheck(quantized: bool, padded: bool) -> None:
    session, weights, (x, ids, topk_weights) = open_layer()
    scale = None
    if quantized:
        in_format = MXFP4.quantize(x)
        x, scale = in_format.payload, in_format.scales
    num_tokens = torch.tensor(3, dtype=torch.int32) if padded else None
    given = arguments(session, weights, (x, ids, topk_weights), scale=scale, num_tokens=num_tokens)
    torch.library.opcheck(torch.ops.megamoe.forward.default, given)


def test_it_is_the_sessions_forward() -> None:
    session, weights, tokens = open_layer()
    expected = session.forward(*tokens, weights)
    assert torch.equal(torch.ops.megamoe.forward(*arguments(session, weights, tokens)), expected)
    num_tokens = torch.tensor(2, dtype=torch.int32)
    got = torch.ops.megamoe.forward(*arguments(session, weights, tokens, num_tokens=num_tokens))
    assert torch.equal(got[:2], expected[:2])
    assert not got[2:].any()


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_into_one_graph(dynamic: bool) -> None:
    session, weights, (x, ids, topk_weights) = open_layer()
    handle = ops.register(session)
    tag, tensors = ops.flatten_weights(weights)

    def layer(x: Tensor, ids: Tensor, topk_weights: Tensor, tensors: list[Tensor]) -> Tensor:
        return torch.ops.megamoe.forward(handle, 2 * x, None, ids, topk_weights, tag, tensors, None) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for num_tokens in (5, 3):
        given = (x[:num_tokens], ids[:num_tokens], topk_weights[:num_tokens], tensors)
        assert torch.equal(compiled(*given), layer(*given))


def test_backward_is_a_typed_error() -> None:
    """Beside a residual it can't go unnoticed: autograd comes to the operator and is told."""
    session, weights, (x, *picks) = open_layer()
    x.requires_grad_()
    y = x + torch.ops.megamoe.forward(*arguments(session, weights, (x, *picks)))
    with pytest.raises(InputError, match=r"there is no backward; got backward\(\) through torch.ops.megamoe.forward"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({5: "foo"}, "weights_tag describes no weights; got 'foo'; expected that of flatten_weights"),
        ({5: "a|b|a9w9|4|64|32|0|w13_weight"}, "weights_tag describes no weights"),
        ({6: []}, "weights_tensors are not the tag's; got 0 tensors; expected w13_weight.packed, "),
    ],
    ids=["no-tag", "mode", "tensors"],
)
def test_weights_that_are_none_are_a_typed_error(wrong: dict[int, object], message: str) -> None:
    layer = open_layer()  # a handle does not keep its session
    given = list(arguments(*layer))
    for place, value in wrong.items():
        given[place] = value
    with pytest.raises(InputError, match=re.escape(message)):
        torch.ops.megamoe.forward(*given)


def test_a_handle_is_stable_and_dies_with_its_session() -> None:
    session, weights, tokens = open_layer()
    given = arguments(session, weights, tokens)
    assert ops.register(session) == given[0]
    other, *_ = open_layer()
    assert ops.register(other) != given[0]
    session.close()
    with pytest.raises(SessionError, match="closed"):
        torch.ops.megamoe.forward(*given)
    with pytest.raises(SessionError, match="closed"):
        ops.register(session)
    del session
    gc.collect()
    with pytest.raises(SessionError, match="no session has this handle"):
        torch.ops.megamoe.forward(*given)


def test_the_tag_is_checked() -> None:
    session, weights, tokens = open_layer()
    given = list(arguments(session, weights, tokens))
    given[5] = given[5].replace("a4w4", "a8w4")
    with pytest.raises(LayoutError, match="prepared for something else"):
        torch.ops.megamoe.forward(*given)


def test_virtual_ranks_have_no_operator() -> None:
    session, *_ = open_layer(group=VirtualRanks())
    with pytest.raises(InputError, match="one rank"):
        ops.register(session)

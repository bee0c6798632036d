"""What callers do wrong or unexpectedly: odd arguments, the process's settings, threads, memory of closed sessions."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from layers import MODES, make_layer, mode_id

from megamoe import VirtualRanks
from megamoe.errors import ConfigError, InputError, LayoutError, SessionError, WorkspaceError
from megamoe.formats import BF16
from megamoe.reference import session as session_module
from megamoe.reference.backend import ReferenceBackend
from megamoe.reference.session import ReferenceSession
from megamoe.symm import InprocGroup
from megamoe.testing.threads import on_ranks

BACKEND = ReferenceBackend()


def opened(ep_size: int = 1, **options: Any):
    """A layer, its session, and the arguments of a call."""
    layer = make_layer(ep_size=ep_size, num_tokens=6 * ep_size, **options)
    session = BACKEND.open(BACKEND.plan(layer.problem), VirtualRanks() if ep_size > 1 else None)
    weights = [session.prepare(owned) for owned in layer.all_weights()]
    arguments = (*layer.all_tokens(), weights) if ep_size > 1 else (*layer.tokens(0), weights[0])
    return layer, session, list(arguments)


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("value", [None, 5, [[1.0]], "x"], ids=repr)
def test_what_is_no_tensor_is_refused_by_name(place: int, value: object) -> None:
    _, session, arguments = opened(quant="bf16")
    expected = session.forward(*arguments)
    wrong = [value if index == place else argument for index, argument in enumerate(arguments)]
    with pytest.raises(InputError, match="hidden_states is neither|is not a tensor|are not prepared"):
        session.forward(*wrong)
    assert torch.equal(session.forward(*arguments), expected)


def test_lists_are_for_virtual_ranks() -> None:
    _, session, arguments = opened(quant="bf16")
    with pytest.raises(InputError, match=r"got a list, as sessions of VirtualRanks\(\) take it; .*runs one rank"):
        session.forward(*([argument] for argument in arguments))


@pytest.mark.parametrize(
    "num_tokens",
    [
        *(2.5, True, "3", [3], torch.tensor(3), torch.tensor(2.7), torch.tensor([3, 4], dtype=torch.int32)),
        *(torch.tensor(99, dtype=torch.int32), torch.tensor(-1, dtype=torch.int32)),
        torch.tensor(3, dtype=torch.int32, device="meta"),
    ],
)
def test_a_number_of_tokens_is_whole_and_as_a_gpu_takes_it(num_tokens: Any) -> None:
    _, session, arguments = opened(quant="bf16")
    with pytest.raises(InputError, match="num_tokens is"):
        session.forward(*arguments, num_tokens=num_tokens)


def test_activations_of_another_format_are_refused() -> None:
    _, session, (x, *rest) = opened(quant="a8w8")
    with pytest.raises(InputError, match="another format; got bf16; expected fp8_1x128"):
        session.forward(BF16.quantize(x), *rest)


def test_a_lazy_negation_is_read_as_what_it_is() -> None:
    _, session, (x, *rest) = opened(quant="bf16")
    assert torch.equal(session.forward(torch._neg_view(-x), *rest), session.forward(x, *rest))


def test_outputs_may_be_the_inputs_of_other_ranks() -> None:
    """Nothing is written to `out`, padding included, before every rank's input has been read."""
    _, session, (x, *rest) = opened(ep_size=2, quant="bf16")
    expected = session.forward(x, *rest, num_tokens=[3, 6])
    copies = [rows.clone() for rows in x]
    outputs = session.forward(copies, *rest, num_tokens=[3, 6], out=copies[::-1])
    assert all(torch.equal(got, wanted) for got, wanted in zip(outputs, expected, strict=True))


def test_refused_arguments_leave_every_output_alone() -> None:
    _, session, (x, *rest) = opened(ep_size=2, quant="bf16")
    out = [torch.ones_like(rows) for rows in x]
    with pytest.raises(InputError, match="dtype"):
        session.forward([x[0], x[1].float()], *rest, num_tokens=[3, 6], out=out)
    assert all((rows == 1).all() for rows in out)


def test_an_output_may_come_from_inference_mode_or_ask_for_gradients() -> None:
    _, session, arguments = opened(quant="bf16")
    expected = session.forward(*arguments, num_tokens=4)
    with torch.inference_mode():
        inference = torch.ones_like(expected)
    for out in (inference, torch.ones_like(expected).requires_grad_()):
        assert torch.equal(session.forward(*arguments, num_tokens=4, out=out), expected)


@pytest.mark.parametrize("offset", [1, 2, 8])
def test_a_workspace_at_an_odd_address_is_refused(offset: int) -> None:
    plan = BACKEND.plan(make_layer(ep_size=1, num_tokens=4, quant="bf16").problem)
    memory = torch.zeros(plan.bytes + 16, dtype=torch.uint8)
    with pytest.raises(WorkspaceError, match="a multiple of 16 bytes"):
        BACKEND.open(plan, workspace=memory[offset : offset + plan.bytes])


@pytest.mark.parametrize("workspace", [5, torch.zeros(9999), torch.zeros(9999, dtype=torch.uint8, device="meta")])
def test_a_workspace_is_bytes_of_the_device(workspace: Any) -> None:
    plan = BACKEND.plan(make_layer(ep_size=1, num_tokens=4, quant="bf16").problem)
    with pytest.raises(WorkspaceError, match="is not a tensor; got int|not plain bytes of this device"):
        BACKEND.open(plan, workspace=workspace)


@pytest.mark.parametrize("timeout_s", [0, True, -1.0, float("nan"), float("inf"), "x"])
def test_a_timeout_is_a_positive_number(timeout_s: Any) -> None:
    plan = BACKEND.plan(make_layer(ep_size=1, num_tokens=4, quant="bf16").problem)
    with pytest.raises(ConfigError, match="timeout_s is not a time"):
        BACKEND.open(plan, timeout_s=timeout_s)


def test_what_is_no_plan_is_refused() -> None:
    problem = make_layer(ep_size=1, num_tokens=4, quant="bf16").problem
    with pytest.raises(ConfigError, match="this is no plan of backend reference; got MoEProblem"):
        BACKEND.open(problem)


OTHER_LAYERS: dict[str, dict[str, Any]] = {
    "H": {"hidden_size": 256},
    "I": {"intermediate_size": 256},
    "biases": {"expert_bias": True},
}


@pytest.mark.parametrize("other", OTHER_LAYERS)
def test_weights_of_a_layer_of_other_sizes_are_refused(other: str) -> None:
    """Where only biases differed, they were left out in silence; kernels would have read past the end of the others."""
    _, session, (*tokens, weights) = opened(quant="bf16")
    _, other_session, (*other_tokens, other_weights) = opened(quant="bf16", **OTHER_LAYERS[other])
    for ours, arguments, theirs in ((session, tokens, other_weights), (other_session, other_tokens, weights)):
        with pytest.raises(LayoutError, match="prepared for something else; .*H = 128, I = 128, expert_bias=False"):
            ours.forward(*arguments, theirs)
    assert session.forward(*tokens, weights).shape == tokens[0].shape


# -- the process's settings ------------------------------------------------------------------------------------------


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
        assert torch.get_float32_matmul_precision() == precision  # the caller's setting is not changed
    finally:
        torch.set_float32_matmul_precision(before)


SETTINGS = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float64 by default": lambda: default_dtype(torch.float64),
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "on meta by default": lambda: torch.device("meta"),
    "products in bfloat16": lambda: matmul_precision("medium"),
}


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
@pytest.mark.parametrize("setting", SETTINGS)
def test_bits_do_not_depend_on_the_callers_settings(mode: tuple[str, str | None], setting: str) -> None:
    quant, act_format = mode
    layer, session, arguments = opened(quant=quant, act_format=act_format)
    expected = session.forward(*arguments)
    with SETTINGS[setting]():
        assert torch.equal(session.forward(*arguments), expected)
        with BACKEND.open(BACKEND.plan(layer.problem)) as other:
            other.warmup()
            assert torch.equal(other.forward(*arguments), expected)


# -- threads, and what stays ---------------------------------------------------------------------------------------


def test_a_second_thread_is_told_that_the_session_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls at once would share one workspace: before this was refused, some outputs were wrong in silence."""
    _, session, arguments = opened(quant="bf16")
    expected = session.forward(*arguments)
    inside, go_on = threading.Event(), threading.Event()
    run = session_module.Driver.run

    def slow_run(driver: session_module.Driver) -> None:
        inside.set()
        assert go_on.wait(20)
        run(driver)

    monkeypatch.setattr(session_module.Driver, "run", slow_run)
    outputs: list[torch.Tensor] = []
    first = threading.Thread(target=lambda: outputs.append(session.forward(*arguments)))
    first.start()
    assert inside.wait(20)
    with pytest.raises(SessionError, match="another thread"):
        session.forward(*arguments)
    go_on.set()
    first.join()
    assert torch.equal(outputs[0], expected)
    assert torch.equal(session.forward(*arguments), expected)


def test_with_peers_a_call_that_was_refused_to_a_second_thread_counts_as_one_that_was_not_made() -> None:
    layer = make_layer(ep_size=2)
    plan = BACKEND.plan(layer.problem)

    def body(group: InprocGroup) -> torch.Tensor:
        torch.set_num_threads(1)
        with BACKEND.open(plan, group, timeout_s=20) as session:
            assert isinstance(session, ReferenceSession)
            arguments = (*layer.tokens(group.rank), session.prepare(layer.weights(group.rank)))
            expected: torch.Tensor = session.forward(*arguments)
            with session._calling, pytest.raises(SessionError, match=r"another thread.*session.reset\(\)"):
                session.forward(*arguments)
            with pytest.raises(SessionError, match="the last call failed .SessionError: another thread"):
                session.forward(*arguments)
            session.reset()
            assert torch.equal(session.forward(*arguments), expected)
            return expected

    assert len(on_ranks(2, body)) == 2


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_memory_goes_with_the_session_and_not_with_the_garbage_collector(close: bool) -> None:
    _, session, arguments = opened(quant="bf16")
    session.forward(*arguments)
    memory = weakref.ref(session._executors[0]._memory)
    gc.disable()
    try:
        if close:
            session.close()
        else:
            del session
        assert memory() is None
    finally:
        gc.enable()


def test_a_closed_session_says_so() -> None:
    _, session, _ = opened(quant="bf16")
    session.close()
    asks = (session.receive_counts, session.stats, session.keep_taps, session.taps, session.check, session.warmup)
    for ask in (*asks, session.__enter__):
        with pytest.raises(SessionError, match="closed"):
            ask()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_session_is_not_copied(duplicate: Callable[[Any], Any]) -> None:
    _, session, _ = opened(quant="bf16")
    with pytest.raises(SessionError, match="can't be copied"):
        duplicate(session)

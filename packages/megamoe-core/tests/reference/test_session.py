"""Sessions: arguments, counts, groups, failures and life."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from layers import make_layer

from megamoe import VirtualRanks, expert_tensors
from megamoe.errors import (
    CapacityError,
    ConfigError,
    InputError,
    LayoutError,
    MegaMoETimeoutError,
    RankFailedError,
    SessionError,
    UnsupportedProblemError,
    WorkspaceError,
)
from megamoe.reference.backend import ReferenceBackend
from megamoe.symm import InprocGroup

BACKEND = ReferenceBackend()
TIMEOUT_S = 20.0


def open_virtual(layer, **options):
    session = BACKEND.open(BACKEND.plan(layer.problem, **options), VirtualRanks(), timeout_s=TIMEOUT_S)
    return session, [session.prepare(owned) for owned in layer.all_weights()]


def on_ranks(layer, function, *, timeout_s=TIMEOUT_S):
    """`function(rank, session, weights)` on a thread per rank; what each returned, or its exception."""
    groups = InprocGroup.create(layer.problem.ep_size)
    plan = BACKEND.plan(layer.problem)

    def run(rank):
        torch.set_num_threads(1)
        with BACKEND.open(plan, groups[rank], timeout_s=timeout_s) as session:
            try:
                return function(rank, session, session.prepare(layer.weights(rank)))
            except Exception as error:
                return error

    with ThreadPoolExecutor(layer.problem.ep_size) as pool:
        return list(pool.map(run, range(layer.problem.ep_size)))


# -- groups ----------------------------------------------------------------------------------------------------------


def test_threads_give_the_bits_of_virtual_ranks() -> None:
    layer = make_layer(ep_size=4, num_tokens=30)
    session, weights = open_virtual(layer)
    expected = session.forward(*layer.all_tokens(), weights)
    got = on_ranks(layer, lambda rank, session, weights: session.forward(*layer.tokens(rank), weights))
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_plan_for_several_ranks_needs_them() -> None:
    plan = BACKEND.plan(make_layer(ep_size=2).problem)
    with pytest.raises(ConfigError, match="needs a group"):
        BACKEND.open(plan)
    with pytest.raises(ConfigError, match="got 3 ranks; expected ep_size = 2"):
        BACKEND.open(plan, InprocGroup.create(3)[0])
    with pytest.raises(ConfigError, match="not a group of ranks; got str"):
        BACKEND.open(plan, "ranks")
    with pytest.raises(ConfigError, match=r"got <class '.*VirtualRanks'>; expected .* or VirtualRanks\(\)"):
        BACKEND.open(plan, VirtualRanks)


def test_plans_have_to_be_equal() -> None:
    layer = make_layer(ep_size=2)
    plans = [BACKEND.plan(layer.problem), BACKEND.plan(layer.problem, config="tight")]
    groups = InprocGroup.create(2)
    with ThreadPoolExecutor(2) as pool:
        opened = [pool.submit(BACKEND.open, plans[rank], groups[rank], timeout_s=TIMEOUT_S) for rank in range(2)]
        for rank, future in enumerate(opened):
            with pytest.raises(ConfigError, match=f"rank {1 - rank} opens another plan"):
                future.result()


def test_a_workspace_can_be_handed_in() -> None:
    layer = make_layer()
    plan = BACKEND.plan(layer.problem)
    workspace = torch.full((plan.bytes,), 0xFF, dtype=torch.uint8)  # NaN and wrong flags everywhere
    session = BACKEND.open(plan, workspace=workspace)
    weights = session.prepare(layer.weights(0))
    got = session.forward(*layer.tokens(0), weights)
    with BACKEND.open(plan) as own:
        assert torch.equal(got, own.forward(*layer.tokens(0), weights))
    with pytest.raises(WorkspaceError, match="too small"):
        BACKEND.open(plan, workspace=workspace[:-1])
    with pytest.raises(WorkspaceError, match="contiguous"):
        BACKEND.open(plan, workspace=torch.zeros(plan.bytes, 2, dtype=torch.uint8)[:, 0])
    with pytest.raises(ConfigError, match="own memory"):
        BACKEND.open(plan, VirtualRanks(), workspace=workspace)


# -- tokens and ids --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(0, 5, 12), (12, 0, 0), (0, 0, 0), (1, 1, 1)], ids=str)
def test_uneven_and_no_tokens(counts: tuple[int, ...]) -> None:
    layer = make_layer(ep_size=3, num_tokens=36, num_experts=6)
    session, weights = open_virtual(layer)
    x, ids, topk_weights = layer.all_tokens()
    expected = session.forward(x, ids, topk_weights, weights)
    cut = [[tensor[:n] for tensor, n in zip(column, counts, strict=True)] for column in (x, ids, topk_weights)]
    for got, want, n in zip(session.forward(*cut, weights), expected, counts, strict=True):
        assert torch.equal(got, want[:n])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_that_name_no_expert(dtype: torch.dtype) -> None:
    layer = make_layer(ep_size=2, num_tokens=12)
    session, weights = open_virtual(layer)
    x, ids, topk_weights = layer.all_tokens()
    ids = [tensor.to(dtype) for tensor in ids]
    zeroed = [tensor.clone() for tensor in topk_weights]
    for rank, token, slot in ((0, 1, 2), (1, 0, 0), (1, 0, 1), (1, 0, 2)):
        zeroed[rank][token, slot] = 0
    expected = session.forward(x, ids, zeroed, weights)
    ids[0][1, 2], ids[1][0] = 8, torch.tensor([-1, 8 + 63, -2], dtype=dtype)
    got = session.forward(x, ids, topk_weights, weights)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    assert [stats.dropped_ids for stats in session.stats()] == [1, 2]


def test_foreign_ids_are_an_error_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_DEBUG", "1")
    layer = make_layer()
    x, ids, topk_weights = layer.tokens(0)
    with BACKEND.open(BACKEND.plan(layer.problem)) as session:
        weights = session.prepare(layer.weights(0))
        ids = ids.clone()
        ids[4, 1] = 8
        with pytest.raises(InputError, match=r"topk_ids\[4, 1\]"):
            session.forward(x, ids, topk_weights, weights)
        ids[4, 1] = -1
        session.forward(x, ids, topk_weights, weights)  # a session without peers needs no reset


def test_duplicates_add_up() -> None:
    layer = make_layer(ep_size=2, num_tokens=4)
    session, weights = open_virtual(layer)
    x, ids, _ = layer.all_tokens()
    same = [torch.full_like(tensor, 5) for tensor in ids]
    ones = [torch.tensor([[0.5, 0.25, 0.25]]).expand(2, 3).contiguous() for _ in ids]
    once = [torch.tensor([[5, -1, -1]], dtype=torch.int32).expand(2, 3).contiguous() for _ in ids]
    full = [torch.tensor([[1.0, 0.0, 0.0]]).expand(2, 3).contiguous() for _ in ids]
    got = torch.cat(session.forward(x, same, ones, weights)).float()
    want = torch.cat(session.forward(x, once, full, weights)).float()
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.01)
    assert session.receive_counts()[1].tolist() == [0, 4, 0, 0]


def test_padding_rows_send_nothing_and_are_zero() -> None:
    layer = make_layer()
    x, ids, topk_weights = layer.tokens(0)
    with BACKEND.open(BACKEND.plan(layer.problem)) as session:
        weights = session.prepare(layer.weights(0))
        expected = session.forward(x, ids, topk_weights, weights)
        x, ids = x.clone(), ids.clone()
        x[10:], ids[10:] = float("nan"), 10**6
        for num_tokens in (10, torch.tensor(10, dtype=torch.int32)):
            out = torch.full_like(x, 7.0)
            got = session.forward(x, ids, topk_weights, weights, out=out, num_tokens=num_tokens)
            assert got is out
            assert torch.equal(got[:10], expected[:10])
            assert not got[10:].any()
        assert int(session.receive_counts().sum()) == 10 * 3
        assert session.stats().dropped_ids == 0
        for wrong in (-1, len(x) + 1):
            with pytest.raises(InputError, match="num_tokens"):
                session.forward(x, ids, topk_weights, weights, num_tokens=wrong)


def test_many_uneven_calls() -> None:
    """Rings and epochs go round; the smallest ring and the smallest pulls."""
    layer = make_layer(ep_size=2, num_tokens=24, hidden_size=32, intermediate_size=32)
    session, weights = open_virtual(layer, config="tight")
    x, ids, topk_weights = layer.all_tokens()
    expected = session.forward(x, ids, topk_weights, weights)
    generator = torch.Generator().manual_seed(3)
    for _ in range(300):
        counts = torch.randint(0, 13, (2,), generator=generator).tolist()
        got = session.forward(x, ids, topk_weights, weights, num_tokens=counts)
        for ours, want, n in zip(got, expected, counts, strict=True):
            assert torch.equal(ours[:n], want[:n])


# -- arguments -------------------------------------------------------------------------------------------------------


def test_arguments_are_held_against_the_plan() -> None:
    layer = make_layer(quant="a8w8")
    x, ids, topk_weights = layer.tokens(0)
    with BACKEND.open(BACKEND.plan(layer.problem)) as session:
        weights = session.prepare(layer.weights(0))
        with pytest.raises(CapacityError):
            session.forward(x.repeat(2, 1), ids.repeat(2, 1), topk_weights.repeat(2, 1), weights)
        with pytest.raises(InputError, match="hidden_states"):
            session.forward(x.float(), ids, topk_weights, weights)
        with pytest.raises(InputError, match="topk_weights"):
            session.forward(x, ids, topk_weights.double(), weights)
        with pytest.raises(LayoutError, match="prepared for something else"):
            session.forward(x, ids, topk_weights, replace(weights, layout="interleaved_8"))
        with pytest.raises(InputError, match="another device; got meta; expected cpu"):
            session.forward(x.to("meta"), ids.to("meta"), topk_weights.to("meta"), weights)
        session.forward(x, ids, topk_weights, weights)


def test_virtual_ranks_take_lists() -> None:
    layer = make_layer(ep_size=2)
    session, weights = open_virtual(layer)
    x, ids, topk_weights = layer.all_tokens()
    with pytest.raises(InputError, match="hidden_states is not one entry per virtual rank"):
        session.forward(x[0], ids, topk_weights, weights)
    with pytest.raises(InputError, match="weights is not one entry per virtual rank; got 1 entries"):
        session.forward(x, ids, topk_weights, weights[:1])


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"quant": "a8w8", "hidden_size": 192}, "hidden_size is 192"),
        ({"quant": "a8w8", "intermediate_size": 64}, "intermediate_size is 64"),
        ({"quant": "a4w4", "hidden_size": 48}, "hidden_size is 48"),
        ({"transport": "fp8_blockwise_1x32", "hidden_size": 40}, "hidden_size 40"),
    ],
    ids=str,
)
def test_what_a_format_cannot_hold_is_refused(fields, reason: str) -> None:
    problem = replace(make_layer().problem, **fields)
    assert not BACKEND.supports(problem).ok
    with pytest.raises(UnsupportedProblemError, match=reason):
        BACKEND.plan(problem)


def test_configurations_have_names() -> None:
    problem = make_layer().problem
    for name in BACKEND.configs(problem):
        assert BACKEND.plan(problem, config=name).config.name == name
    with pytest.raises(ConfigError, match="no such configuration"):
        BACKEND.plan(problem, config="fast")


# -- failures --------------------------------------------------------------------------------------------------------


def too_many_tokens(layer, rank):
    return [torch.cat((tensor, tensor[:1])) for tensor in layer.tokens(rank)]


def test_too_many_tokens_on_one_rank_end_the_call_on_all() -> None:
    layer = make_layer(ep_size=3, num_experts=6)
    session, weights = open_virtual(layer)
    expected = session.forward(*layer.all_tokens(), weights)

    def run(rank, session, weights):
        tokens = layer.tokens(rank)
        session.forward(*tokens, weights)
        began, errors = time.monotonic(), []
        for _ in range(2):
            with pytest.raises((CapacityError, RankFailedError, SessionError)) as caught:
                session.forward(*(too_many_tokens(layer, rank) if rank == 1 else tokens), weights)
            errors.append(caught.value)
        assert time.monotonic() - began < TIMEOUT_S / 2
        with pytest.raises(type(errors[0])):
            session.check()
        session.reset()
        session.check()
        return [type(error) for error in errors], getattr(errors[0], "peer", None), session.forward(*tokens, weights)

    results = on_ranks(layer, run)
    assert [result[0] for result in results] == [
        [RankFailedError, SessionError],
        [CapacityError, SessionError],
        [RankFailedError, SessionError],
    ]
    assert [result[1] for result in results] == [1, None, 1]
    assert all(torch.equal(result[2], want) for result, want in zip(results, expected, strict=True))


def test_an_error_in_the_middle_of_a_call_ends_it_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from megamoe.reference import executor

    layer = make_layer(ep_size=2, num_tokens=200)
    original = executor.gemm2
    failing = threading.Event()

    def gemm2(*arguments):
        if failing.is_set() and threading.current_thread().name == "rank 1":
            raise ZeroDivisionError("deliberate")
        return original(*arguments)

    monkeypatch.setattr(executor, "gemm2", gemm2)

    def run(rank, session, weights):
        threading.current_thread().name = f"rank {rank}"
        out = torch.zeros_like(layer.tokens(rank)[0])
        failing.set()
        with pytest.raises((ZeroDivisionError, RankFailedError)) as caught:
            session.forward(*layer.tokens(rank), weights, out=out)
        failing.clear()
        session.reset()
        return type(caught.value), bool(out.isnan().all()), session.forward(*layer.tokens(rank), weights)

    results = on_ranks(layer, run)
    assert [result[:2] for result in results] == [(RankFailedError, True), (ZeroDivisionError, True)]
    session, weights = open_virtual(layer)
    for result, want in zip(results, session.forward(*layer.all_tokens(), weights), strict=True):
        assert torch.equal(result[2], want)


def test_a_rank_that_does_not_call_is_named() -> None:
    layer = make_layer(ep_size=2)
    waited = threading.Event()

    def run(rank, session, weights):
        if rank == 1:
            waited.wait(TIMEOUT_S)
        else:
            with pytest.raises(MegaMoETimeoutError) as caught:
                session.forward(*layer.tokens(rank), weights)
            waited.set()
            assert session.stats().timeouts == 1
            return caught.value
        return None

    error, _ = on_ranks(layer, run, timeout_s=0.5)
    assert (error.rank, error.peer, error.phase, error.epoch, error.index) == (0, 1, "dispatch", 1, 1)


def test_a_late_rank_is_waited_for() -> None:
    layer = make_layer(ep_size=2)

    def run(rank, session, weights):
        time.sleep(0.5 * rank)
        return session.forward(*layer.tokens(rank), weights)

    assert all(isinstance(result, torch.Tensor) for result in on_ranks(layer, run))


def test_bad_arguments_of_one_virtual_rank_cost_nothing() -> None:
    layer = make_layer(ep_size=2)
    session, weights = open_virtual(layer)
    x, ids, topk_weights = layer.all_tokens()
    with pytest.raises(InputError, match="virtual rank 1: hidden_states has the wrong dtype"):
        session.forward([x[0], x[1].float()], ids, topk_weights, weights)
    out = topk_weights[0].view(torch.bfloat16)
    with pytest.raises(InputError, match="virtual rank 0: out has the wrong shape"):
        session.forward(x, ids, topk_weights, weights, out=[out, None])
    memory = torch.zeros_like(x[1])
    shared = memory.view(torch.float32)[:, : topk_weights[1].shape[1]].copy_(topk_weights[1])
    with pytest.raises(InputError, match="virtual rank 1: out shares memory with topk_weights"):
        session.forward(x, ids, [topk_weights[0], shared], weights, out=[None, memory])
    session.forward(x, ids, topk_weights, weights)


# -- life ------------------------------------------------------------------------------------------------------------


def test_close_twice_and_use_after() -> None:
    layer = make_layer()
    session = BACKEND.open(BACKEND.plan(layer.problem))
    weights = session.prepare(layer.weights(0))
    session.close()
    session.close()
    for call in (
        lambda: session.forward(*layer.tokens(0), weights),
        lambda: session.prepare(layer.weights(0)),
        session.reset,
        session.check,
        session.warmup,
    ):
        with pytest.raises(SessionError, match="closed"):
            call()


def test_sessions_come_and_go_without_a_trace() -> None:
    layer = make_layer(ep_size=2)
    threads = threading.active_count()
    torch.set_num_threads(2)
    for _ in range(50):
        session, weights = open_virtual(layer)
        session.forward(*layer.all_tokens(), weights)
        session.close()
    assert threading.active_count() == threads


def test_two_sessions_share_weights_but_not_memory() -> None:
    layer = make_layer(ep_size=2)
    (one, weights), (two, _) = open_virtual(layer), open_virtual(layer, config="tight")
    x, ids, topk_weights = layer.all_tokens()
    first = one.forward(x, ids, topk_weights, weights)
    two.forward([-t for t in x], ids, topk_weights, weights)
    assert all(torch.equal(*pair) for pair in zip(first, one.forward(x, ids, topk_weights, weights), strict=True))


def test_experts_move_in_place() -> None:
    """Load balancing: expert 2 becomes a copy of expert 6, of another rank, between two calls."""
    layer = make_layer(quant="a4w4", ep_size=2)
    session, weights = open_virtual(layer)
    x, ids, topk_weights = layer.all_tokens()
    as_6 = [torch.where(tensor == 2, 6, tensor) for tensor in ids]
    expected = session.forward(x, as_6, topk_weights, weights)
    target, source = expert_tensors(weights[0]), expert_tensors(weights[1])
    for name, tensor in target.items():
        tensor[2] = source[name][2]
    got = session.forward(x, ids, topk_weights, weights)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def test_statistics_say_what_each_stage_did() -> None:
    layer = make_layer(quant="a8w8", ep_size=2, num_tokens=20)
    session, weights = open_virtual(layer)
    for _ in range(2):
        session.forward(*layer.all_tokens(), weights)
    stats = session.stats()
    assert [rank.calls for rank in stats] == [2, 2]
    rows = 2 * layer.topk_ids.numel()
    for stage in ("dispatch", "gemm1", "swiglu_quant", "gemm2", "p2p"):
        assert sum(rank.stage_rows[stage] for rank in stats) == rows, stage
        assert all(rank.stage_seconds[stage] > 0 for rank in stats)
    assert stats[0].stage_rows["quantize_input"] == stats[0].stage_rows["combine"] == 20
    assert sum(rank.stage_bytes["p2p"] for rank in stats) == rows * 2 * layer.problem.hidden_size
    row_bytes = layer.problem.hidden_size + 16  # one FP32 scale, padded to 16 bytes
    assert sum(rank.stage_bytes["dispatch"] for rank in stats) == rows * row_bytes
    assert session.warmup() >= 0


def test_the_callers_torch_settings_do_not_matter() -> None:
    """Engines set a default dtype and device, and build or call in inference mode."""
    layer = make_layer(quant="a4w4", ep_size=2)
    session, weights = open_virtual(layer)
    expected = session.forward(*layer.all_tokens(), weights)

    def check(opened):
        for got, want in zip(opened.forward(*layer.all_tokens(), weights), expected, strict=True):
            assert torch.equal(got, want)

    torch.set_num_threads(2)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.inference_mode():
            inside, _ = open_virtual(layer)
            check(inside)
            check(session)
    finally:
        torch.set_default_dtype(torch.float32)
    check(inside)
    check(session)


def test_weights_of_another_device_are_refused() -> None:
    layer = make_layer()
    weights = layer.weights(0)
    with pytest.raises(InputError, match="w2_weight is not on CPU"):
        BACKEND.open(BACKEND.plan(layer.problem)).prepare(replace(weights, w2_weight=weights.w2_weight.to("meta")))

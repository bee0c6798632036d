"""Worlds: the same calls give the same bits however the ranks are run, and failures come back rank by rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megamoe.errors import InputError, MegaMoETimeoutError, RankFailedError
from megamoe.launch import RankProcessError
from megamoe.reference.backend import ReferenceBackend
from megamoe.testing.agent import GUARD_BYTES, Agent, guard
from megamoe.testing.cases import A8W4, Layer, build
from megamoe.testing.checks import check_same_bits
from megamoe.testing.data import make_calls, make_weights, shard, with_tensors
from megamoe.testing.launcher import Outcome, ProcessWorld, ThreadWorld, VirtualWorld, World, values

CPU = torch.device("cpu")
CASE = build(Layer.EDGE, "launcher", A8W4, device_class="cpu")
PLAN = ReferenceBackend().plan(CASE.problem)


@pytest.fixture(scope="module", params=["virtual", "threads", "processes"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    size = CASE.problem.ep_size
    made: World
    if request.param == "virtual":
        made = VirtualWorld(ReferenceBackend(), CPU, size)
    elif request.param == "threads":
        made = ThreadWorld(ReferenceBackend(), CPU, size)
    else:
        made = ProcessWorld("reference", "cpu", size)
    with made:
        yield made


def test_same_bits_in_every_world(world: World) -> None:
    calls, shards = make_calls(CASE, CPU), shard(make_weights(CASE.problem, CPU), CASE.problem.ep_size)
    with VirtualWorld(ReferenceBackend(), CPU, CASE.problem.ep_size) as here, here.open(PLAN) as session:
        expected = session.forward(calls, session.prepare(shards))
    with world.open(PLAN, timeout_s=60) as session:
        weights = session.prepare(shards)
        check_same_bits(session.forward(calls, weights), expected, "between worlds")
        many = session.forward_many([calls, calls[::-1]], [0, 1, 0], weights)
        check_same_bits([outputs[2] for outputs in many], expected, "in the third of three calls")
        assert [len(outputs) for outputs in many] == [3, 3]
        assert sum(int(counts.sum()) for counts in session.receive_counts()) == sum(
            call.topk_ids.numel() for call in calls
        )
        assert [stats.calls for stats in session.stats()] == [4, 4]


def test_errors_come_back_with_their_type_and_text(world: World) -> None:
    calls, shards = make_calls(CASE, CPU), shard(make_weights(CASE.problem, CPU), CASE.problem.ep_size)
    with world.open(PLAN, timeout_s=60) as session:
        with pytest.raises(InputError, match="w2_weight has the wrong shape"):
            session.prepare([with_tensors(one, {"w2_weight": dict(one.tensors())["w2_weight"][:1]}) for one in shards])
        weights = session.prepare(shards)
        outcomes = session.outcomes([call.rows(slice(0, 2)) for call in calls], weights)
        assert all(outcome.error is None for outcome in outcomes)


def test_sessions_and_weights_have_names_of_their_own(world: World) -> None:
    with world.open(PLAN) as one, world.open(PLAN) as other:
        shards = shard(make_weights(CASE.problem, CPU), CASE.problem.ep_size)
        assert len({one.key, other.key, one.prepare(shards), other.prepare(shards)}) == 4


def test_the_cause_is_raised_before_what_it_caused() -> None:
    cause = InputError("bad ids")
    outcomes = [Outcome(error=RankFailedError("peer failed", rank=0, peer=1)), Outcome(error=cause), Outcome(value=3)]
    with pytest.raises(InputError) as caught:
        values(outcomes)
    assert caught.value is cause
    assert values([Outcome(value=1), Outcome(value=None)]) == [1, None]


def test_a_dead_process_is_an_outcome_and_breaks_the_world() -> None:
    calls, shards = make_calls(CASE, CPU), shard(make_weights(CASE.problem, CPU), CASE.problem.ep_size)
    with ProcessWorld("megamoe.reference.backend:ReferenceBackend", "cpu", CASE.problem.ep_size) as world:
        session = world.open(PLAN, timeout_s=5)
        weights = session.prepare(shards)
        survivor, dead = world.forward_while_killing(1, session, calls, weights)
        assert isinstance(dead.error, RankProcessError)
        assert isinstance(survivor.error, RankFailedError | MegaMoETimeoutError)
        assert survivor.error.peer == 1
        assert world.broken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), ()])
def test_guards(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A byte before, a byte after, and the tensor itself: what was written is told."""
    tensor = torch.zeros(shape).to(dtype)
    guarded = guard(tensor, CPU)
    assert guarded.tensor.dtype == dtype
    assert guarded.tensor.shape == shape
    guarded.check("x")
    for place, match in ((GUARD_BYTES - 1, "before the memory of x"), (-GUARD_BYTES, "after the memory of x")):
        guarded = guard(tensor, CPU)
        guarded.buffer[place] = 1
        with pytest.raises(AssertionError, match=match):
            guarded.check("x")
    if tensor.numel():
        guarded = guard(tensor, CPU)
        guarded.buffer[GUARD_BYTES] = 1
        with pytest.raises(AssertionError, match="changed its argument x"):
            guarded.check("x")
        guarded = guard(tensor, CPU, written=True)
        guarded.buffer[GUARD_BYTES] = 1
        guarded.check("x")


class _Trespasser(ReferenceBackend):
    """Its sessions write one element too far."""

    def open(self, *arguments, **named):  # type: ignore[no-untyped-def]
        session = super().open(*arguments, **named)
        real = session.forward

        def forward(hidden_states, *rest, **options):  # type: ignore[no-untyped-def]
            torch.as_strided(hidden_states, (1,), (1,), hidden_states.storage_offset() + hidden_states.numel()).zero_()
            return real(hidden_states, *rest, **options)

        session.forward = forward
        return session


def test_every_call_is_guarded() -> None:
    case = build(Layer.EDGE, "guards", A8W4, device_class="cpu", ep_size=1)
    with VirtualWorld(_Trespasser(), CPU, 1) as world, world.open(_Trespasser().plan(case.problem)) as session:
        weights = session.prepare([make_weights(case.problem, CPU)])
        with pytest.raises(AssertionError, match="after the memory of hidden_states"):
            session.forward(make_calls(case, CPU), weights)


def test_agents_of_all_ranks_take_lists() -> None:
    agent = Agent(ReferenceBackend(), CPU, range(1), lambda size: None)
    agent.open(1, ReferenceBackend().plan(build(Layer.EDGE, "x", A8W4, device_class="cpu", ep_size=1).problem), 5.0)
    assert not agent.drives_all
    assert agent.check(1) == [None]
    assert agent.memory() == [0]
    assert agent.close(1, forget=True) == [None]
    assert not agent.sessions

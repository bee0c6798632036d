"""What a conformance test is handed: the backend under test, worlds of ranks to run it on, what it is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal, NoReturn

import pytest
import torch
from torch import Tensor

from megamoe.backend import Backend, Capability, Plan, Reason, missing_capability
from megamoe.errors import UnsupportedProblemError
from megamoe.problem import MoEProblem
from megamoe.reference.oracle import oracle
from megamoe.reference.staged import Staged, staged
from megamoe.tensors import ExpertWeights
from megamoe.testing.cases import MODES, Case, DeviceClass, Layer, Mode, build
from megamoe.testing.data import Call, make_calls, make_weights, shard
from megamoe.testing.launcher import GroupSession, ProcessWorld, ThreadWorld, VirtualWorld, World

RankKind = Literal["virtual", "threads", "processes"]
TIMEOUT_S = 60.0  # of a wait in a test that is not about time-outs: far above any call, far below pytest's own limit
LIMIT_REASONS = frozenset(
    {Reason.TOP_K, Reason.EP_SIZE, Reason.NUM_EXPERTS, Reason.SHAPE, Reason.CAPACITY, Reason.ACT_FORMAT}
)


class Workbench:
    """See the module.

    Args:
        backend: under test.
        device: where calls are made and comparisons computed.
        ranks: how ranks are run.
        ep_sizes: EP sizes that can be run here.
        found_as: what processes of ranks find the backend by; None: its name.
    """

    def __init__(
        self,
        backend: Backend,
        device: torch.device,
        ranks: RankKind,
        ep_sizes: Sequence[int],
        *,
        found_as: str | None = None,
    ) -> None:
        self.backend = backend
        self.found_as = found_as or backend.name
        self.device = device
        self.ranks = ranks
        self.ep_sizes = tuple(ep_sizes)
        self.refusals: Counter[str] = Counter()
        self._worlds: dict[int, World] = {}

    @property
    def device_class(self) -> DeviceClass:
        """Which sizes the cases take."""
        return "cpu" if self.device.type == "cpu" else "gpu"

    # -- what the backend does not do ---------------------------------------------------------------------------------

    def require(self, problem: MoEProblem) -> None:
        """Go on if the backend supports `problem`; otherwise check its refusal and end the test as refused."""
        if not self.backend.supports(problem).ok:
            self.refuse(check_refusal(self.backend, problem))

    def require_capability(self, capability: Capability) -> None:
        """Go on if the backend claims `capability`; end the test as refused otherwise."""
        if capability not in self.backend.capabilities():
            self.refuse(f"does not claim {capability}")

    def refuse(self, why: str) -> NoReturn:
        """End the test as refused: the only way to skip that passes."""
        self.refusals[why] += 1
        pytest.skip(why)

    # -- worlds -----------------------------------------------------------------------------------------------------

    def largest_ep(self, most: int) -> int:
        """The largest EP size that is to be run, up to `most`; 1 where all are larger, for tests of a single rank."""
        return max((size for size in self.ep_sizes if size <= most), default=1)

    def world(self, ep_size: int) -> World:
        """Ranks that all tests of this EP size share: to start eight processes takes longer than most tests."""
        world = self._worlds.get(ep_size)
        if world is not None and world.broken:
            world.close()
            world = None
        if world is None:
            world = self._worlds[ep_size] = self.new_world(ep_size)
        return world

    def new_world(self, ep_size: int) -> World:
        """Ranks of the caller's own, for tests that break them. Close it."""
        if self.ranks == "virtual":
            return VirtualWorld(self.backend, self.device, ep_size)
        if self.ranks == "threads":
            return ThreadWorld(self.backend, self.device, ep_size)
        return ProcessWorld(self.found_as, self.device.type, ep_size)

    def open(self, problem: MoEProblem, *, config: str | None = None, timeout_s: float = TIMEOUT_S) -> GroupSession:
        """Open sessions for `problem` on the shared world; refuses what the backend does."""
        self.require(problem)
        return self.world(problem.ep_size).open(self.plan(problem, config=config), timeout_s=timeout_s)

    def plan(self, problem: MoEProblem, *, config: str | None = None) -> Plan:
        """The backend's plan for its own device."""
        return self.backend.plan(problem, config=config)

    def close(self) -> None:
        """End the ranks of all shared worlds."""
        while self._worlds:
            self._worlds.popitem()[1].close()

    # -- cases ------------------------------------------------------------------------------------------------------

    def case(self, mode: Mode, *, ep_size: int = 1, **fields: Any) -> Case:
        """A case of this device's sizes that is not in the table; refuses what the backend does."""
        case = build(
            Layer.EDGE, "own", mode, device_class=self.device_class, ep_size=self.largest_ep(ep_size), **fields
        )
        self.require(case.problem)
        return case

    def any_case(self, *, ep_size: int = 1, **fields: Any) -> Case:
        """`case` in the first mode that the backend supports: for tests of what does not depend on the mode."""
        for mode in MODES:
            built = build(
                Layer.EDGE, "own", mode, device_class=self.device_class, ep_size=self.largest_ep(ep_size), **fields
            )
            if self.backend.supports(built.problem).ok:
                return built
        return self.case(MODES[0], ep_size=ep_size, **fields)

    def weights(self, case: Case) -> ExpertWeights:
        """All experts of the case's layer."""
        return make_weights(case.problem, self.device, redundant=case.routing == "redundant")

    def shards(self, case: Case) -> list[ExpertWeights]:
        """Each rank's experts."""
        return shard(self.weights(case), case.problem.ep_size)

    def calls(self, case: Case, *, round_: int = 0) -> list[Call]:
        """Each rank's call."""
        return make_calls(case, self.device, round_=round_)

    def forward(
        self, problem: MoEProblem, weights: ExpertWeights, calls: Sequence[Call], **opening: Any
    ) -> list[Tensor]:
        """Open, prepare, call once and close."""
        with self.open(problem, **opening) as session:
            return session.forward(calls, session.prepare(shard(weights, problem.ep_size)))

    # -- what it is compared with -------------------------------------------------------------------------------------

    def _default_device(self) -> AbstractContextManager[object]:
        """Where the references make their tensors. On a CPU nothing needs to be said, and saying it costs a lot."""
        return nullcontext() if self.device.type == "cpu" else self.device

    def oracle(self, problem: MoEProblem, weights: ExpertWeights, calls: Sequence[Call]) -> list[Tensor]:
        """FP32 outputs of each rank from dequantised weights and unquantised activations."""
        shards = shard(weights, problem.ep_size)
        outputs = []
        with self._default_device():
            for call in calls:
                assert isinstance(call.hidden_states, Tensor), "the oracle takes activations that are not quantised"
                outputs.append(oracle(problem, call.hidden_states, call.topk_ids, call.topk_weights, shards))
        return outputs

    def staged(self, problem: MoEProblem, weights: ExpertWeights, calls: Sequence[Call]) -> Staged:
        """The staged reference's outputs and taps."""
        with self._default_device():
            return staged(
                problem,
                [call.hidden_states for call in calls],
                [call.topk_ids for call in calls],
                [call.topk_weights for call in calls],
                shard(weights, problem.ep_size),
            )


def check_refusal(backend: Backend, problem: MoEProblem) -> str:
    """Hold a refusal to its contract and return it as text: a listed reason, a detail, and `plan` refuses likewise.

    A backend may not refuse a format that it claims; it may refuse sizes.
    """
    verdict = backend.supports(problem)
    assert verdict == backend.supports(problem), "supports() gives two answers to one question"
    assert isinstance(verdict.reason, Reason), f"{verdict.reason!r} is not a Reason"
    assert verdict.reason is not Reason.OK, "refused with reason ok"
    assert verdict.detail.strip(), f"refused for {verdict.reason} without a detail"
    if missing_capability(problem, backend.capabilities()).ok:
        assert verdict.reason in LIMIT_REASONS, (
            f"claims all formats of the problem, yet refuses it for {verdict.reason}"
        )
    with pytest.raises(UnsupportedProblemError, match=str(verdict.reason)):
        backend.plan(problem)
    return f"{verdict.reason}: {verdict.detail}"


def with_capacity(problem: MoEProblem, capacity: int) -> MoEProblem:
    """The same layer in a session of another capacity."""
    return replace(problem, num_max_tokens_per_rank=capacity)


def with_ep_size(problem: MoEProblem, ep_size: int) -> MoEProblem:
    """The same layer over another number of ranks."""
    return replace(problem, ep_size=ep_size)

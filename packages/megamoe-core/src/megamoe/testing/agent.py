"""What one participant of a test world does when the test tells it to: opens sessions, prepares weights, makes calls.

A participant drives one rank, or, with virtual ranks, all of them; each of its methods takes and returns lists with one
entry per rank that it drives. Sessions and weights stay here, on the participant's side, and are named by numbers.

Every tensor handed to `forward` lies between guard bytes. The guards around inputs and the inputs themselves must be
unchanged after the call (unless the output is written in their place), and the guards around the output intact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megamoe.backend import Backend, HiddenStates, Plan, Session, SessionStats, StageTaps, VirtualRanks
from megamoe.symm import Group
from megamoe.tensors import ExpertWeights, PreparedWeights, expert_tensors
from megamoe.testing.data import Call, with_tensors

GUARD_BYTES = 4096  # on each side; a multiple of every alignment that a kernel asks of a tensor
GUARD_BYTE = 0xFF  # NaN in BF16, FP32, e4m3fn and E8M0, -1 in ids: what is read beyond the end shows in the result


@dataclass(frozen=True)
class Guarded:
    """A tensor in the middle of a larger buffer.

    Args:
        tensor: the view to hand out.
        buffer: uint8, `GUARD_BYTES` on both sides of it.
        before: a copy of the buffer, or None where the tensor will be written.
    """

    tensor: Tensor
    buffer: Tensor
    before: Tensor | None

    def check(self, name: str) -> None:
        """Raise AssertionError if a guard, or a tensor that is only read, was written."""
        for side, guard in (("before", self.buffer[:GUARD_BYTES]), ("after", self.buffer[-GUARD_BYTES:])):
            assert (guard == GUARD_BYTE).all(), f"forward wrote {side} the memory of {name}"
        if self.before is not None:
            assert torch.equal(self.buffer, self.before), f"forward changed its argument {name}"


def guard(tensor: Tensor, device: torch.device, *, written: bool = False) -> Guarded:
    """A contiguous copy of `tensor` on `device` between guard bytes."""
    num_bytes = tensor.numel() * tensor.element_size()
    buffer = torch.full((num_bytes + 2 * GUARD_BYTES,), GUARD_BYTE, dtype=torch.uint8, device=device)
    view = buffer[GUARD_BYTES : GUARD_BYTES + num_bytes].view(tensor.dtype).view(tensor.shape)
    view.copy_(tensor)
    return Guarded(view, buffer, None if written else buffer.clone())


class Agent:
    """One participant.

    Args:
        backend: under test.
        device: where calls are made.
        ranks: the ranks it drives.
        make_group: the group argument of `Backend.open`, called for each session; COLLECTIVE where groups are.
    """

    def __init__(
        self, backend: Backend, device: torch.device, ranks: Sequence[int], make_group: Callable[[int], Any]
    ) -> None:
        self.backend = backend
        self.device = device
        self.ranks = ranks
        self.make_group = make_group
        self.sessions: dict[int, Session] = {}
        self.groups: dict[int, Group] = {}
        self.weights: dict[int, PreparedWeights | list[PreparedWeights]] = {}
        self.weights_of: dict[int, list[int]] = {}
        self.drives_all = False

    def open(self, key: int, plan: Plan, timeout_s: float | None) -> list[None]:
        """COLLECTIVE. Open a session under the name `key`."""
        group = self.make_group(plan.problem.ep_size)
        self.drives_all = isinstance(group, VirtualRanks)
        if isinstance(group, Group):
            self.groups[key] = group
        self.sessions[key] = self.backend.open(plan, group, timeout_s=timeout_s)
        return self._each(None)

    def prepare(self, key: int, weights_key: int, shards: list[ExpertWeights]) -> list[None]:
        """Prepare each rank's experts under the name `weights_key`."""
        prepared = [self.sessions[key].prepare(_weights_to(shard, self.device)) for shard in shards]
        self._keep(key, weights_key, prepared)
        return self._each(None)

    def prepare_tensors(self, key: int, weights_key: int, arguments: list[dict[str, Any]]) -> list[None]:
        """`prepare_weights(**arguments)`, as a user calls it."""
        prepared = [
            self.sessions[key].prepare_weights(**{name: _to(value, self.device) for name, value in kwargs.items()})
            for kwargs in arguments
        ]
        self._keep(key, weights_key, prepared)
        return self._each(None)

    def change_weights(
        self, weights_key: int, changes: list[Callable[[PreparedWeights], PreparedWeights]]
    ) -> list[None]:
        """Put what each function makes of a rank's prepared weights in their place."""
        prepared = self._unpack(self.weights[weights_key])
        self.weights[weights_key] = self._pack([change(one) for change, one in zip(changes, prepared)])
        return self._each(None)

    def move_expert(self, weights_key: int, moves: list[tuple[int, int] | None]) -> list[None]:
        """Copy local expert `source` over `destination` in place, in every tensor that the kernels read."""
        for prepared, move in zip(self._unpack(self.weights[weights_key]), moves):
            if move is not None:
                source, destination = move
                for tensor in expert_tensors(prepared).values():
                    tensor[destination].copy_(tensor[source])
        return self._each(None)

    def forward(self, key: int, weights_key: int, calls: list[Call]) -> list[Tensor]:
        """COLLECTIVE. One guarded call."""
        session = self.sessions[key]
        for call in calls:
            if call.delay_s:
                time.sleep(call.delay_s)
        guards: list[tuple[str, Guarded]] = []

        def protect(name: str, tensor: Tensor, *, strided: bool = False, written: bool = False) -> Tensor:
            guarded = guard(_with_gaps(tensor) if strided else tensor, self.device, written=written)
            guards.append((name, guarded))
            return guarded.tensor[::2] if strided else guarded.tensor

        hidden = [_protect_hidden(call, protect) for call in calls]
        given = [self._out(session, call, rows, protect) for call, rows in zip(calls, hidden)]
        out = session.forward(
            self._pack(hidden),
            self._pack([protect("topk_ids", call.topk_ids, strided=call.strided) for call in calls]),
            self._pack([protect("topk_weights", call.topk_weights, strided=call.strided) for call in calls]),
            self.weights[weights_key],
            out=None if given[0] is None else self._pack(given),
            num_tokens=self._num_tokens(calls),
        )
        session.check()
        results: list[Tensor] = self._unpack(out)
        for result, tensor in zip(results, given):
            assert tensor is None or result.data_ptr() == tensor.data_ptr(), "forward did not return the given out"
        for name, guarded in guards:
            guarded.check(name)
        return [result.clone() for result in results]

    def forward_many(
        self, key: int, weights_key: int, order: list[int], rounds: list[list[Call]]
    ) -> list[list[Tensor]]:
        """COLLECTIVE. Calls back to back, without a synchronisation in between.

        Args:
            key, weights_key: what to call.
            order: which round to call at each step.
            rounds: for each driven rank, its call of every round.

        Returns:
            for each driven rank, its outputs in order.
        """
        session = self.sessions[key]
        placed = [[_call_to(call, self.device) for call in calls] for calls in zip(*rounds)]
        outputs = []
        for step in order:
            calls = placed[step]
            out = session.forward(
                self._pack([call.hidden_states for call in calls]),
                self._pack([call.topk_ids for call in calls]),
                self._pack([call.topk_weights for call in calls]),
                self.weights[weights_key],
            )
            outputs.append(self._unpack(out))
        session.check()
        return [list(of_rank) for of_rank in zip(*outputs)]

    def capture_and_replay(self, key: int, weights_key: int, rounds: list[list[Call]]) -> list[list[Tensor]]:
        """COLLECTIVE. Capture one call in a CUDA graph, then replay it with each round's tokens and token count.

        Args:
            key, weights_key: what to call.
            rounds: for each driven rank, its call of every round.

        Returns:
            for each driven rank, its outputs by round; rows past the round's tokens are cut off.
        """
        session = self.sessions[key]
        problem = session.plan.problem
        rows, picks = problem.num_max_tokens_per_rank, problem.top_k
        hidden = [torch.zeros(rows, problem.hidden_size, dtype=torch.bfloat16, device=self.device) for _ in rounds]
        ids = [torch.full((rows, picks), -1, dtype=torch.int64, device=self.device) for _ in rounds]
        router = [torch.zeros(rows, picks, device=self.device) for _ in rounds]
        counts = [torch.zeros((), dtype=torch.int32, device=self.device) for _ in rounds]

        def call() -> Any:
            arguments = (self._pack(hidden), self._pack(ids), self._pack(router), self.weights[weights_key])
            return session.forward(*arguments, num_tokens=self._pack(counts))

        session.warmup()
        call()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        outputs = []
        for calls in zip(*rounds):
            for index, one in enumerate(calls):
                hidden[index][: one.num_rows].copy_(one.bf16)
                ids[index][: one.num_rows].copy_(one.topk_ids)
                router[index][: one.num_rows].copy_(one.topk_weights)
                counts[index].fill_(one.num_rows)
            graph.replay()
            session.check()
            outputs.append([y[: one.num_rows].clone() for y, one in zip(self._unpack(out), calls)])
        return [list(of_rank) for of_rank in zip(*outputs)]

    def capture_cold(self, key: int, weights_key: int, calls: list[Call]) -> list[None]:
        """Make the session's first call inside a capture; leaves whatever it raises to the caller."""
        placed = [_call_to(call, self.device) for call in calls]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.sessions[key].forward(
                self._pack([call.hidden_states for call in placed]),
                self._pack([call.topk_ids for call in placed]),
                self._pack([call.topk_weights for call in placed]),
                self.weights[weights_key],
            )
        return self._each(None)

    def receive_counts(self, key: int) -> list[Tensor]:
        """Each rank's received rows per local expert in the last call."""
        return self._unpack(self.sessions[key].receive_counts())

    def stats(self, key: int) -> list[SessionStats]:
        """Each rank's counters."""
        return self._unpack(self.sessions[key].stats())

    def keep_taps(self, key: int) -> list[None]:
        """From the next call on, keep what stands between the stages."""
        self.sessions[key].keep_taps()
        return self._each(None)

    def taps(self, key: int) -> list[StageTaps | None]:
        """Each rank's taps of the last call; None where it received no rows."""
        return self._unpack(self.sessions[key].taps())

    def start_epochs(self, key: int, epoch: int) -> list[None]:
        """COLLECTIVE. Make `epoch` the number of the last call, where the session offers that to tests."""
        self.sessions[key].start_epochs(epoch)  # type: ignore[attr-defined]  # not part of the interface
        return self._each(None)

    def warmup(self, key: int) -> list[float]:
        """COLLECTIVE. Seconds that it took."""
        return self._each(self.sessions[key].warmup())

    def check(self, key: int) -> list[None]:
        """Raise what the last call left behind."""
        self.sessions[key].check()
        return self._each(None)

    def reset(self, key: int) -> list[None]:
        """COLLECTIVE. Recover after a failed call."""
        self.sessions[key].reset()
        return self._each(None)

    def close(self, key: int, *, forget: bool) -> list[None]:
        """COLLECTIVE. Close a session; `forget` drops it and its weights, which frees their memory."""
        self.sessions[key].close()
        if forget:
            del self.sessions[key]
            for weights_key in self.weights_of.pop(key, ()):
                del self.weights[weights_key]
        if key in self.groups:
            self.groups.pop(key).close()
        return self._each(None)

    def memory(self) -> list[int]:
        """Bytes that are in use on the device, by this process and all others; 0 on a CPU."""
        if self.device.type != "cuda":
            return self._each(0)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return self._each(total - free)

    def _keep(self, key: int, weights_key: int, prepared: list[PreparedWeights]) -> None:
        self.weights[weights_key] = self._pack(prepared)
        self.weights_of.setdefault(key, []).append(weights_key)

    def _out(self, session: Session, call: Call, hidden: HiddenStates, protect: Callable[..., Tensor]) -> Tensor | None:
        if call.in_place:
            assert isinstance(hidden, Tensor)
            return hidden
        if not call.give_out:
            return None
        shape = (call.num_rows, session.plan.problem.hidden_size)
        return protect("out", torch.full(shape, float("nan"), dtype=torch.bfloat16), written=True)

    def _num_tokens(self, calls: list[Call]) -> Any:
        if all(call.num_tokens is None for call in calls):
            return None
        return self._pack(
            [_to(call.num_rows if call.num_tokens is None else call.num_tokens, self.device) for call in calls]
        )

    def _pack(self, values: list[Any]) -> Any:
        """A list for a session of all ranks, the one value for a session of one."""
        return values if self.drives_all else values[0]

    def _unpack(self, value: Any) -> list[Any]:
        return list(value) if self.drives_all else [value]

    def _each(self, value: Any) -> list[Any]:
        return [value] * len(self.ranks)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(_to(item, device) for item in value)
    return value.to(device) if isinstance(value, Tensor) else value


def _weights_to(weights: ExpertWeights, device: torch.device) -> ExpertWeights:
    return with_tensors(weights, {name: tensor.to(device) for name, tensor in weights.tensors()})


def _call_to(call: Call, device: torch.device) -> Call:
    return replace(
        call,
        hidden_states=_to(call.hidden_states, device),
        topk_ids=call.topk_ids.to(device),
        topk_weights=call.topk_weights.to(device),
    )


def _protect_hidden(call: Call, protect: Callable[..., Tensor]) -> HiddenStates:
    if isinstance(call.hidden_states, Tensor):
        return protect("hidden_states", call.hidden_states, strided=call.strided, written=call.in_place)
    payload, scales = call.pair
    return protect("hidden_states payload", payload), protect("hidden_states scales", scales)


def _with_gaps(tensor: Tensor) -> Tensor:
    """`tensor` in the even rows, -1 in the odd ones."""
    return torch.stack((tensor, torch.full_like(tensor, -1)), dim=1).flatten(0, 1)

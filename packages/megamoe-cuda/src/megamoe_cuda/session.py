"""One plan, opened: the workspace, the loaded kernels, and the calls.

A call is one launch on the caller's stream: no synchronisation with the host, no compilation, and no allocation but
that of `out`, where the caller gives none. What changes from call to call travels in the launch's arguments or is read
by the kernel from device memory (the epoch, a device-side `num_tokens`), so a captured launch can be replayed.

Calls of one session are ordered by their stream; to use several streams, order them with events. Two sessions may be
open side by side, but the launches of both must come in the same order on every rank: each takes all of the plan's SMs
at once and holds them until its peers have done their part. The same holds for any other kernel that waits for peers,
such as a collective on a side stream: where it runs on one rank and is queued behind the call on another, both wait
until the time-out. A plan with fewer SMs (`device.num_sms`) leaves room for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from megamoe.backend import Plan, StageTaps
from megamoe.call_checks import (
    check_call,
    of_each,
    overlaps,
    payload_and_scales,
    refuse_gradients,
    require_aligned,
    require_own_memory,
    valid_rows,
)
from megamoe.device_session import DeviceSession
from megamoe.errors import (
    CaptureError,
    MegaMoETimeoutError,
    ProtocolError,
    RankFailedError,
    SessionError,
)
from megamoe.schedule.workspace import WORD
from megamoe.symm import Group, PeerMemory
from megamoe.tensors import ExpertWeights, PreparedWeights, require_prepared
from megamoe_cuda import weights as kernel_weights
from megamoe_cuda.heuristics import SessionConfig
from megamoe_cuda.jit.store import load_or_compile
from megamoe_cuda.kernel_config import KernelConfig, TileConfig
from megamoe_cuda.launcher import FAILURE_RECORD, TRACE_POINTS, Failure, LoadedKernel, RankCall, read_failure
from megamoe_cuda.taps import read_taps
from megamoe_cuda.workspace_layout import initial_words, kernel_workspace

ALIGNMENT = 16  # bytes; the kernel reads and writes rows in pieces of 16
MAX_CHECKED = 4096  # sets of shapes and dtypes, and of addresses, that a session remembers as right
RECORD_WORDS = FAILURE_RECORD.size // WORD


class CudaSession(DeviceSession):
    """See `megamoe.backend.Session`; made by `CudaBackend.open`."""

    weight_layout: ClassVar[str] = kernel_weights.LAYOUT

    def __init__(
        self,
        plan: Plan,
        *,
        group: Group | None,
        virtual: bool,
        device: torch.device,
        timeout_s: float,
        allocate: Callable[[int], PeerMemory],
    ) -> None:
        """Local. See `DeviceSession`; `plan` is one of `CudaBackend`, `device` the GPU."""
        super().__init__(plan, group=group, virtual=virtual, device=device, timeout_s=timeout_s, allocate=allocate)
        assert isinstance(plan.config, SessionConfig)
        self._config = plan.config
        self._addresses: list[int] = []
        self._kernels: dict[str, LoadedKernel] = {}  # by the name of the tile
        self._tiles: dict[int, TileConfig] = {}  # by the number of tokens
        self._last_tile = self._config.tiles[0]
        self._checked: set[tuple[object, ...]] = set()  # shapes and dtypes of arguments that were found right
        self._checked_addresses: set[tuple[object, ...]] = set()  # and tokens, of calls with `out`
        self._records = pinned_words(len(self._driven) * RECORD_WORDS)
        self._records_address = self._records.data_ptr()
        self._record_words = (ctypes.c_uint32 * self._records.numel()).from_address(self._records_address)
        # Rows by driven rank and local expert, of the last call.
        self._received = torch.zeros(
            len(self._driven), plan.problem.num_local_experts, dtype=torch.int32, device=device
        )
        self._received_addresses = [row.data_ptr() for row in self._received]
        self._stamps: Tensor | None = None  # times by driven rank, CTA and point, where a trace is kept

    # -- memory -------------------------------------------------------------------------------------------------

    def _take_memory(self) -> None:
        self._memory = self._allocate(self._layout.num_bytes)
        self._addresses = [rank.data_ptr() for rank in self._memory.ranks]

    def _words(self, rank: int, array: str) -> Tensor:
        place = self._layout[array]
        return self._memory.ranks[rank][place.offset : place.offset + place.num_bytes].view(torch.int32)

    def _set_flags(self, rank: int, epoch: int) -> None:
        for name, value in initial_words(self._layout, epoch):
            self._words(rank, name).fill_(_as_int32(value))

    # -- weights ------------------------------------------------------------------------------------------------

    def _prepare(self, weights: ExpertWeights) -> PreparedWeights:
        return kernel_weights.prepare(weights, self.plan.problem, self._device)

    # -- calls --------------------------------------------------------------------------------------------------

    def _call(self, rows: Sequence[Sequence[Any]]) -> list[Tensor]:
        padded = [row[4] for row in rows if row[4] is not None and row[5] is not None]  # outputs with padding
        calls = of_each(partial(self._prepare_call, padded=padded), rows, virtual=self.ep_rank is None)
        if padded:
            _zero(padded)  # the kernel writes valid rows only
        num_rows, outputs, launches, _ = zip(*calls, strict=True)
        kernel = self._kernel_for(max(num_rows))
        if torch.cuda.current_device() == self._device.index:
            self._launch(kernel, launches)
        else:
            with torch.cuda.device(self._device):
                self._launch(kernel, launches)
        return list(outputs)

    def _launch(self, kernel: LoadedKernel, calls: Sequence[RankCall]) -> None:
        torch.cuda.nvtx.range_push("megamoe.forward")  # type: ignore[no-untyped-call]
        try:
            kernel.launch(calls=calls, stream=current_stream(self._device.index))
        finally:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def _prepare_call(
        self,
        index: int,
        hidden_states: Any,
        topk_ids: Any,
        topk_weights: Any,
        weights: Any,
        out: Any,
        num_tokens: Any,
        *,
        padded: Sequence[Any],
    ) -> _Call:
        """Check one rank's arguments and turn them into addresses. `padded`: all ranks' outputs that are wiped next."""
        payload, scales = payload_and_scales(hidden_states)
        refuse_gradients(payload, topk_weights)
        self._check_tensors(payload, scales, topk_ids, topk_weights, weights, out)
        num_rows: int = payload.shape[0]
        host_tokens, device_tokens = num_rows, 0
        if num_tokens is not None:
            count = valid_rows(num_tokens, num_rows, self._device)
            if isinstance(count, int):
                host_tokens = count
            else:
                device_tokens = count.data_ptr()
        if self._check_ids:
            self._look_at_ids(topk_ids, num_tokens)
        payload, topk_ids, topk_weights = payload.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
        if scales is not None:
            scales = scales.contiguous()
        given = out is not None
        if not given:
            make = torch.empty if num_tokens is None else torch.zeros  # the kernel writes valid rows only
            out = make(num_rows, self.plan.problem.hidden_size, dtype=torch.bfloat16, device=self._device)
        if padded and any(isinstance(each, Tensor) and overlaps(each, payload) for each in padded):
            payload = payload.clone()
        tensors = weights.tensors
        launch = RankCall(  # by place: names would cost the host half a microsecond
            payload.data_ptr(),
            _address(scales),
            topk_ids.data_ptr(),
            topk_weights.data_ptr(),
            _address(tensors.get("w13_weight_scale")),
            _address(tensors.get("w2_weight_scale")),
            out.data_ptr(),
            device_tokens,
            self._received_addresses[index],
            0 if self._gate_up is None else self._gate_up[index].data_ptr(),
            0 if self._stamps is None else self._stamps[index].data_ptr(),
            host_tokens,
            topk_ids.dtype is torch.int64,
            _address(tensors.get("w13_bias")),
            _address(tensors.get("w2_bias")),
            tensors["w13_weight"].data_ptr(),
            tensors["w2_weight"].data_ptr(),
        )
        if not given:
            require_aligned("hidden_states", payload, ALIGNMENT)
        elif (num_rows, launch) not in self._checked_addresses:
            require_aligned("out", out, ALIGNMENT)
            require_aligned("hidden_states", payload, ALIGNMENT)
            rows = payload if scales is None else (payload, scales)
            require_own_memory(out, rows, topk_ids, topk_weights, weights, num_tokens)
            _remember(self._checked_addresses, (num_rows, launch))
        return _Call(num_rows, out, launch, (payload, scales, topk_ids, topk_weights))

    def _check_tensors(
        self, payload: Any, scales: Any, topk_ids: Any, topk_weights: Any, weights: Any, out: Any
    ) -> None:
        """Raise unless the arguments fit. What was found right once is known by its shapes and is not looked at again:
        the checks in full take the host longer than the launch."""
        try:
            facts = (
                weights.backend, weights.layout, weights.quant, weights.num_local_experts,
                weights.hidden_size, weights.intermediate_size, weights.expert_bias,
                *[tensor.device for tensor in weights.tensors.values()],
                type(payload), payload.shape, payload.dtype, payload.device,
                type(topk_ids), topk_ids.shape, topk_ids.dtype, topk_ids.device,
                type(topk_weights), topk_weights.shape, topk_weights.dtype, topk_weights.device,
                None if scales is None else (type(scales), scales.shape, scales.dtype, scales.device),
                None if out is None else (type(out), out.shape, out.dtype, out.device, out.is_contiguous()),
            )  # fmt: skip
        except AttributeError:  # something is no tensor, or weights are not prepared: the checks say which
            self._check_in_full(payload, scales, topk_ids, topk_weights, weights, out)
            raise
        if facts in self._checked:
            return
        self._check_in_full(payload, scales, topk_ids, topk_weights, weights, out)
        _remember(self._checked, facts)

    def _check_in_full(
        self, payload: Any, scales: Any, topk_ids: Any, topk_weights: Any, weights: Any, out: Any
    ) -> None:
        problem = self.plan.problem
        require_prepared(
            weights,
            backend=kernel_weights.BACKEND,
            layout=self.weight_layout,
            problem=problem,
            device=self._device,
        )
        hidden_states = payload if scales is None else (payload, scales)
        check_call(problem, hidden_states, topk_ids, topk_weights, out, device=self._device)

    # -- kernels ------------------------------------------------------------------------------------------------

    def _kernel_for(self, num_tokens: int) -> LoadedKernel:
        tile = self._tiles.get(num_tokens)
        if tile is None:
            tile = self._tiles[num_tokens] = self._config.tile_for(self.plan.problem, num_tokens)
        kernel = self._kernels.get(tile.name)
        if kernel is None:
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError(
                    f"the kernel of tile {tile.name} is not loaded, and can't be while a graph is captured",
                    hint="call session.warmup() on every rank before the capture",
                )
            kernel = self._kernels[tile.name] = self._load(tile)
        self._last_tile = tile
        return kernel

    def _load(self, tile: TileConfig) -> LoadedKernel:
        with torch.cuda.device(self._device):
            torch.cuda.mem_get_info()  # makes the context current in a thread that has not used CUDA yet
            return LoadedKernel(
                load_or_compile(self._kernel_config(tile)),
                workspaces=self._addresses,
                first_rank=self._driven.start,
                failure_records=self._records_address,
                timeout_s=self._timeout_s,
            )

    def _kernel_config(self, tile: TileConfig) -> KernelConfig:
        num_virtual = len(self._driven)
        return self._config.kernel(
            self.plan.problem,
            tile,
            num_virtual_ranks=num_virtual,
            ctas_per_rank=self.plan.device.num_sms // num_virtual,
        )

    def _load_kernels(self) -> None:
        for tile in self._config.tiles:
            if tile.name not in self._kernels:
                self._kernels[tile.name] = self._load(tile)

    def _unload_kernels(self) -> None:
        for kernel in self._kernels.values():
            kernel.unload()
        self._kernels.clear()

    # -- failures -----------------------------------------------------------------------------------------------

    def _find_failure(self) -> ProtocolError | None:
        if not any(self._record_words[::RECORD_WORDS]):
            return None
        data = bytes(self._record_words)
        records = (read_failure(data[i : i + FAILURE_RECORD.size]) for i in range(0, len(data), FAILURE_RECORD.size))
        found = [record for record in records if record is not None]
        for record in found:
            self._logger.error("a call failed: %s", record)
        # Virtual ranks fail one after the other: the cause before those that heard of it.
        first = min(found, key=lambda record: record.kind == "peer failed")
        return as_error(first, self._timeout_s, self._if_a_rank_died)

    def _forget_failure(self) -> None:
        self._records.zero_()

    # -- reports ------------------------------------------------------------------------------------------------

    def _receive_counts(self) -> list[Tensor]:
        return list(self._received.clone().unbind())

    def keep_taps(self) -> None:
        """COLLECTIVE. From the next call on, keep what stands between the stages, for tests.

        The session then runs kernels that also store GEMM1's accumulators, in a workspace whose ring holds every block
        of the fullest call, so that no block overwrites another.
        """
        self._require_healthy()
        self._give_back()
        self._config = self._config.tapped()
        self._tiles.clear()
        self._layout = kernel_workspace(self._kernel_config(self._config.tiles[0]))
        rows = max(ring.num_rows for ring in self._config.rings)
        columns = 2 * self._kernel_config(self._config.tiles[0]).intermediate_size
        self._gate_up = torch.zeros(len(self._driven), rows, columns, device=self._device).unbind()
        self.start()

    def _read_taps(self) -> list[StageTaps | None]:
        assert self._gate_up is not None
        block_m = self._last_tile.block_m
        return [
            read_taps(self.plan.problem, self._layout, self._memory.ranks[rank], gate_up, counts, block_m)
            for rank, gate_up, counts in zip(self._driven, self._gate_up, self._received.tolist(), strict=True)
        ]

    # -- trace --------------------------------------------------------------------------------------------------

    def keep_trace(self) -> None:
        """From the next call on, keep when each CTA passed each point of it. Local: other ranks need not do the same.

        The session then runs kernels that also store those times; they are compiled at the next call or `warmup`.
        """
        self._require_healthy()
        torch.cuda.synchronize(self._device)
        self._unload_kernels()
        self._config = replace(self._config, trace=True)
        ctas = self._kernel_config(self._config.tiles[0]).ctas_per_rank
        shape = (len(self._driven), ctas, len(TRACE_POINTS))
        self._stamps = torch.zeros(shape, dtype=torch.int64, device=self._device)

    def stamps_ns(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Times of the last call, [driven rank][CTA][point of `TRACE_POINTS`]; 0 where there was none. Synchronises.

        Clusters leave an odd CTA out, which then has no row.

        Raises:
            SessionError: `keep_trace` was not called before it.
        """
        self.require_open()
        if self._stamps is None:
            raise SessionError("this session keeps no trace", hint="call keep_trace() before forward()")
        ctas_per_rank = self._kernel_config(self._last_tile).ctas_per_rank  # rows behind may hold an earlier call's
        return tuple(tuple(map(tuple, ctas)) for ctas in self._stamps[:, :ctas_per_rank].tolist())


class _Call(NamedTuple):
    """One rank's arguments as the kernel takes them."""

    num_rows: int
    out: Tensor
    launch: RankCall
    inputs: tuple[
        Tensor | None, ...
    ]  # what the addresses point to: copies of strided arguments must live to the launch


def as_error(failure: Failure, timeout_s: float, if_a_rank_died: str | None = None) -> ProtocolError:
    """What a session raises for it.

    Args:
        failure: a kernel's record.
        timeout_s: the session's.
        if_a_rank_died: what its group can do then, or None.
    """
    rank, peer = failure.rank, failure.peer
    where = f"in phase {failure.phase} (epoch {failure.epoch}, index {failure.index})"
    if failure.kind == "timeout":
        return MegaMoETimeoutError(
            rank=rank,
            peer=peer,
            phase=failure.phase,
            timeout_s=timeout_s,
            epoch=failure.epoch,
            index=failure.index,
            observed=failure.observed,
            awaited=failure.expected,
            if_it_died=if_a_rank_died,
        )
    if failure.kind == "peer failed":
        return RankFailedError(
            f"rank {peer} gave up a call that rank {rank} waited for {where}",
            rank=rank,
            peer=peer,
            hint=f"rank {peer}'s own error says why; every rank calls session.reset() together, or opens a new session"
            + (f"; if a rank died, {if_a_rank_died}" if if_a_rank_died else ""),
        )
    return ProtocolError(
        f"rank {rank} was sent impossible row counts by rank {peer} {where}",
        got=failure.observed,
        expected=f"at most {failure.expected}",
        hint="something wrote into the symmetric memory of this session; every rank opens a new one",
    )


@torch.inference_mode()  # they may come from inference mode, or ask for gradients, which there are none of
def _zero(outputs: Sequence[Tensor]) -> None:
    for out in outputs:
        out.zero_()


def _remember(known: set[tuple[object, ...]], facts: tuple[object, ...]) -> None:
    if len(known) == MAX_CHECKED:
        known.clear()
    known.add(facts)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def pinned_words(count: int) -> Tensor:
    """Zeroed words in host memory that the GPU can write to, at the same address."""
    return torch.zeros(count, dtype=torch.int32, device="cpu", pin_memory=True)


def current_stream(device_index: int) -> int:
    """The handle of the stream that `torch.cuda.current_stream` gives, which takes 5 us to make an object of it."""
    handle: int = torch._C._cuda_getCurrentRawStream(device_index)
    return handle


def _as_int32(value: int) -> int:
    """The int32 of the same bits as a uint32."""
    return value - (1 << 32) if value >= 1 << 31 else value

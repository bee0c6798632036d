"""One plan, opened: the workspace and the calls.

A call is a fixed sequence of launches on the caller's stream (kernels/launch.py), which a `Launcher` queues: no
synchronisation with the host, and after `warmup` nothing to compile or load. What changes from call to call is read
from device memory, the epoch and `num_tokens` among it, so a captured call can be replayed.

With virtual ranks all ranks' launches are on one stream, phase by phase: what a wait waits for came earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from megamoe.backend import HiddenStates, Plan, StageTaps
from megamoe.call_checks import (
    check_call,
    of_each,
    payload_and_scales,
    require_aligned,
    require_own_memory,
    valid_rows,
)
from megamoe.device_session import DeviceSession
from megamoe.errors import MegaMoETimeoutError, ProtocolError, RankFailedError
from megamoe.formats import activation_format
from megamoe.schedule.waves import Ring
from megamoe.symm import Group, PeerMemory
from megamoe.symm.agreement import agree
from megamoe.tensors import ExpertWeights, Mxfp4Weights, PreparedWeights, require_prepared
from megamoe_rocm import weights as kernel_weights
from megamoe_rocm.heuristics import SessionConfig, TileConfig
from megamoe_rocm.kernels.launch import PHASES, CallTensors, RankCall, stage1_parameters
from megamoe_rocm.kernels.workspace import STATUS_WORDS, RankMemory, kernel_workspace
from megamoe_rocm.runtime.launcher import Launcher
from megamoe_rocm.taps import read_taps

ALIGNMENT = 16  # bytes; what kernels are told about every tensor
ROW_STRIDES = {torch.bfloat16: 16, torch.uint8: 8}  # elements, of the caller's rows a multiple of these
NO_LIMIT = 2**31 - 1  # num_tokens where the caller gives none
PEER_GAVE_UP = 2  # in `status` and its reports; kernels/flags.py


class RocmSession(DeviceSession):
    """See `megamoe.backend.Session`."""

    weight_layout: ClassVar[str] = kernel_weights.LAYOUT

    def __init__(
        self,
        plan: Plan,
        *,
        group: Group | None,
        virtual: bool,
        launcher: Launcher,
        timeout_s: float,
        allocate: Callable[[int], PeerMemory],
    ) -> None:
        """Local. See `DeviceSession`; `launcher` runs launches, and says on which device tensors are."""
        device = launcher.device
        super().__init__(plan, group=group, virtual=virtual, device=device, timeout_s=timeout_s, allocate=allocate)
        assert isinstance(plan.config, SessionConfig)
        self._config = plan.config
        self._launcher = launcher
        self._ranks: dict[int, RankMemory] = {}
        self._peers = torch.empty(0)
        self._parameters: dict[int, Tensor] = {}
        self._no_limit = torch.full((1,), NO_LIMIT, dtype=torch.int32, device=device)
        # The kernels write here when a wait has timed out; the host reads it without a synchronisation.
        self._reports = torch.zeros(
            len(self._driven), STATUS_WORDS, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._last_ring = self._config.rings[0]

    # -- memory -------------------------------------------------------------------------------------------------

    def _take_memory(self) -> None:
        layout = self._layout
        if self._group is None:
            self._memory = self._allocate(layout.num_bytes)
            self._ranks = {rank: RankMemory(layout, self._memory.ranks[rank]) for rank in self._driven}
        else:  # peers see what they need; the pool is where this device is fastest
            local = agree(self._group, "allocate memory", self._local_memory, timeout_s=self._timeout_s)
            self._memory = self._allocate(layout.symmetric_bytes)
            self._ranks = {rank: RankMemory(layout, self._memory.ranks[rank], local) for rank in self._driven}
        addresses = [memory.data_ptr() for memory in self._memory.ranks]
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=self._device)
        self._parameters = {
            rank: stage1_parameters(self.plan.problem, rank, memory) for rank, memory in self._ranks.items()
        }

    def _local_memory(self) -> Tensor:
        return torch.empty(self._layout.local_bytes, dtype=torch.uint8, device=self._device)

    def _words(self, rank: int, array: str) -> Tensor:
        return self._ranks[rank].words(array)

    def _set_flags(self, rank: int, epoch: int) -> None:
        self._ranks[rank].start(epoch)

    def _give_back(self) -> None:
        super()._give_back()
        self._ranks = {}

    def _synchronize(self) -> None:
        self._launcher.synchronize()

    # -- weights ------------------------------------------------------------------------------------------------

    def _prepare(self, weights: ExpertWeights) -> PreparedWeights:
        assert isinstance(weights, Mxfp4Weights)
        prepared = kernel_weights.prepare(weights, self.plan.problem)
        return replace(prepared, tensors={name: tensor.to(self._device) for name, tensor in prepared.tensors.items()})

    # -- calls --------------------------------------------------------------------------------------------------

    def _call(self, rows: Sequence[Sequence[Any]]) -> list[Tensor]:
        calls = of_each(self._checked, rows, virtual=self.ep_rank is None)
        self._run(calls)
        return [call.out for call in calls]

    def _run(self, calls: Sequence[CallTensors]) -> None:
        """Launch one call of the driven ranks, phase by phase."""
        tile, ring = self._config.pick(self.plan.problem, max(len(call.topk_ids) for call in calls))
        self._last_ring = ring
        lists = [self._rank_call(rank, tile, ring).phases(call) for rank, call in zip(self._driven, calls, strict=True)]
        for phase in zip(*lists, strict=True):
            for rank, launches in zip(self._driven, phase, strict=True):
                for launch in launches:
                    self._launcher.launch(launch, rank=rank)
        self._launcher.flush()

    def _rank_call(self, rank: int, tile: TileConfig, ring: Ring) -> RankCall:
        return RankCall(
            problem=self.plan.problem,
            rank=rank,
            tile=tile,
            ring=ring,
            rings=self._config.rings,
            memory=self._ranks[rank],
            peers=self._peers,
            stage1_parameters=self._parameters[rank],
            num_programs=self.plan.device.num_sms * tile.programs_per_cu,
            patience=self._launcher.target.patience(self._timeout_s),
            target=self._launcher.target,
        )

    def _checked(
        self,
        index: int,
        hidden_states: HiddenStates,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: PreparedWeights,
        out: Tensor | None,
        num_tokens: int | Tensor | None,
    ) -> CallTensors:
        """Check one rank's arguments and put them together."""
        problem = self.plan.problem
        num_rows = check_call(problem, hidden_states, topk_ids, topk_weights, out, device=self._device)
        require_prepared(
            weights,
            backend=kernel_weights.BACKEND,
            layout=self.weight_layout,
            problem=problem,
            device=self._device,
        )
        limit = self._limit(num_tokens, num_rows)
        if self._check_ids:
            self._look_at_ids(topk_ids, num_tokens)
        payload, scales = payload_and_scales(hidden_states)
        if out is None:
            out = torch.empty(num_rows, problem.hidden_size, dtype=torch.bfloat16, device=self._device)
        else:
            require_own_memory(out, hidden_states, topk_ids, topk_weights, weights, num_tokens)
        require_aligned("out", out, ALIGNMENT)
        return CallTensors(
            hidden_states=_rows(payload if scales is None else payload.view(torch.uint8)),
            hidden_scales=None if scales is None else _rows(scales.view(torch.uint8)),
            topk_ids=_aligned(topk_ids.contiguous()),
            topk_weights=_aligned(topk_weights.contiguous()),
            weights=weights.tensors,
            out=out,
            num_tokens=limit,
            report=self._reports[index],
            gate_up_tap=None if self._gate_up is None else self._gate_up[index],
        )

    def _limit(self, num_tokens: int | Tensor | None, num_rows: int) -> Tensor:
        """`num_tokens` on the device."""
        if num_tokens is None:
            return self._no_limit
        count = valid_rows(num_tokens, num_rows, self._device)
        return torch.full((1,), count, dtype=torch.int32, device=self._device) if isinstance(count, int) else count

    # -- kernels ------------------------------------------------------------------------------------------------

    def _load_kernels(self) -> None:
        rank = self._driven[0]  # kernels are the same for every rank
        for tile, ring in zip(self._config.tiles, self._config.rings, strict=True):
            rank_call = self._rank_call(rank, tile, ring)
            for call in self._calls_of_all_kinds():
                for launches in rank_call.phases(call):
                    self._launcher.load(launches)

    def _unload_kernels(self) -> None:
        self._launcher.unload()

    def _calls_of_all_kinds(self) -> Iterator[CallTensors]:
        """Calls whose launches differ in their kernels. Their tensors have no memory: they are not made."""
        problem = self.plan.problem
        fmt = activation_format(problem.quant, problem.act_format)
        names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
        scale, bias = _no_memory(1, torch.uint8), _no_memory(1, torch.float32)
        bf16 = _no_memory(problem.hidden_size, torch.bfloat16)
        payload = _no_memory(fmt.payload_bytes(problem.hidden_size), torch.uint8)
        scales = _no_memory(problem.hidden_size // fmt.block, torch.uint8)
        for ids in (torch.int32, torch.int64):
            for hidden_states, hidden_scales in ((bf16, None), (payload, scales)):
                yield CallTensors(
                    hidden_states=hidden_states,
                    hidden_scales=hidden_scales,
                    topk_ids=_no_memory(problem.top_k, ids),
                    topk_weights=_no_memory(problem.top_k, torch.float32),
                    weights={**dict.fromkeys(names, scale), "w13_bias": bias, "w2_bias": bias},
                    out=bf16,
                    num_tokens=self._no_limit,
                    report=self._reports[0],
                    gate_up_tap=None if self._gate_up is None else self._gate_up[0],
                )

    # -- failures -----------------------------------------------------------------------------------------------

    def _find_failure(self) -> ProtocolError | None:
        failed = [report for report in self._reports.tolist() if report[0]]
        if not failed:
            return None
        failure = self._given_up(failed)
        self._logger.error("%s", failure)
        return failure

    def _forget_failure(self) -> None:
        self._reports.zero_()

    def _given_up(self, reports: Sequence[Sequence[int]]) -> MegaMoETimeoutError | RankFailedError:
        """The error of the driven ranks that gave up; a time-out before what followed from it."""
        why, rank, peer, phase, epoch, index, observed, awaited = min(map(tuple, reports))
        epoch, observed, awaited = epoch % 2**32, observed % 2**32, awaited % 2**32
        if why == PEER_GAVE_UP:
            return RankFailedError(
                f"rank {rank} waited for rank {peer} in phase {PHASES[phase]} of call {epoch}, which it has given up",
                rank=rank,
                peer=peer,
                hint=f"rank {peer}'s own error says what it waited for; reset() on every rank"
                + (f"; if a rank died, {self._if_a_rank_died}" if self._if_a_rank_died else ""),
            )
        return MegaMoETimeoutError(
            rank=rank,
            peer=peer,
            phase=PHASES[phase],
            timeout_s=self._timeout_s,
            epoch=epoch,
            index=index,
            observed=observed,
            awaited=awaited,
            if_it_died=self._if_a_rank_died,
        )

    # -- reports ------------------------------------------------------------------------------------------------

    def _receive_counts(self) -> list[Tensor]:
        return [self._words(rank, "receive_counts").clone() for rank in self._driven]

    def keep_taps(self) -> None:
        """COLLECTIVE. From the next call on, keep what stands between the stages, for tests.

        The session then has a pool that holds every block of the fullest call, and kernels that also store GEMM1's
        accumulators.
        """
        self._require_healthy()
        self._give_back()
        rings = tuple(replace(ring, ring_blocks=ring.max_blocks) for ring in self._config.rings)
        self._config = replace(self._config, rings=rings)
        self._layout = kernel_workspace(self.plan.problem, rings)
        rows = max(ring.num_rows for ring in rings)
        columns = 2 * self.plan.problem.intermediate_size
        self._gate_up = [torch.zeros(rows, columns, device=self._device) for _ in self._driven]
        self.start()

    def _read_taps(self) -> list[StageTaps | None]:
        assert self._gate_up is not None
        return [
            read_taps(self.plan.problem, self._ranks[rank], self._last_ring, gate_up)
            for rank, gate_up in zip(self._driven, self._gate_up, strict=True)
        ]


def _rows(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy whose rows lie as kernels are told: columns side by side, rows a multiple apart."""
    fits = tensor.stride(-1) == 1 and tensor.stride(0) % ROW_STRIDES[tensor.dtype] == 0
    return _aligned(tensor if fits else tensor.contiguous())


def _aligned(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy that begins where kernels are told that every tensor begins."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def _no_memory(columns: int, dtype: torch.dtype) -> Tensor:
    """One row."""
    return torch.empty(1, columns, dtype=dtype, device="meta")

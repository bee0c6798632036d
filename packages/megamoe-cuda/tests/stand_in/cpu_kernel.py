"""pytest plugin: the CUDA backend on a CPU, with a stand-in for the kernel, so that the matrix exercises the host side.

Everything up to the launch is the product's: plans, workspaces, prepared weights, checks, addresses, taps. Only what
needs a GPU is replaced: the machine's probe, streams, compilation, and the launch, which reads the same addresses and
writes what the staged reference computes. It shows nothing about the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.backend import Capability, HiddenStates, StageTaps, Verdict
from megamoe.formats import ActivationFormat, activation_format
from megamoe.layouts import INTERLEAVED_8
from megamoe.problem import ActFormat, MoEProblem, QuantMode
from megamoe.reference.staged import staged
from megamoe.schedule.tiles import ceil_div, round_up
from megamoe.tensors import WEIGHT_TYPE, ExpertWeights, GateUpLayout, PreparedWeights
from megamoe_cuda import backend, fp4_stages, session
from megamoe_cuda.kernel_config import BLOCK_K, BLOCK_N, KernelConfig
from megamoe_cuda.launcher import TRACE_POINTS, RankCall
from megamoe_cuda.taps import pool_rows
from megamoe_cuda.weights import BACKEND, LAYOUT, restore
from megamoe_cuda.workspace_layout import kernel_workspace


def pytest_unconfigure() -> None:
    """Undo the patches that importing this plugin made."""
    PATCHES.undo()


def _patch() -> pytest.MonkeyPatch:
    patches = pytest.MonkeyPatch()
    patches.setattr(backend, "SEEN_RIGHT_ON", "a stand-in")
    patches.setattr(backend, "IMPLEMENTED", backend.IMPLEMENTED - {Capability.GRAPH_CAPTURE})
    patches.setattr(backend, "WORKSPACE_ALIGNMENT", 64)  # torch's CPU allocator gives no more
    patches.setattr(backend.CudaBackend, "probe", lambda self: Verdict.yes("a stand-in"))
    patches.setattr(backend, "_require_machine", lambda plan, alone: torch.device("cpu"))
    patches.setattr(session, "load_or_compile", lambda config: config)
    patches.setattr(session, "LoadedKernel", CpuKernel)
    patches.setattr(session, "pinned_words", lambda count: torch.zeros(count, dtype=torch.int32, device="cpu"))
    patches.setattr(session, "current_stream", lambda device_index: 0)
    for name, value in (
        ("current_device", lambda: None),
        ("synchronize", lambda device=None: None),
        ("is_current_stream_capturing", lambda: False),
        ("device", lambda device: contextlib.nullcontext()),
        ("mem_get_info", lambda: (0, 0)),
        ("nvtx", SimpleNamespace(range_push=lambda name: None, range_pop=lambda: None)),
    ):
        patches.setattr(torch.cuda, name, value)
    return patches


class CpuKernel:
    """In place of `LoadedKernel`."""

    def __init__(self, config: KernelConfig, *, workspaces: Sequence[int], **_: Any) -> None:
        self.config = config
        self.workspaces = workspaces

    def unload(self) -> None:
        """Nothing is loaded."""

    def launch(self, *, calls: Sequence[RankCall], **_: Any) -> None:
        config, workspaces = self.config, self.workspaces
        problem = _problem(config)
        arguments = [_arguments(config, call) for call in calls]
        result = staged(problem, *map(list, zip(*arguments, strict=True)))
        received = _received(problem, [ids for _, ids, _, _ in arguments])
        for rank, call in enumerate(calls):
            y, counts, ids = result.outputs[rank], received[rank], arguments[rank][1]
            at(call.out, torch.bfloat16, *y.shape).copy_(y)
            at(call.expert_counts, torch.int32, len(counts)).copy_(counts)
            dropped = at(workspaces[rank] + kernel_workspace(config).offset("dropped_ids"), torch.int32, 1)
            dropped += int(((ids < -1) | (ids >= problem.num_experts)).sum())
            if call.gemm1_tap and counts.sum():
                _store_taps(config, workspaces[rank], call, counts.tolist(), result.taps[rank])
            assert config.trace == bool(call.trace)
            if config.trace:
                stamps = at(call.trace, torch.int64, config.ctas_per_rank, len(TRACE_POINTS))
                stamps.copy_(torch.arange(1, stamps.numel() + 1).view_as(stamps) * 1000 * (rank + 1))


def at(address: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor over memory that somebody else owns."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _problem(config: KernelConfig) -> MoEProblem:
    act_format = ActFormat.FP8_1X128 if config.quant is QuantMode.A8W4 else None
    return MoEProblem(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_experts=config.num_experts,
        top_k=config.top_k,
        num_max_tokens_per_rank=config.num_max_tokens_per_rank,
        ep_size=config.num_ranks,
        quant=config.quant,
        act_format=act_format,
        transport=config.transport,
        activation=config.activation,
        swiglu_limit=config.swiglu_limit,
        expert_bias=config.expert_bias,
    )


def _arguments(config: KernelConfig, call: RankCall) -> tuple[HiddenStates, Tensor, Tensor, ExpertWeights]:
    num_tokens = call.num_tokens
    if call.device_num_tokens:
        num_tokens = min(num_tokens, max(int(at(call.device_num_tokens, torch.int32, 1)), 0))
    hidden, fmt = config.hidden_size, _format(config)
    dtype = fmt.payload_dtype if call.hidden_scales else torch.bfloat16
    states: HiddenStates = at(call.hidden_states, dtype, num_tokens, hidden)
    if call.hidden_scales:
        assert isinstance(states, Tensor)
        states = states, at(call.hidden_scales, torch.float32, num_tokens, hidden // BLOCK_K)
    picks = (num_tokens, config.top_k)
    ids = at(call.topk_ids, torch.int64 if call.topk_ids_are_int64 else torch.int32, *picks)
    return states, ids, at(call.topk_weights, torch.float32, *picks), _weights(config, call)


def _weights(config: KernelConfig, call: RankCall) -> ExpertWeights:
    """The experts that the addresses point to, as a checkpoint has them."""
    problem = _problem(config)
    addresses = {
        "w13_weight": call.w13,
        "w13_weight_scale": call.w13_scale,
        "w13_bias": call.w13_bias,
        "w2_weight": call.w2,
        "w2_weight_scale": call.w2_scale,
        "w2_bias": call.w2_bias,
    }
    tensors = {name: at(addresses[name], dtype, *shape) for name, (shape, dtype) in _prepared_shapes(problem).items()}
    prepared = PreparedWeights.of(problem, backend=BACKEND, layout=LAYOUT, tensors=tensors)
    restored: Any = restore(prepared, problem)
    return WEIGHT_TYPE[config.quant](layout=GateUpLayout.PACKED, **restored)


def _prepared_shapes(problem: MoEProblem) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of one rank's prepared experts."""
    experts, hidden = problem.num_local_experts, problem.hidden_size
    inter = round_up(problem.intermediate_size, BLOCK_K)
    matrices = {"w13": (2 * inter, hidden), "w2": (hidden, inter)}
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, (rows, columns) in matrices.items():
        row_blocks, k_blocks = ceil_div(rows, BLOCK_K), ceil_div(columns, BLOCK_K)
        if problem.quant is QuantMode.BF16:
            shapes[f"{name}_weight"] = ((experts, rows, columns), torch.bfloat16)
            continue
        shapes[f"{name}_weight_scale"] = ((experts, row_blocks, k_blocks), torch.float32)
        if problem.quant is QuantMode.A8W4:
            stages = (experts, ceil_div(rows, BLOCK_N), k_blocks, fp4_stages.STAGE_BYTES)
            shapes[f"{name}_weight"] = (stages, torch.uint8)
        else:
            shapes[f"{name}_weight"] = ((experts, rows, columns), torch.float8_e4m3fn)
    if problem.expert_bias:
        shapes["w13_bias"] = ((experts, 2 * inter), torch.float32)
        shapes["w2_bias"] = ((experts, round_up(hidden, BLOCK_N)), torch.float32)
    return shapes


def _format(config: KernelConfig) -> ActivationFormat:
    problem = _problem(config)
    return activation_format(problem.quant, problem.act_format)


def _received(problem: MoEProblem, ids: Sequence[Tensor]) -> Tensor:
    """`[ep_size, E_local]` rows that each expert receives."""
    picks = torch.cat([one.flatten().long() for one in ids])
    picks = picks[(picks >= 0) & (picks < problem.num_experts)]
    return torch.bincount(picks, minlength=problem.num_experts).view(problem.ep_size, -1).int()


def _store_taps(config: KernelConfig, workspace: int, call: RankCall, counts: list[int], taps: StageTaps) -> None:
    """As the kernel leaves them: in ring rows, scales transposed within a block; GEMM1's accumulators without padding
    between experts, gate and up interleaved."""
    assert config.tap_gemm1
    assert not config.ring_wraps
    block_m, ring_rows, inter = config.tile.block_m, config.ring.num_rows, config.intermediate_size
    layout, rows = kernel_workspace(config), pool_rows(counts, block_m)
    assert taps.gate_up is not None
    at(call.gemm1_tap, torch.float32, len(rows), 2 * inter).copy_(INTERLEAVED_8.apply(taps.gate_up))
    meta = at(workspace + layout.offset("pool_meta"), torch.int32, ring_rows, 4)
    meta[rows, 0], meta[rows, 1] = taps.src_rank.int(), taps.src_pick.int()
    codes = taps.a2.payload.view(torch.uint8)
    payload = at(workspace + layout.offset("a2_payload"), torch.uint8, ring_rows, codes.shape[1])
    payload[rows] = codes
    if taps.a2.scales is None:
        return
    scales = at(workspace + layout.offset("a2_scales"), torch.float32, ring_rows // block_m, inter // BLOCK_K, block_m)
    scales[rows // block_m, :, rows % block_m] = taps.a2.scales


PATCHES = _patch()

"""The CUDA backend as `megamoe.select_backend` sees it: what it can run, its plans, and how a plan is opened."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from megamoe import env
from megamoe.backend import Backend, Capability, Plan, Reason, Session, Verdict, VirtualRanks
from megamoe.errors import BackendUnavailableError, ConfigError, WorkspaceError
from megamoe.opening import given_workspace, ranks_of, require_paths, wait_s
from megamoe.problem import MoEProblem, QuantMode
from megamoe.schedule.device_spec import H200, DeviceSpec
from megamoe.symm import Group, PeerMemory
from megamoe.symm.agreement import Ranks, agree
from megamoe.symm.torch_symm import TorchSymmGroup
from megamoe_cuda import __version__, symm_nvshmem
from megamoe_cuda.heuristics import SessionConfig, config_names, session_config
from megamoe_cuda.jit.compiler import ARCH
from megamoe_cuda.kernel_config import MAX_K, MAX_RANKS, row_granule
from megamoe_cuda.probe import COMPUTE_CAPABILITY, judge, look
from megamoe_cuda.session import CudaSession
from megamoe_cuda.smem_budget import shared_memory
from megamoe_cuda.workspace_layout import kernel_workspace

logger = logging.getLogger("megamoe.cuda")

SEEN_RIGHT_ON: str | None = "NVIDIA H200, 2026-12-01, commit 99b4655"
"""Where and when the conformance matrix passed. None: not seen right yet, so nothing is claimed."""

IMPLEMENTED = frozenset(
    {
        Capability.QUANT_BF16,
        Capability.QUANT_A8W8,
        Capability.QUANT_A8W4_FP8_1X128,
        Capability.TRANSPORT_BF16,
        Capability.TRANSPORT_FP8_BLOCKWISE_1X32,
        Capability.ACTIVATION_SWIGLU,
        Capability.ACTIVATION_SWIGLU_OAI,
        Capability.EXPERT_BIAS,
        Capability.INPUT_BF16,
        Capability.INPUT_QUANTIZED,
        Capability.NUM_TOKENS,
        Capability.RECEIVE_COUNTS,
        Capability.VIRTUAL_RANKS,
        Capability.BATCH_INVARIANT,
        Capability.GRAPH_CAPTURE,
        Capability.STAGE_TAPS,
    }
)
"""What the kernel is written to do."""

WORKSPACE_ALIGNMENT = 256  # bytes; TMA needs 16, torch's GPU allocator gives 512
MAX_ROWS = 1 << 31  # that a rank may receive: rows are counted, and a rank's picks numbered, in 31 bits


class CudaBackend(Backend):
    """NVIDIA SM90: one persistent cooperative kernel over symmetric memory."""

    name: ClassVar[str] = "cuda"

    def probe(self) -> Verdict:
        """Whether this machine has an SM90 GPU with a driver and the packages that compile for it. Makes no context."""
        return judge(look())

    def capabilities(self) -> frozenset[Capability]:
        """What was seen right on a GPU."""
        return IMPLEMENTED if SEEN_RIGHT_ON is not None else frozenset()

    def supports(self, problem: MoEProblem) -> Verdict:
        """See `Backend.supports`."""
        if SEEN_RIGHT_ON is None:
            return Verdict.no(
                Reason.QUANT, f"the kernel of megamoe-cuda {__version__} has not passed its tests on a GPU yet"
            )
        return super().supports(problem)

    def check_limits(self, problem: MoEProblem) -> Verdict:
        """Sizes that the kernel does not take."""
        granule = row_granule(QuantMode(problem.quant))
        for name, size in (
            ("hidden_size", problem.hidden_size),
            ("intermediate_size", problem.intermediate_size),
        ):
            if size > MAX_K:
                return Verdict.no(Reason.SHAPE, f"{name} = {size} is above {MAX_K}")
            if size % granule:
                return Verdict.no(Reason.SHAPE, f"{name} = {size} is not a multiple of {granule}")
        if problem.ep_size > MAX_RANKS:
            return Verdict.no(Reason.EP_SIZE, f"ep_size = {problem.ep_size} exceeds {MAX_RANKS}")
        if problem.ep_size * problem.num_max_tokens_per_rank * problem.top_k >= MAX_ROWS:
            return Verdict.no(Reason.CAPACITY, f"ep_size * num_max_tokens_per_rank * top_k is not below {MAX_ROWS}")
        try:
            _require_room(problem, session_config(problem, None))
        except ConfigError as error:  # the plan of the pool grows with ranks and experts
            return Verdict.no(Reason.NUM_EXPERTS, str(error))
        return Verdict.yes()

    def configs(self, problem: MoEProblem) -> tuple[str, ...]:
        """ "auto", which picks a tile per call, then each tile by name that has room for the problem's tables."""
        return tuple(name for name in config_names(problem) if _has_room(problem, name))

    def plan(self, problem: MoEProblem, device: DeviceSpec | None = None, *, config: str | None = None) -> Plan:
        """See `Backend.plan`.

        `device.num_sms` is how many SMs the kernel takes: `dataclasses.replace(H200, num_sms=116)` leaves 16 of an H200
        to kernels that run beside it, and an H20 has 78. Without `device` it is an H200, or a rank's share of one where
        `MEGAMOE_RANKS_PER_GPU` makes ranks share it.

        With fewer SMs than an H200's, the default configuration has no clusters, which need pairs of neighbouring SMs
        that other kernels may break up. `config="m256"` pins them for all calls, where a GPU is smaller and all free.
        """
        self.require(problem, device)
        device = device or replace(H200, num_sms=H200.num_sms // env.ranks_per_gpu())
        if device.arch != ARCH:
            raise ConfigError("backend cuda does not compile for this device", got=device.arch, expected=ARCH)
        chosen = session_config(problem, config, num_sms=device.num_sms)
        _require_room(problem, chosen)
        kernel = chosen.kernel(problem, chosen.tiles[0], num_virtual_ranks=1, ctas_per_rank=device.num_sms)
        return Plan(
            backend=self.name, problem=problem, device=device, config=chosen, workspace=kernel_workspace(kernel)
        )

    def open(
        self, plan: Plan, group: Any = None, *, timeout_s: float | None = None, workspace: Tensor | None = None
    ) -> Session:
        """COLLECTIVE. See `Backend.open`.

        Symmetric memory comes from `group`: of a `torch.distributed.ProcessGroup`, from NVSHMEM where nvshmem4py is
        installed and else from PyTorch; of a `megamoe.symm.Group` (`megamoe_cuda.symm_nvshmem.NvshmemGroup`,
        `megamoe.symm.torch_symm.TorchSymmGroup`), from that group. `workspace` is taken where no peer process shares
        it: uint8 `[ep_size * plan.bytes]` with virtual ranks, `[plan.bytes]` for `ep_size` 1.

        Raises:
            BackendUnavailableError: no SM90 GPU, a missing library, no peer-to-peer path; on every rank, before any
                memory is shared.
        """
        timeout_s = wait_s(timeout_s)
        ranks = ranks_of(group, plan, self.name, SessionConfig)
        if workspace is not None and ranks is not None:
            raise ConfigError(
                "a workspace that peers share can't be handed in", hint="leave workspace=None; plan.bytes says its size"
            )
        size = plan.problem.ep_size
        device = agree(ranks, "look at the machine", lambda: _require_machine(plan, ranks is None), timeout_s=timeout_s)
        if ranks is not None:
            require_paths(ranks, plan, device, version=__version__, timeout_s=timeout_s)
        provider = _provider(group, ranks, device, timeout_s)
        virtual = isinstance(group, VirtualRanks)

        def make() -> CudaSession:
            return CudaSession(
                plan,
                group=provider,
                virtual=virtual,
                device=device,
                timeout_s=timeout_s,
                allocate=lambda num_bytes: _allocate(provider, size, num_bytes, device, workspace, timeout_s),
            )

        # Not as inference tensors, wherever it is opened: reset() writes to them in any mode.
        with torch.inference_mode(False):
            session = agree(ranks, "prepare the session", make, timeout_s=timeout_s)
            session.start()
        return session


@lru_cache(maxsize=256)  # plan() asks what supports() has asked
def _require_room(problem: MoEProblem, config: SessionConfig) -> None:
    """Raise ConfigError where a tile's kernel has not enough shared memory, on however many SMs."""
    for tile in config.tiles:
        shared_memory(config.kernel(problem, tile, num_virtual_ranks=1, ctas_per_rank=tile.cluster_size))


def _has_room(problem: MoEProblem, name: str) -> bool:
    try:
        _require_room(problem, session_config(problem, name))
    except ConfigError:
        return False
    return True


def _provider(group: Any, ranks: Ranks | None, device: torch.device, timeout_s: float) -> Group | None:
    """COLLECTIVE. Where symmetric memory comes from; of a process group, NVSHMEM if every rank has nvshmem4py."""
    if ranks is None or isinstance(group, Group):
        return group if isinstance(group, Group) else None
    installed = ranks.all_gather(
        bytes([symm_nvshmem.is_installed()]), timeout_s=timeout_s, phase="choose symmetric memory"
    )
    if all(flag == b"\x01" for flag in installed):
        return symm_nvshmem.NvshmemGroup(group, device, timeout_s=timeout_s)
    logger.info("nvshmem4py is not installed on every rank: using PyTorch symmetric memory")
    return TorchSymmGroup(group, device)


def _require_machine(plan: Plan, alone: bool) -> torch.device:
    """This rank's GPU, if it can run the plan."""
    verdict = judge(look())
    if not verdict.ok:
        raise BackendUnavailableError(f"backend cuda can't run here ({verdict.reason}): {verdict.detail}")
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) != COMPUTE_CAPABILITY:
        raise BackendUnavailableError(
            f"the current device is not SM90: {properties.name}",
            got=f"sm_{properties.major}{properties.minor}",
            expected=ARCH,
            hint="call torch.cuda.set_device() with an SM90 GPU first",
        )
    if properties.multi_processor_count < plan.device.num_sms:
        raise ConfigError(
            f"the plan is for more SMs than {properties.name} has",
            got=f"{plan.device.num_sms} SMs",
            expected=f"at most {properties.multi_processor_count}",
            hint="plan(problem, dataclasses.replace(H200, num_sms=...))",
        )
    if alone and plan.device.num_sms < plan.problem.ep_size:
        raise ConfigError(
            "more virtual ranks than SMs", got=plan.problem.ep_size, expected=f"at most {plan.device.num_sms}"
        )
    return device


def _allocate(
    group: Group | None,
    size: int,
    num_bytes: int,
    device: torch.device,
    workspace: Tensor | None,
    timeout_s: float,
) -> PeerMemory:
    """COLLECTIVE. Workspaces of all ranks, `num_bytes` each."""
    if group is None:
        return _allocate_here(size, num_bytes, device, workspace)
    buffer = group.allocate(num_bytes, timeout_s=timeout_s)
    if isinstance(group, symm_nvshmem.NvshmemGroup):
        return PeerMemory(ranks=buffer.ranks, release=lambda: group.free(buffer))
    return PeerMemory(ranks=buffer.ranks, release=lambda: None)


def _allocate_here(size: int, num_bytes: int, device: torch.device, workspace: Tensor | None) -> PeerMemory:
    """Workspaces of ranks that are all in this process, in ordinary device memory."""
    if workspace is None:
        try:
            workspace = torch.empty(size * num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise WorkspaceError(
                "out of GPU memory", got=str(error).splitlines()[0], expected=f"{size * num_bytes} bytes"
            ) from None
    workspace = given_workspace(workspace, size * num_bytes, device, alignment=WORKSPACE_ALIGNMENT)
    ranks = workspace.view(size, num_bytes).unbind()
    return PeerMemory(ranks=ranks, release=lambda: None)

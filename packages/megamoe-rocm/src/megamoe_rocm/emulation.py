"""Calls of the layer on emulated gfx950 devices: the code objects, executed instruction by instruction on the CPU.

All ranks of a group are emulated together, their launches queued on a stream each and interleaved by the interpreter's
seeded scheduler, over memory that peers address directly. Arguments go in and results come out as torch tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megamoe.backend import Plan
from megamoe.tensors import PreparedWeights
from megamoe_rocm.aot import compile_kernel
from megamoe_rocm.heuristics import SessionConfig
from megamoe_rocm.isa import Buffer, Machine, Program
from megamoe_rocm.kernels.launch import CallTensors, Launch, RankCall, Stage1Parameter, stage1_parameters
from megamoe_rocm.kernels.signature import options, parameters
from megamoe_rocm.kernels.workspace import STATUS_WORDS, RankMemory

NO_LIMIT = 2**31 - 1  # num_tokens where the caller gives none
FILL = 0xA5  # workspace bytes that nobody has written
ADDRESSES = (  # the words of stage 1's parameters that are addresses
    *range(Stage1Parameter.ROUTE_COUNTS, Stage1Parameter.INPUT_PAYLOAD_OFFSET),
    Stage1Parameter.A2_PAYLOAD,
    Stage1Parameter.A2_SCALES,
)

_programs: dict[object, Program] = {}


def load(launch: Launch) -> Program:
    """The program of a launch, compiled and decoded once for each set of constants and argument types."""
    signature = parameters(launch)
    key = (launch.kernel, tuple(launch.constants.items()), tuple(signature.items()), launch.num_warps)
    if key not in _programs:
        code = compile_kernel(launch.kernel, parameters=signature, constants=launch.constants, options=options(launch))
        _programs[key] = Program.load(code)
    return _programs[key]


class EmulatedRanks:
    """All ranks of a plan.

    Args:
        plan: a plan whose configuration is a `SessionConfig`.
        weights: each rank's experts.
        seed: of the scheduler, and of everything else that a device leaves open.
        num_programs: programs of a persistent launch.
        last_epoch: number of the call before the first.
        polls: of a wait.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Sequence[PreparedWeights],
        *,
        seed: int = 0,
        num_programs: int = 2,
        last_epoch: int = 0,
        polls: int = 1_000_000,
    ) -> None:
        assert isinstance(plan.config, SessionConfig)
        self._plan, self._config = plan, plan.config
        self._num_programs, self._polls = num_programs, polls
        self.machine = Machine(num_ranks=plan.problem.ep_size, seed=seed)
        self._memory: list[RankMemory] = []
        self._workspaces: list[Buffer] = []
        for rank in range(plan.problem.ep_size):
            memory = RankMemory(plan.workspace, torch.full((plan.workspace.num_bytes,), FILL, dtype=torch.uint8))
            memory.start(last_epoch)
            self._memory.append(memory)
            content = memory.workspace.numpy()
            self._workspaces.append(self.machine.buffer(content, rank=rank, name="workspace", peers=True))
        self._peers = torch.tensor([workspace.address for workspace in self._workspaces])
        self._weights = [dict(of_rank.tensors) for of_rank in weights]
        self._resident: list[dict[int, Buffer]] = [
            {tensor.data_ptr(): self._upload(rank, name, tensor) for name, tensor in tensors.items()}
            for rank, tensors in enumerate(self._weights)
        ]
        self._parameters = [self._stage1_parameters(rank) for rank in range(plan.problem.ep_size)]

    def forward(
        self,
        hidden_states: Sequence[Tensor],
        topk_ids: Sequence[Tensor],
        topk_weights: Sequence[Tensor],
    ) -> list[Tensor]:
        """One call; each argument is a list, one entry a rank. `hidden_states` are BF16 `[T, H]`.

        Raises:
            IsaError: what the interpreter found wrong: an access outside of a buffer, a register or LDS byte that was
                used before it was there, a deadlock.
        """
        tile, ring = self._config.pick(self._plan.problem, max(map(len, topk_ids)))
        outputs: list[tuple[Tensor, Buffer]] = []
        for rank, ids in enumerate(topk_ids):
            out = torch.zeros(len(ids), self._plan.problem.hidden_size, dtype=torch.bfloat16)
            tensors = CallTensors(
                hidden_states=hidden_states[rank].contiguous(),
                hidden_scales=None,
                topk_ids=ids.contiguous(),
                topk_weights=topk_weights[rank].contiguous(),
                weights=self._weights[rank],
                out=out,
                num_tokens=torch.tensor([NO_LIMIT], dtype=torch.int32),
                report=torch.zeros(STATUS_WORDS, dtype=torch.int32),
            )
            call = RankCall(
                problem=self._plan.problem,
                rank=rank,
                tile=tile,
                ring=ring,
                rings=self._config.rings,
                memory=self._memory[rank],
                peers=self._peers,
                stage1_parameters=self._parameters[rank],
                num_programs=self._num_programs,
                polls=self._polls,
            )
            buffers = dict(self._resident[rank])
            for launches in call.phases(tensors):
                for launch in launches:
                    self._queue(rank, launch, buffers)
            outputs.append((out, buffers[out.data_ptr()]))
        self.machine.run()
        return [
            torch.from_numpy(np.array(buffer.read(np.uint8)))[: out.nbytes].view(torch.bfloat16).view(out.shape)
            for out, buffer in outputs
        ]

    def words(self, rank: int, name: str) -> Tensor:
        """Array `name` of a rank's workspace as it is now, int32, flat."""
        array = self._plan.workspace[name]
        content = np.array(self._workspaces[rank].read(np.uint8))
        return torch.from_numpy(content[array.offset : array.offset + array.num_bytes]).view(torch.int32)

    def _queue(self, rank: int, launch: Launch, buffers: dict[int, Buffer]) -> None:
        arguments = {name: self._argument(rank, name, value, buffers) for name, value in launch.arguments.items()}
        x, y = (*launch.grid, 1)[:2]
        self.machine.launch(load(launch), grid=(x, y, 1), rank=rank, arguments=arguments)

    def _argument(self, rank: int, name: str, value: Any, buffers: dict[int, Buffer]) -> Buffer | int | float:
        """A value as it is; a tensor of the workspace as an emulated address; another one as a buffer of its own."""
        if not isinstance(value, Tensor):
            number: int | float = value
            return number
        offset = value.data_ptr() - self._memory[rank].workspace.data_ptr()
        if 0 <= offset < self._plan.workspace.num_bytes:
            return self._workspaces[rank].address + offset
        if value.data_ptr() not in buffers:
            buffers[value.data_ptr()] = self._upload(rank, name, value)
        return buffers[value.data_ptr()]

    def _upload(self, rank: int, name: str, tensor: Tensor) -> Buffer:
        if not tensor.numel():
            return self.machine.buffer(16, rank=rank, name=name)
        content = tensor.contiguous().view(torch.uint8).reshape(-1).numpy()
        return self.machine.buffer(content, rank=rank, name=name)

    def _stage1_parameters(self, rank: int) -> Tensor:
        """Addresses of the template's arrays turned into those of the emulated workspace."""
        words = stage1_parameters(self._plan.problem, rank, self._memory[rank])
        words[list(ADDRESSES)] += self._workspaces[rank].address - self._memory[rank].workspace.data_ptr()
        return words

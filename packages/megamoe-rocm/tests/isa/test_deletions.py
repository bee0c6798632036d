"""Single instructions deleted from the product's kernels: running what is left has to show it.

The tile of small calls, m32, as it is shipped. K is 2304 columns in the GEMM that is looked at, nine steps: the main
loop goes round, its last trip and the remainder are executed too. What came before the kernel in the call is executed
once; each mutant starts from there, and everything that it leaves in both ranks' workspaces is compared.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from megamoe_rocm.isa import Program
from megamoe_rocm.isa.mutation import KINDS, Report, delete_each, explain, sites

pytestmark = [pytest.mark.usefixtures("toolchain"), pytest.mark.slow, pytest.mark.timeout(3600)]

SAMPLE = int(os.environ.get("MEGAMOE_TEST_DELETIONS", "60"))  # deletions of a kernel; docs/gfx950.md has those of 220
STEPS_AT_MOST = 8  # times what the whole kernel takes
SIZES = {
    "dispatch_gemm1": {"hidden_size": 2304, "intermediate_size": 256},
    "gemm2_p2p": {"hidden_size": 256, "intermediate_size": 2304},
}
MODES = [("a4w4", "fp8_blockwise_1x32"), ("a8w4", "bf16")]


class Stage:
    """A kernel of a call of two ranks, ready to be run again and again."""

    def __init__(self, layers, kernel: str, **changes) -> None:
        from megamoe_rocm.heuristics import buckets
        from megamoe_rocm.isa.device import Device, Programs
        from megamoe_rocm.kernels.launch import GFX950
        from megamoe_rocm.kernels.workspace import RankMemory

        self.kernel, self.programs = kernel, Programs()
        problem = layers.problem(num_experts=2, top_k=1, num_max_tokens_per_rank=40, **changes)
        self.layer = layers.Layer(problem=problem, tile=buckets()[0].tile, patience=2**31 - 1, target=GFX950)
        self.layout = self.layer.memory[0].layout
        device = Device(num_ranks=2, seed=0, programs=self.programs)
        self.layer.memory = [
            RankMemory(
                self.layout, device.workspace(rank=rank, num_bytes=self.layout.num_bytes, arrays=self.layout.arrays)
            )
            for rank in range(2)
        ]
        for memory in self.layer.memory:
            memory.workspace.fill_(layers.FILL)
            memory.start(self.layer.last_epoch)
        inputs = layers.random_inputs(problem, (37, 9), low=-1)
        outs, launches = self.layer.launches(inputs)
        names = [launch.kernel.__name__ for launch in launches[0]]
        self.at = names.index(kernel)
        device.run([queue[: self.at] for queue in launches])
        self.before = [memory.workspace.clone() for memory in self.layer.memory]
        self.launches = launches
        self.steps = device.run([queue[self.at : self.at + 1] for queue in launches])
        self.after = [memory.workspace.clone() for memory in self.layer.memory]
        device.run([queue[self.at + 1 :] for queue in launches])
        expected = self.layer.reference(inputs).outputs
        assert all(layers.rel_l2(out, right) < 1e-2 for out, right in zip(outs, expected, strict=True))

    def is_right(self, program: Program, mutant: Program, seed: int) -> bool:
        """Run the kernel with `mutant` in its place; whether all memory is as the whole kernel leaves it."""
        from megamoe_rocm.isa.device import Device

        device = Device(num_ranks=2, seed=seed, programs=self.programs.with_other(program, mutant))
        for rank, memory in enumerate(self.layer.memory):
            memory.workspace.copy_(self.before[rank])
            device.adopt(memory.workspace, rank=rank, arrays=self.layout.arrays)
        device.run([queue[self.at : self.at + 1] for queue in self.launches], max_steps=STEPS_AT_MOST * self.steps)
        return all(memory.workspace.equal(right) for memory, right in zip(self.layer.memory, self.after, strict=True))


def delete(layers, kernel: str, quant: str, transport: str, seeds: Sequence[int] = (1, 2, 3)) -> Report:
    stage = Stage(layers, kernel, quant=quant, transport=transport, **SIZES[kernel])
    (program,) = (item for item in stage.programs.loaded() if item.code.name == kernel)
    return delete_each(
        program,
        lambda mutant, seed: stage.is_right(program, mutant, seed),
        sites(program, kinds=KINDS, sample=SAMPLE, seed=1),
        seeds=seeds,
        reasons=explain(program),
    )


@pytest.mark.parametrize("quant, transport", MODES)
@pytest.mark.parametrize("kernel", SIZES)
def test_deletions(layers, kernel: str, quant: str, transport: str) -> None:
    """Nine of ten executed instructions are missed whatever the sample; docs/gfx950.md explains the others of 220."""
    report = delete(layers, kernel, quant, transport)
    print(report.table())
    assert report.share_noticed >= 0.9

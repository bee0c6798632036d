"""Reading taps back: a workspace is filled as the kernel fills it, and read."""

from __future__ import annotations

import torch

from megamoe.problem import MoEProblem
from megamoe_cuda.heuristics import session_config
from megamoe_cuda.taps import pool_rows, read_taps
from megamoe_cuda.workspace_layout import kernel_workspace

PROBLEM = MoEProblem(
    hidden_size=256, intermediate_size=256, num_experts=3, top_k=2, num_max_tokens_per_rank=200, quant="a8w8"
)
COUNTS = [70, 0, 3]
BLOCK_M = 64


def test_rows_of_an_expert_start_a_block() -> None:
    rows = pool_rows(COUNTS, BLOCK_M).tolist()
    assert rows == [*range(70), *range(128, 131)]


def test_a_tapped_session_never_overwrites_a_block() -> None:
    config = session_config(PROBLEM, None).tapped()
    for tile in config.tiles:
        kernel = config.kernel(PROBLEM, tile, num_virtual_ranks=1, ctas_per_rank=132)
        assert kernel.tap_gemm1
        assert not kernel.ring_wraps


def test_taps_are_read_from_where_the_kernel_puts_them() -> None:
    config = session_config(PROBLEM, "m64").tapped()
    layout = kernel_workspace(config.kernel(PROBLEM, config.tiles[0], num_virtual_ranks=1, ctas_per_rank=132))
    workspace = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    ring_rows = config.rings[0].num_rows
    inter, k_blocks = PROBLEM.intermediate_size, PROBLEM.intermediate_size // 128

    def array(name: str) -> torch.Tensor:
        return workspace[layout[name].offset :][: layout[name].num_bytes]

    rows = torch.arange(ring_rows, dtype=torch.int32)
    array("pool_meta").view(torch.int32).view(ring_rows, 4)[:] = torch.stack([rows * 0, rows * 10, rows, rows], 1)
    array("a2_payload").view(ring_rows, inter)[:] = (rows % 100).unsqueeze(1)
    scales = array("a2_scales").view(torch.float32)
    for row in range(ring_rows):  # [block][I / 128][row of the block]
        for k_block in range(k_blocks):
            scales[(row // BLOCK_M * k_blocks + k_block) * BLOCK_M + row % BLOCK_M] = row + k_block / 8
    gate_up = torch.arange(sum(COUNTS) + 9).unsqueeze(1) + torch.arange(2 * inter) / 1024

    taps = read_taps(PROBLEM, layout, workspace, gate_up, COUNTS, BLOCK_M)

    assert taps is not None
    valid = pool_rows(COUNTS, BLOCK_M)
    assert torch.equal(taps.src_pick, (valid * 10).int())
    assert taps.local_expert.tolist() == [0] * 70 + [2] * 3
    assert torch.equal(taps.a2.payload.view(torch.uint8)[:, 0], (valid % 100).to(torch.uint8))
    assert taps.a2.scales is not None
    assert torch.equal(taps.a2.scales, valid.unsqueeze(1) + torch.tensor([0, 0.125]))
    # Rows without padding. Interleaved column 8 is up channel 0, which the packed order has at column I.
    assert taps.gate_up is not None
    assert torch.equal(taps.gate_up[:, inter], torch.arange(sum(COUNTS)) + 8 / 1024)


def test_a_rank_without_rows_has_no_taps() -> None:
    layout = kernel_workspace(
        session_config(PROBLEM, "m64").kernel(
            PROBLEM, session_config(PROBLEM, "m64").tiles[0], num_virtual_ranks=1, ctas_per_rank=132
        )
    )
    workspace = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    assert read_taps(PROBLEM, layout, workspace, torch.zeros(1, 512), [0, 0, 0], BLOCK_M) is None

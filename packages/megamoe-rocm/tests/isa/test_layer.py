"""The whole layer: kernels compiled for gfx950, executed over emulated ranks, against the staged reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import pytest
import torch

from megamoe_rocm.aot import Expectation, check
from megamoe_rocm.isa import DeadlockError, ExecutionFault

pytestmark = pytest.mark.usefixtures("toolchain")

MODES = [("a4w4", "bf16"), ("a4w4", "fp8_blockwise_1x32"), ("a8w4", "bf16"), ("a8w4", "fp8_blockwise_1x32")]
BOUND = 1e-2  # of y against the staged reference, as the interpreted checks have it
MAX_STEPS = 3_000_000


@cache
def shared_programs():
    """Each kernel is compiled once. Imported late, as everything that needs Triton is."""
    from megamoe_rocm.isa.device import Programs

    return Programs()


def emulated(layers: ModuleType, *, seed: int, programs=None, resident: int | None = None, **changes):
    """A layer whose ranks' workspaces are in the interpreter, and the device."""
    from megamoe_rocm.isa.device import Device
    from megamoe_rocm.kernels.launch import GFX950
    from megamoe_rocm.kernels.workspace import RankMemory

    layer = layers.Layer(problem=layers.problem(**changes), patience=1_000_000, target=GFX950)
    ranks = layer.problem.ep_size
    device = Device(num_ranks=ranks, seed=seed, programs=programs or shared_programs(), max_resident=resident)
    layout = layer.memory[0].layout
    layer.memory = [
        RankMemory(layout, device.workspace(rank=rank, num_bytes=layout.num_bytes, arrays=layout.arrays))
        for rank in range(ranks)
    ]
    for memory in layer.memory:
        memory.workspace.fill_(layers.FILL)
        memory.start(layer.last_epoch)
    return layer, device


def run_calls(layers: ModuleType, layer, device, calls: Sequence[Sequence[int]], max_steps: int = MAX_STEPS) -> bool:
    """Whether the outputs of some calls in a row, with so many tokens a rank, are those of the reference."""
    right = True
    for call, tokens in enumerate(calls):
        inputs = layers.random_inputs(layer.problem, tokens, seed=call, low=-1)
        outs, launches = layer.launches(inputs)
        device.run(launches, max_steps=max_steps)
        for out, expected in zip(outs, layer.reference(inputs).outputs, strict=True):
            right &= len(expected) == 0 or layers.rel_l2(out, expected) < BOUND
        right &= all(memory.words("status").tolist() == [0] * 8 for memory in layer.memory)
    return right


@pytest.mark.parametrize("quant, transport", [MODES[0], MODES[3]])
def test_two_ranks(layers: ModuleType, quant: str, transport: str) -> None:
    """Two calls in a row, across the wrap of the epoch, with other routings and token counts each time."""
    layer, device = emulated(layers, seed=1, quant=quant, transport=transport)
    assert run_calls(layers, layer, device, [(24, 9), (0, 7)])


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("quant, transport", MODES)
def test_more_schedules(layers: ModuleType, quant: str, transport: str, seed: int) -> None:
    layer, device = emulated(layers, seed=seed, quant=quant, transport=transport)
    assert run_calls(layers, layer, device, [(24, 9), (1, 24)])


def test_four_ranks_of_which_one_has_no_tokens(layers: ModuleType) -> None:
    layer, device = emulated(layers, seed=3, ep_size=4, num_experts=8, quant="a8w4", transport="fp8_blockwise_1x32")
    assert run_calls(layers, layer, device, [(11, 0, 24, 5)])


def test_a_device_that_holds_one_workgroup(layers: ModuleType) -> None:
    """No program waits for one that has not started."""
    layer, device = emulated(layers, seed=4, resident=1)
    assert run_calls(layers, layer, device, [(24, 9)])


def test_biases_and_a_limit(layers: ModuleType) -> None:
    layer, device = emulated(layers, seed=5, expert_bias=True, activation="swiglu_oai", swiglu_limit=0.7)
    assert run_calls(layers, layer, device, [(12, 5)])


def test_rows_of_wider_tensors(layers: ModuleType) -> None:
    """Which kernels could not read by words: they give the bits of rows that lie side by side."""
    from megamoe_rocm.isa.session import EMULATED, open_emulated
    from megamoe_rocm.planning import make_plan

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.empty(len(tensor), tensor.shape[1] + 1, dtype=tensor.dtype)
        wide[:, :-1] = tensor
        return wide[:, :-1]

    problem = layers.problem(quant="a8w4")
    inputs = layers.random_inputs(problem, (5, 3))
    quantized = [layers.as_format(problem, rows) for rows in inputs.hidden_states]
    pairs = [(cut(rows.payload.view(torch.uint8)), cut(rows.scales)) for rows in quantized]
    pairs = [(payload.view(torch.float8_e4m3fn), scales) for payload, scales in pairs]
    with open_emulated(make_plan(problem, EMULATED), seed=1, programs=shared_programs()) as session:
        weights = [session.prepare(layers.random_weights(problem, rank)) for rank in range(2)]
        kinds = (inputs.hidden_states, [cut(rows) for rows in inputs.hidden_states], pairs)
        first, *others = [session.forward(rows, inputs.topk_ids, inputs.topk_weights, weights) for rows in kinds]
        session.check()
    for outs in others:
        assert all(out.equal(right) for out, right in zip(outs, first, strict=True))


@pytest.mark.parametrize("quant", ["a4w4", "a8w4"])
@pytest.mark.parametrize("transport", ["bf16", "fp8_blockwise_1x32"])
def test_the_fp8_transport_moves_h_and_h_over_32_bytes_a_row(layers: ModuleType, quant: str, transport: str) -> None:
    """Instead of 2H: counted from the stores that stage 2 executed, to the other rank and to its own."""
    layer, device = emulated(layers, seed=6, quant=quant, transport=transport)
    inputs = layers.random_inputs(layer.problem, (24, 9), low=-1)
    _, launches = layer.launches(inputs)
    stage_2 = [launch.kernel.__name__ for launch in launches[0]].index("gemm2_p2p")
    device.run([queue[:stage_2] for queue in launches], max_steps=MAX_STEPS)
    before = dict(device.machine.stored_bytes)
    device.run([queue[stage_2 : stage_2 + 1] for queue in launches], max_steps=MAX_STEPS)
    hidden, local = layer.problem.hidden_size, layer.problem.num_local_experts
    row_bytes = hidden + hidden // 32 if transport != "bf16" else 2 * hidden
    for home, ids in enumerate(inputs.topk_ids):
        owners = ids[ids >= 0] // local
        for rank in range(2):
            num_rows = int((owners == rank).sum())
            assert num_rows > 0
            assert device.machine.stored_bytes[rank, home] - before.get((rank, home), 0) == num_rows * row_bytes


def test_executed_code_objects_keep_their_promises(layers: ModuleType) -> None:
    """No vector spills, no scratch, and MFMAs as the tile says: two K steps of 256 in GEMM1, one in GEMM2, unrolled."""
    layer, device = emulated(layers, seed=7)
    assert run_calls(layers, layer, device, [(8, 8)])
    names = [code.name for code in device.executed.values()]
    assert names == [
        "quantize_input", "count_picks", "push_entries", "plan_blocks", "dispatch_gemm1", "gemm2_p2p", "combine_rows",
    ]  # fmt: skip
    for code in device.executed.values():
        assert code.resources.vgpr_spills == code.resources.scratch_bytes == 0
        if "gemm" not in code.name:
            check(code, Expectation(scaled_mfmas=0))


def test_a_session(layers: ModuleType) -> None:
    """The session that users open, on top of the interpreter: two calls of two virtual ranks."""
    from megamoe_rocm.heuristics import config_of
    from megamoe_rocm.isa.session import EMULATED, open_emulated
    from megamoe_rocm.planning import make_plan

    problem = layers.problem(quant="a8w4", transport="fp8_blockwise_1x32")
    plan = make_plan(problem, EMULATED, config=config_of(problem, "small", (layers.SMALL,)))
    weights = [layers.random_weights(problem, rank) for rank in range(2)]
    with open_emulated(plan, seed=9, programs=shared_programs()) as session:
        prepared = [session.prepare(item) for item in weights]
        for call, tokens in enumerate([(9, 4), (0, 6)]):
            inputs = layers.random_inputs(problem, tokens, seed=call, low=-1)
            outs = session.forward(inputs.hidden_states, inputs.topk_ids, inputs.topk_weights, prepared)
            session.check()
            given = (inputs.hidden_states, inputs.topk_ids, inputs.topk_weights)
            for out, expected in zip(outs, layers.staged(problem, *given, weights).outputs, strict=True):
                assert len(expected) == 0 or layers.rel_l2(out, expected) < BOUND
        assert session.stored_bytes[0, 1] > 0


def test_a_kernel_without_its_flag_is_a_deadlock_or_a_time_out(layers: ModuleType) -> None:
    """A rank that never publishes its counts: the others wait as long as they are told to, or until it gives up.

    What is in the place of its counts makes no blocks: there could be more than there is room for.
    """
    layer, device = emulated(layers, seed=8)
    layer.patience = 40
    layer.memory[0].words("route_counts").fill_(1 << 20)
    inputs = layers.random_inputs(layer.problem, (8, 8))
    _, launches = layer.launches(inputs)
    launches[1] = [launch for launch in launches[1] if launch.kernel.__name__ != "push_entries"]
    try:
        device.run(launches, max_steps=MAX_STEPS)
    except (DeadlockError, ExecutionFault) as error:
        pytest.fail(f"the wait has no end: {error}")
    assert layer.memory[0].words("status").tolist()[:3] in ([1, 0, 1], [2, 0, 1])  # rank 0, waiting for rank 1
    assert layer.memory[0].words("num_blocks")[0] == 0

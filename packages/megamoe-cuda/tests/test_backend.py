"""Plans, limits and refusals of the CUDA backend; none of it needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe.backend import Capability, Reason, Verdict, VirtualRanks
from megamoe.errors import BackendUnavailableError, ConfigError, UnsupportedProblemError, WorkspaceError
from megamoe.problem import MoEProblem
from megamoe.reference.backend import ReferenceBackend
from megamoe.schedule.device_spec import H200, MI355X
from megamoe.symm import InprocGroup
from megamoe_cuda import backend as cuda_backend
from megamoe_cuda.aot import builds
from megamoe_cuda.backend import IMPLEMENTED, CudaBackend

SEED = MoEProblem(
    hidden_size=4096, intermediate_size=2048, num_experts=256, top_k=8, num_max_tokens_per_rank=8192, ep_size=8
)
BACKEND = CudaBackend()


@pytest.fixture
def claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the kernel had been seen right."""
    monkeypatch.setattr(cuda_backend, "SEEN_RIGHT_ON", "a GPU in this test")


def test_nothing_is_claimed_before_the_kernel_was_seen_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "SEEN_RIGHT_ON", None)
    assert BACKEND.capabilities() == frozenset()
    verdict = BACKEND.supports(SEED)
    assert not verdict.ok
    assert "has not passed its tests" in verdict.detail
    with pytest.raises(UnsupportedProblemError, match="has not passed its tests"):
        BACKEND.plan(SEED)


@pytest.mark.usefixtures("claimed")
def test_what_is_claimed_has_no_kernel_of_another_mode() -> None:
    claimed = BACKEND.capabilities()
    assert claimed == IMPLEMENTED
    assert not claimed & {Capability.QUANT_A8W4, Capability.QUANT_A4W4}
    assert BACKEND.supports(SEED).ok


@pytest.mark.usefixtures("claimed")
@pytest.mark.parametrize(
    "change, reason, says",
    [
        ({"quant": "a8w4"}, Reason.QUANT, "quant:a8w4; try act_format=fp8_1x128"),
        ({"quant": "a4w4"}, Reason.QUANT, "quant:a4w4"),
        ({"hidden_size": 2880}, Reason.SHAPE, "hidden_size = 2880 is not a multiple of 128"),
        ({"quant": "bf16", "hidden_size": 2896}, Reason.SHAPE, "hidden_size = 2896 is not a multiple of 32"),
        ({"intermediate_size": 2000}, Reason.SHAPE, "intermediate_size = 2000"),
        ({"hidden_size": 16384}, Reason.SHAPE, "hidden_size = 16384 is above 8192"),
        ({"num_experts": 256, "ep_size": 64}, Reason.EP_SIZE, "exceeds 32"),
        ({"num_max_tokens_per_rank": 1 << 28}, Reason.CAPACITY, "num_max_tokens_per_rank"),
        ({"num_experts": 32768, "ep_size": 32}, Reason.NUM_EXPERTS, "shared memory"),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_take_is_refused_with_the_reason(
    change: dict[str, object], reason: Reason, says: str
) -> None:
    verdict = BACKEND.supports(replace(SEED, **change))
    assert (verdict.ok, verdict.reason) == (False, reason)
    assert says in verdict.detail


@pytest.mark.usefixtures("claimed")
@pytest.mark.parametrize("hidden", [3072, 3584, 4096, 5120, 6144, 7168, 8192])
@pytest.mark.parametrize("local_experts", [1, 31, 32, 48, 56, 64])
def test_sizes_of_real_models_are_taken(hidden: int, local_experts: int) -> None:
    for ep_size in (1, 8):
        problem = replace(SEED, hidden_size=hidden, num_experts=local_experts * ep_size, ep_size=ep_size)
        assert BACKEND.supports(problem).ok


@pytest.mark.usefixtures("claimed")
@pytest.mark.parametrize("mode", [{"quant": "bf16"}, {"quant": "a8w4", "act_format": "fp8_1x128"}], ids=str)
@pytest.mark.parametrize("transport", ["bf16", "fp8_blockwise_1x32"])
def test_gpt_oss_is_taken_in_the_modes_whose_rows_need_not_be_whole_blocks(
    mode: dict[str, str], transport: str
) -> None:
    gpt_oss = replace(
        SEED,
        hidden_size=2880,
        intermediate_size=2880,
        num_experts=128,
        top_k=4,
        activation="swiglu_oai",
        swiglu_limit=7.0,
        expert_bias=True,
        transport=transport,
        **mode,
    )
    assert BACKEND.supports(gpt_oss).ok
    kernel = BACKEND.plan(gpt_oss).config.kernel(  # type: ignore[attr-defined]
        gpt_oss,
        BACKEND.plan(gpt_oss).config.tiles[0],
        num_virtual_ranks=1,
        ctas_per_rank=132,  # type: ignore[attr-defined]
    )
    assert (kernel.hidden_size, kernel.intermediate_size) == (2880, 2944)


@pytest.mark.usefixtures("claimed")
def test_a_plan_is_the_same_wherever_it_is_made() -> None:
    plan = BACKEND.plan(SEED)
    assert plan == BACKEND.plan(SEED)
    assert hash(plan) == hash(BACKEND.plan(SEED))
    assert plan.device == H200
    assert str(plan.bytes) in str(plan)


@pytest.mark.usefixtures("claimed")
def test_every_configuration_can_be_pinned_by_name() -> None:
    names = BACKEND.configs(SEED)
    assert names[0] == BACKEND.plan(SEED).config.name == "auto"
    assert [BACKEND.plan(SEED, config=name).config.name for name in names] == list(names)
    with pytest.raises(ConfigError, match="no such configuration"):
        BACKEND.plan(SEED, config="m96")


@pytest.mark.usefixtures("claimed")
def test_a_plan_for_fewer_sms_leaves_the_others_free_and_keeps_the_workspace() -> None:
    fewer = BACKEND.plan(SEED, replace(H200, num_sms=116))
    assert fewer.workspace == BACKEND.plan(SEED).workspace
    bf16 = replace(SEED, quant="bf16")
    shares = [BACKEND.plan(bf16, replace(H200, num_sms=116), config=name).config for name in (None, "m256")]
    assert [max(tile.cluster_size for tile in config.tiles) for config in shares] == [1, 2]
    assert {b.kernel.session_rings for b in builds(bf16, num_sms=116)} == {shares[0].rings}
    with pytest.raises(ConfigError, match="does not compile for this device"):
        BACKEND.plan(SEED, MI355X)


@pytest.mark.usefixtures("claimed")
def test_ranks_that_share_a_gpu_plan_for_their_share_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_RANKS_PER_GPU", "2")
    assert BACKEND.plan(SEED).device == replace(H200, num_sms=66)
    assert BACKEND.plan(SEED, H200).device == H200


@pytest.mark.usefixtures("claimed")
def test_workspace_of_the_seeds_shape_is_smaller_than_the_seeds_own() -> None:
    """The seed's buffer took 134 MiB at 8 tokens and 1,811 MiB at 8192."""
    mib = 1 << 20
    assert BACKEND.plan(replace(SEED, num_max_tokens_per_rank=8)).bytes < 134 * mib
    assert BACKEND.plan(SEED).bytes < 1811 * mib


@pytest.mark.usefixtures("claimed")
@pytest.mark.parametrize(
    "group, says",
    [
        (None, "pass a process group, or VirtualRanks"),
        ("eight ranks", "not a group of ranks; got str"),
        (InprocGroup.create(2)[0], "got 2 ranks; expected ep_size = 8"),
    ],
    ids=["none", "string", "size"],
)
def test_a_wrong_group_is_refused_by_every_rank_alone(group: object, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        BACKEND.open(BACKEND.plan(SEED), group)
    assert says in str(raised.value)


@pytest.mark.usefixtures("claimed")
@pytest.mark.parametrize(
    "plan, says",
    [(SEED, "got MoEProblem"), (ReferenceBackend().plan(SEED), "got one of reference")],
    ids=["problem", "plan"],
)
def test_what_is_no_plan_of_this_backend_is_refused(plan: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"no plan of backend cuda; {says}"):
        BACKEND.open(plan, VirtualRanks())


@pytest.mark.usefixtures("claimed")
@pytest.mark.parametrize("timeout_s", [0, float("nan"), "x"])
def test_a_wait_that_is_no_time_is_refused(timeout_s: Any) -> None:
    with pytest.raises(ConfigError, match="timeout_s is not a time"):
        BACKEND.open(BACKEND.plan(SEED), VirtualRanks(), timeout_s=timeout_s)


@pytest.fixture
def no_gpu() -> Iterator[None]:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    return


@pytest.mark.usefixtures("claimed", "no_gpu")
@pytest.mark.parametrize("group", [VirtualRanks(), None], ids=["virtual", "single"])
def test_a_machine_without_a_gpu_says_so(group: object) -> None:
    problem = SEED if group else replace(SEED, num_experts=32, ep_size=1)
    with pytest.raises(BackendUnavailableError, match="backend cuda can't run here"):
        BACKEND.open(BACKEND.plan(problem), group)


@pytest.mark.usefixtures("claimed")
def test_peers_share_no_memory_of_the_callers() -> None:
    plan = BACKEND.plan(replace(SEED, num_experts=64, ep_size=2))
    with pytest.raises(ConfigError, match="can't be handed in; leave workspace=None"):
        BACKEND.open(plan, InprocGroup.create(2)[0], workspace=torch.zeros(8, dtype=torch.uint8))


@pytest.mark.usefixtures("claimed")
@pytest.mark.parametrize(
    ("gpu", "ep_size", "error"),
    [
        ({"name": "NVIDIA A100", "major": 8}, 1, r"not SM90: NVIDIA A100; got sm_80; expected sm_90a; call torch.cuda"),
        ({"multi_processor_count": 114}, 1, "more SMs than a GPU has; got 132 SMs; expected at most 114"),
        ({}, 256, "more virtual ranks than SMs; got 256; expected at most 132"),
        ({}, 1, None),
    ],
    ids=["another-gpu", "fewer-sms", "more-ranks", "right"],
)
def test_the_current_gpu_has_to_suit_the_plan(
    monkeypatch: pytest.MonkeyPatch, gpu: dict[str, Any], ep_size: int, error: str | None
) -> None:
    """A machine may have an SM90 beside other GPUs, and a plan may be made for another device than is there."""
    properties = {"name": "a GPU", "major": 9, "minor": 0, "multi_processor_count": 132} | gpu
    monkeypatch.setattr(cuda_backend, "judge", lambda machine: Verdict.yes())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    plan = replace(BACKEND.plan(replace(SEED, num_experts=32, ep_size=1)), problem=replace(SEED, ep_size=ep_size))
    if error is None:
        assert cuda_backend._require_machine(plan, alone=True) == torch.device("cuda", 1)
        return
    with pytest.raises((BackendUnavailableError, ConfigError), match=error):
        cuda_backend._require_machine(plan, alone=True)


def test_memory_that_a_gpu_has_not_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore lines")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(
        WorkspaceError, match="^out of GPU memory; got CUDA out of memory. Tried to allocate 2 GiB; exp"
    ):
        cuda_backend._allocate_here(2, 2**30, torch.device("cpu"), None)

"""Where the kernels run: on the device that they are for, or on a stand-in that shows what can be shown without it.

The rung is read from MEGAMOE_ROCM_DEVICE, so that every process of a job, a test run or a server is on the same one.
docs/gfx950.md says what each rung can show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from megamoe import env
from megamoe.backend import Capability
from megamoe.schedule.device_spec import H200, MI355X, DeviceSpec


class Rung(StrEnum):
    """The values of MEGAMOE_ROCM_DEVICE."""

    GFX950 = "gfx950"
    NVIDIA = "nvidia"
    INTERPRETER = "interpreter"
    ISA = "isa"


WHAT: Mapping[Rung, str] = {
    Rung.GFX950: "a gfx950 GPU",
    Rung.NVIDIA: "an NVIDIA GPU as a stand-in, with the portable main loop",
    Rung.INTERPRETER: "Triton's interpreter on the CPU",
    Rung.ISA: "gfx950 code in the instruction interpreter on the CPU",
}

PLANNED_FOR: Mapping[Rung, DeviceSpec] = {
    Rung.GFX950: MI355X,
    Rung.NVIDIA: H200,
    # Every program of a persistent launch takes time of the one CPU: as few as there can be.
    Rung.INTERPRETER: replace(MI355X, name=WHAT[Rung.INTERPRETER], arch="cpu", num_sms=1),
    Rung.ISA: replace(MI355X, name=WHAT[Rung.ISA], arch="cpu", num_sms=1),
}
"""The device that a plan is for where none is named."""

SEEN_RIGHT_ON: Mapping[Rung, str | None] = {
    Rung.GFX950: None,
    Rung.NVIDIA: "NVIDIA H200s, 2026-11-30, 5760c66 to c56f630: the matrix, virtual ranks, two and four processes",
    Rung.INTERPRETER: "a CPU, 2026-11-30: the matrix with virtual ranks (3d63f49), its smoke layer over processes",
    Rung.ISA: "a CPU, 2026-11-30: the matrix at EP sizes 1 and 2 (4b1fdaa), four ranks in tests/isa/test_layer.py",
}
"""Where and when the conformance matrix passed on a rung, or as much of it as there was time for; None: nothing has run
there, so nothing is claimed there."""

_ON_EVERY_RUNG = frozenset(
    {
        Capability.QUANT_A8W4,
        Capability.QUANT_A4W4,
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
        Capability.STAGE_TAPS,
    }
)


def implemented(rung: Rung) -> frozenset[Capability]:
    """What the kernels are written to do there: graphs need a GPU."""
    return _ON_EVERY_RUNG if is_cpu(rung) else _ON_EVERY_RUNG | {Capability.GRAPH_CAPTURE}


def is_cpu(rung: Rung) -> bool:
    """Whether the kernels are interpreted there, on tensors of the CPU."""
    return rung in (Rung.INTERPRETER, Rung.ISA)


def asked_for() -> Rung | None:
    """The rung that MEGAMOE_ROCM_DEVICE names; None where it is not set.

    Raises:
        ConfigError: it names none.
    """
    name = env.rocm_device()
    return None if name is None else Rung(name)


def current() -> Rung:
    """The rung to run on."""
    return asked_for() or Rung.GFX950

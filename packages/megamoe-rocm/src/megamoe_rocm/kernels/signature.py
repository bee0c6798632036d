"""What the ahead-of-time compiler is told about a launch's arguments: types, alignment, and multiples of sizes.

Everything else of a launch is a run-time value, so one code object serves every problem within the limits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megamoe_rocm.aot.compiler import CompileOptions, Parameter, pointer, size
from megamoe_rocm.kernels.launch import Launch, MainLoop

_ELEMENTS = {
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}

MULTIPLES_OF_16 = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "hidden_stride",
        "payload_stride",
        "scales_stride",
        "target_stride",
        "hidden_payload_stride",
        "hidden_scales_stride",
        "a2_payload_stride",
        "a2_scales_stride",
        "combine_row_bytes",
    }
)
"""Sizes and strides that `planning.check_limits` and `schedule.workspace` make such multiples, and `hidden_stride`,
which a session does. `source_stride`, of rows of scales as well, is not among them."""

CDNA4_ATTRIBUTES = "amdgpu-agpr-alloc=0,amdgpu-sched-strategy=max-ilp"
"""For two workgroups on a compute unit: 256 registers a lane, none of them set aside for accumulation, which LLVM would
do with half of them; and the scheduler that keeps loads where the main loop puts them. With LLVM's defaults the 64x256
tiles spill or take more than 256 (docs/gfx950.md)."""


def parameters(launch: Launch) -> dict[str, Parameter]:
    """The run-time parameters of `launch`, by name."""
    return {name: _parameter(name, value) for name, value in launch.arguments.items()}


def options(launch: Launch) -> CompileOptions:
    """How it is compiled."""
    if launch.constants.get("MAIN_LOOP") != MainLoop.CDNA4:
        return CompileOptions(num_warps=launch.num_warps)
    return CompileOptions(num_warps=launch.num_warps, waves_per_eu=2, llvm_attributes=CDNA4_ATTRIBUTES)


def _parameter(name: str, value: Any) -> Parameter:
    if isinstance(value, Tensor):
        return pointer(_ELEMENTS[value.dtype], below_2gib=False)  # pools and weights can be larger
    if isinstance(value, float):
        return Parameter(type="fp32")
    if name.endswith("_offset"):
        return Parameter(type="i64", divisibility=16)
    return size(divisibility=16 if name in MULTIPLES_OF_16 else 1)

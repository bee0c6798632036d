"""Triton kernels of the layer, and the host code that launches them.

One call of a rank is six launches on one stream; a launch boundary orders everything within the rank:

    stage     quantize.py, route.py    quantise the rank's tokens; count its picks per expert
    route     route.py                 push entries to owners; the last program pushes counts and publishes them
    plan      plan.py                  wait for every rank's counts; cut the rows that arrive into blocks
    stage 1   gemm1_swiglu_quant.py    pull rows into the pool, GEMM1, SwiGLU, requantise: persistent, by tickets
    stage 2   gemm2_p2p.py             GEMM2, router weight, rows straight to their home rank: persistent, by tickets
    combine   combine.py               wait for every rank; FP32 sum in slot order

Stages 1 and 2 are repeated where the pool holds fewer blocks than the fullest call fills. program.py states the
protocol in the terms of megamoe.schedule, and a test has the model checker prove it.

Sizes are run-time arguments; tile shapes, formats and cache policies are compile-time constants. The files without
`jit` functions (program.py, workspace.py, launch.py) are ordinary host code.
"""

from __future__ import annotations

import atexit
import sys


@atexit.register
def forget_kernels() -> None:
    """Take this package's kernels out of Triton's list of all kernels.

    At the end of a process Triton's bindings look whether something of theirs is still alive, and print it as leaked
    ("nanobind: leaked 4 instances!"). The list is not cleared by then, and holds kernels, their modules, and with those
    the bindings' types.
    """
    registry = getattr(sys.modules.get("triton.runtime.jit"), "_triton_jit_function_registry", {})
    for name in [name for name in registry if name.startswith("megamoe_rocm.")]:
        del registry[name]

"""What `HipLauncher` does with one launch, through the real hip-python and whatever libamdhip64.so is found."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe_rocm.code_store import find_or_compile
from megamoe_rocm.kernels.launch import Launch
from megamoe_rocm.runtime.hip_runtime import HipLauncher, query

X = torch.zeros(4, dtype=torch.uint8)


@triton.jit
def mixed(x, n, factor, far_offset, y, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at, mask=at < n) * factor + far_offset.to(tl.float32), mask=at < n)


def main() -> None:
    print(query(0))
    launch = Launch(
        kernel=mixed,
        grid=(3, 5),
        arguments={"x": X, "n": 7, "factor": 0.5, "far_offset": 2**40, "y": torch.empty(0)},
        constants={"SIZE": 256},
        num_warps=2,
    )
    code = find_or_compile(launch)
    launcher = HipLauncher(torch.device("cpu"), find_or_compile)
    launcher._queue(launcher._load(launch), launch, 0xABC0)
    print(X.data_ptr(), code.lds_bytes, [(item.name, item.offset) for item in code.arguments])


if __name__ == "__main__":
    main()

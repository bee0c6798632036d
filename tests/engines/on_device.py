"""What an engine's layer must show on a device: FP32's values within the gate, and the same bits from a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megamoe.backend import Session
from megamoe.problem import QuantMode
from megamoe.testing.tolerances import ORACLE_GATES


def check_layer(engine: str, session: Session, y: Tensor, expected: Tensor, call: Callable[[], Tensor]) -> None:
    """Hold the layer's output `y` to `expected`, FP32 on the CPU, and a replay of `call`, which gave it, to `y`."""
    distance = float((y.float().cpu() - expected).norm() / expected.norm())
    gate = ORACLE_GATES[QuantMode.A8W8].rel_l2
    print(f"{engine}'s layer, {type(session).__name__} on {y.device}: relL2 from FP32 {distance:.4f}, gate {gate}")
    assert distance < gate
    if y.device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = call()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(replayed, y)
        print("a replay of its graph has the same bits")

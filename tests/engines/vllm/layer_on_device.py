"""One MoE layer of vLLM's classes on a device, in eager mode and in a CUDA graph, against FP32.

python tests/engines/vllm/layer_on_device.py cuda   # beside what `nox -s engines-vllm` installs, megamoe-cuda
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
import conftest  # noqa: F401  # tells vLLM that it has no kernels
import vllm_layers_of_tests as layers
from on_device import check_layer

from megamoe.integrations import vllm as megamoe_vllm
from megamoe.reference.oracle import oracle

NUM_TOKENS = 12


def main() -> None:
    device = torch.device(sys.argv[1])
    megamoe_vllm.register()
    engine = layers.config()
    engine.device_config = SimpleNamespace(device=device)
    x, logits = (tensor.to(device) for tensor in layers.tokens(NUM_TOKENS))
    with layers.joined(engine, SimpleNamespace(rank=0, world_size=1, directory=Path(tempfile.mkdtemp()))):
        with device:
            runner = layers.build(engine)
        layers.load(runner.to(device), layers.checkpoint())
        session = runner.routed_experts.quant_method._opened.session
        y = layers.run(engine, runner, x, logits)
        weights, ids = (tensor.cpu() for tensor in runner.router.select_experts(x, logits))
        expected = oracle(session.plan.problem, x.cpu(), ids, weights, [layers.stored(layers.checkpoint())])
        check_layer("vLLM", session, y, expected, lambda: layers.run(engine, runner, x, logits))


if __name__ == "__main__":
    main()

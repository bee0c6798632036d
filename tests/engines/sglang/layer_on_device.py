"""One MoE layer of SGLang's classes on a device, in eager mode and in a CUDA graph, against FP32.

    python tests/engines/sglang/layer_on_device.py cuda   # beside what `nox -s engines-sglang` installs, megamoe-cuda

SGLang is installed without its kernels: it is started for a CPU, which the layer then leaves.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch

with suppress(ImportError, RuntimeError):  # where it has its operators, they are defined before others of their names
    import torchvision  # noqa: F401

NO_GPU = mock.patch("torch.cuda.is_available", return_value=False)
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
with NO_GPU:
    import sglang_ranks as ranks
    from on_device import check_layer
    from sglang.srt.plugins import load_plugins
    from sglang_models import exact, experts, write_config

NUM_TOKENS = 12


def main() -> None:
    device, folder = torch.device(sys.argv[1]), Path(tempfile.mkdtemp())
    with NO_GPU:
        load_plugins()
        ranks.start(ranks.server_args(write_config(folder)), f"file://{folder}/store")
    layer = ranks.make_experts().to(device)
    ranks.load(layer, experts())
    call = [tensor.to(device) for tensor in ranks.routing(NUM_TOKENS, 0)]
    y = ranks.call(layer, *call)
    expected = exact(experts(), *(tensor.cpu() for tensor in call))
    check_layer("SGLang", layer.quant_method.opened.session, y, expected, lambda: ranks.call(layer, *call))


if __name__ == "__main__":
    main()

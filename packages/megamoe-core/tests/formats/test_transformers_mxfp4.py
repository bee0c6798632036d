"""MXFP4 as transformers reads gpt-oss checkpoints: the second opinion on nibbles, scale bytes and axes."""

import pytest
import torch

from megamoe.formats import MXFP4
from megamoe.layouts import ALTERNATING

pytestmark = pytest.mark.transformers


def test_dequantised_like_convert_moe_packed_tensors() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 8, 4, 16), dtype=torch.uint8, generator=generator)  # [E, 2I, H / 32, 16]
    scales = torch.arange(64).mul(4).to(torch.uint8).view(2, 8, 4)  # bytes 0 to 252
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [E, H, 2I]
    ours = MXFP4.dequantize(blocks.flatten(-2), scales)
    assert torch.equal(ours, expected.transpose(1, 2))
    gate, up = ALTERNATING.invert(ours).chunk(2, dim=1)
    assert torch.equal(gate, expected[..., ::2].transpose(1, 2))
    assert torch.equal(up, expected[..., 1::2].transpose(1, 2))

"""The namings that `megamoe.checkpoint` reads, one file for each family, the more specific before the more general.

To add one: subclass `Naming` in a file of its own and put an instance here.
"""

from megamoe.checkpoint.namings.base import Naming, StoredLayer
from megamoe.checkpoint.namings.deepseek_v3 import DeepseekV3Fp8
from megamoe.checkpoint.namings.fused import Fused
from megamoe.checkpoint.namings.gpt_oss import GptOssBf16, GptOssMxfp4
from megamoe.checkpoint.namings.mixtral import Mixtral
from megamoe.checkpoint.namings.qwen_moe import QwenMoe

NAMINGS: tuple[Naming, ...] = (DeepseekV3Fp8(), QwenMoe(), Mixtral(), GptOssMxfp4(), GptOssBf16(), Fused())

__all__ = ["NAMINGS", "Naming", "StoredLayer"]

"""BF16 as a format: the identity on BF16 values, without scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megamoe.formats.base import ActivationFormat


@dataclass(frozen=True, kw_only=True)
class Bf16(ActivationFormat):
    """BF16 payload, no scales; FP32 and FP16 input is rounded to nearest even."""

    name: ClassVar[str] = "bf16"
    block: ClassVar[int] = 1
    payload_dtype: ClassVar[torch.dtype] = torch.bfloat16
    scale_dtype: ClassVar[torch.dtype | None] = None

    def _encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x.to(torch.bfloat16), None

    def _decode(self, payload: Tensor, scales: Tensor | None) -> Tensor:
        return payload.float()


BF16 = Bf16()

"""What a naming is: how one family of checkpoints names and stores the experts of a layer."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megamoe.checkpoint.files import TensorReader
from megamoe.errors import CheckpointError
from megamoe.problem import Activation
from megamoe.tensors import ExpertWeights, GateUpLayout

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
E8M0_BYTES = (torch.uint8, torch.float8_e8m0fnu)


@dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """One MoE layer as a checkpoint stores it.

    Args:
        naming: which naming it is in.
        prefix: what the names of its tensors begin with, "model.layers.3.mlp".
        hidden_size: H.
        intermediate_size: I.
        num_experts: E, all of the layer.
        weights: type that its experts are stored in.
        layout: order of w13's rows.
        expert_bias: whether experts have biases.
        activation: what the model puts between the GEMMs.
        swiglu_limit: its clamp, or None.
    """

    naming: str
    prefix: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    weights: type[ExpertWeights]
    layout: GateUpLayout
    expert_bias: bool = False
    activation: Activation = Activation.SWIGLU
    swiglu_limit: float | None = None


class Naming(ABC):
    """One family's names. Stateless."""

    name: ClassVar[str]
    block: ClassVar[str]  # name of the MoE block within the layer
    marker: ClassVar[str]  # regular expression, after "<block>.", of a tensor that only this naming has

    @property
    def one_by_one(self) -> bool:
        """Whether each expert has tensors of its own."""
        return self.marker.startswith(r"experts\.\d+")

    def pattern(self, layer: str) -> re.Pattern[str]:
        """Names of marker tensors of the layers that the regular expression `layer` matches."""
        block = re.escape(self.block)
        return re.compile(rf"(?P<prefix>(?:.*\.)?layers\.(?P<layer>{layer})\.{block})\.{self.marker}")

    def find(self, names: Iterable[str], layer: int) -> str | None:
        """Prefix of the layer's MoE block, or None where this naming does not fit.

        Raises:
            CheckpointError: several blocks of that layer.
        """
        pattern = self.pattern(str(layer))
        matches = {match["prefix"] for name in names if (match := pattern.fullmatch(name))}
        if len(matches) > 1:
            raise CheckpointError(
                f"layer {layer} is there several times",
                got=", ".join(sorted(matches)),
                expected="one model in the files",
            )
        return matches.pop() if matches else None

    def looks_for(self, layer: int) -> str:
        """The tensor that `find` wants, readable."""
        marker = self.marker.replace(r"\d+", "E").replace("\\", "")
        return f"*layers.{layer}.{self.block}.{marker}"

    @abstractmethod
    def describe(self, reader: TensorReader, prefix: str, config: Mapping[str, Any]) -> StoredLayer:
        """Sizes and formats of the layer, from headers and the model's configuration.

        Raises:
            CheckpointError: tensors that contradict each other.
        """

    @abstractmethod
    def read_expert(self, reader: TensorReader, layer: StoredLayer, expert: int) -> ExpertWeights:
        """Expert `expert` alone (E_local = 1); tensors may be views of the mapped files.

        Raises:
            CheckpointError: a tensor that is missing or has another shape or dtype.
        """


def expert_count(found: int, config: Mapping[str, Any]) -> int:
    """Experts of a layer: what the configuration says, or else what was found.

    Args:
        found: experts that the files hold, the highest id plus one.
        config: the model's configuration.
    """
    for key in ("n_routed_experts", "num_local_experts", "num_experts"):
        if isinstance(config.get(key), int):
            return max(found, int(config[key]))
    return found


def positive(config: Mapping[str, Any], key: str, default: float) -> float:
    """A number of the model's configuration; `default` where it is not there, null or 0.

    Raises:
        CheckpointError: it is no number above 0.
    """
    value = config.get(key) or default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise CheckpointError(
            f"config.json's {key} is no number above 0",
            got=repr(value),
            expected=f"{default:g}, say",
            hint="copy config.json again from the checkpoint's source",
        )
    return value


def as_bf16(tensor: Tensor) -> Tensor:
    """BF16 weights; FP32 and FP16 checkpoints are rounded to nearest even."""
    return tensor.to(torch.bfloat16)

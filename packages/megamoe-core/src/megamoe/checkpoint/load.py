"""Loading one rank's experts of one layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megamoe.checkpoint.convert import convert
from megamoe.checkpoint.files import TensorFiles
from megamoe.checkpoint.namings import NAMINGS, Naming, StoredLayer
from megamoe.checkpoint.namings.base import positive
from megamoe.errors import CheckpointError, ConfigError
from megamoe.problem import QuantMode, member
from megamoe.tensors import ExpertWeights


@dataclass(frozen=True, kw_only=True)
class LayerCheckpoint:
    """One MoE layer in a checkpoint: what it is, and how to read experts of it. Picklable.

    Args:
        files: where its tensors are.
        stored: its sizes and formats.
    """

    files: TensorFiles
    stored: StoredLayer

    def load_experts(
        self,
        experts: range,
        quant: QuantMode | str | None = None,
        *,
        on_expert: Callable[[int], None] | None = None,
    ) -> ExpertWeights:
        """Read some experts into memory, converted to the weight format of a mode.

        One expert at a time: beside the result, no more than one expert of the files is in memory, and its pages are
        given back before the next.

        Args:
            experts: ids, contiguous; a rank's share is `range(first, first + num_local_experts)`.
            quant: mode to convert to; None keeps the format of the files.
            on_expert: called with the number of experts read so far.

        Raises:
            CheckpointError: an expert or tensor that is missing, or has another shape or dtype.
            FormatError: sizes that the mode's format can't hold.
            ConfigError: ids that the layer does not have, or no mode.
        """
        if not 0 <= experts.start < experts.stop <= self.stored.num_experts:
            raise ConfigError(
                "experts that the layer does not have", got=experts, expected=f"within 0 to {self.stored.num_experts}"
            )
        mode = None if quant is None else member("quant", QuantMode, quant)
        result: ExpertWeights | None = None
        for slot, expert in enumerate(experts):
            with self.files.open() as reader:
                single = naming_of(self.stored).read_expert(reader, self.stored, expert)
                if mode is not None:
                    single = convert(single, mode)
                if result is None:
                    result = _room_for(single, len(experts))
                _put(single, result, slot)
                del single
            if on_expert is not None:
                on_expert(slot + 1)
        assert result is not None
        return result


def find_layer(files: TensorFiles, layer: int) -> LayerCheckpoint:
    """Find out in which naming `files` hold layer `layer`, and its sizes.

    Raises:
        CheckpointError: no naming fits; the message lists what was looked for and which MoE layers are there. Or the
            files hold the layer more than once.
    """
    names = [name for name in files.where if f"layers.{layer}." in name]
    fits = [(naming, prefix) for naming in NAMINGS if (prefix := naming.find(names, layer)) is not None]
    if fits:
        _require_one_layer(fits, layer)
        naming, prefix = fits[0]
        # A large model has tens of thousands of tensors; ranks are sent the names of this layer's only.
        files = replace(files, where={name: files.where[name] for name in names})
        with files.open() as reader:
            stored = naming.describe(reader, prefix, files.config)
        if stored.swiglu_limit is None and files.config.get("swiglu_limit"):
            stored = replace(stored, swiglu_limit=float(positive(files.config, "swiglu_limit", 1.0)))
        return LayerCheckpoint(files=files, stored=stored)
    wanted = "; ".join(f"{naming.looks_for(layer)} ({naming.name})" for naming in NAMINGS)
    there = moe_layers(files)
    raise CheckpointError(
        f"layer {layer} holds no experts in a naming that is known",
        got=f"MoE layers {', '.join(map(str, there))}" if there else f"no MoE layer among {len(files.where)} tensors",
        expected=f"a tensor like {wanted}",
        hint="name another --layer" if there else "name all files of the checkpoint, or its index file",
    )


def _require_one_layer(fits: Sequence[tuple[Naming, str]], layer: int) -> None:
    """Refuse files that hold the layer twice. Several namings may fit one set of tensors, the general with the special:
    what tells two sets apart is where they are, and whether each expert has tensors of its own."""
    sets: dict[tuple[str, bool], str] = {}
    for naming, prefix in fits:
        sets.setdefault((prefix, naming.one_by_one), naming.name)  # the special naming comes first
    if len(sets) > 1:
        raise CheckpointError(
            f"layer {layer} is there several times",
            got=" and ".join(f"{prefix} as {name} stores it" for (prefix, _), name in sorted(sets.items())),
            expected="one checkpoint",
            hint="name the files of one checkpoint only",
        )


def moe_layers(files: TensorFiles) -> list[int]:
    """Layers of which some naming finds experts, ascending."""
    patterns = [naming.pattern(r"\d+") for naming in NAMINGS]
    matches = (pattern.fullmatch(name) for name in files.where for pattern in patterns)
    return sorted({int(match["layer"]) for match in matches if match})


def naming_of(stored: StoredLayer) -> Naming:
    """The naming that a layer is stored in."""
    return next(naming for naming in NAMINGS if naming.name == stored.naming)


def _room_for(single: ExpertWeights, count: int) -> ExpertWeights:
    """Uninitialised weights of `count` experts like `single`."""
    room: dict[str, Any] = {name: tensor.new_empty(count, *tensor.shape[1:]) for name, tensor in single.tensors()}
    return replace(single, **room)


def _put(single: ExpertWeights, into: ExpertWeights, slot: int) -> None:
    targets = dict(into.tensors())
    for name, tensor in single.tensors():
        _as_bytes(targets[name][slot]).copy_(_as_bytes(tensor[0].contiguous()))


def _as_bytes(tensor: Tensor) -> Tensor:
    """Bytes are copied, not values: not every torch build copies every 8-bit float."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor

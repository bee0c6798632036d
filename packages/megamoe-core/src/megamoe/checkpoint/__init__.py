"""Reading MoE layers from safetensors checkpoints.

    files = TensorFiles.find(["DeepSeek-V3/"])           # one file, several, an index, a directory
    layer = find_layer(files, 3)                         # which naming, which sizes; reads headers only
    weights = layer.load_experts(range(0, 64), "a8w8")   # this rank's experts, in the mode's format

Files are mapped and given back expert by expert, so a rank's memory grows by its own share. Everything that can be
wrong with a checkpoint is a `CheckpointError` that names the file and the tensor.
"""

from megamoe.checkpoint.convert import conversion, convert
from megamoe.checkpoint.files import TensorFiles, TensorReader
from megamoe.checkpoint.load import LayerCheckpoint, find_layer, moe_layers
from megamoe.checkpoint.namings import NAMINGS, Naming, StoredLayer
from megamoe.checkpoint.router import Router, load_router

__all__ = [
    "NAMINGS",
    "LayerCheckpoint",
    "Naming",
    "Router",
    "StoredLayer",
    "TensorFiles",
    "TensorReader",
    "conversion",
    "convert",
    "find_layer",
    "load_router",
    "moe_layers",
]

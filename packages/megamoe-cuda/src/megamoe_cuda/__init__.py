"""The NVIDIA SM90 backend of MegaMoE; `megamoe.select_backend("cuda", problem)` finds it by its entry point."""

from megamoe_cuda._version import __version__

__all__ = ["__version__"]

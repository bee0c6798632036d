"""The AMD gfx950 backend of MegaMoE; `megamoe.select_backend("rocm", problem)` finds it by its entry point."""

from megamoe_rocm._version import __version__

__all__ = ["__version__"]

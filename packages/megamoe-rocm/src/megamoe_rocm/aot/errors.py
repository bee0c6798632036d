"""What can go wrong between a kernel's source and an inspected code object."""

from __future__ import annotations

from megamoe.errors import MegaMoEError


class ToolchainError(MegaMoEError):
    """A compiler or disassembler that is missing or does not know gfx950."""


class BuildError(MegaMoEError):
    """A kernel that the compiler refused, or a signature that does not fit it."""


class CodeObjectError(MegaMoEError):
    """Bytes that are no gfx950 code object, or one that contradicts its own metadata."""


class InspectionError(MegaMoEError):
    """A code object that breaks a promise: spills, scratch, LDS, scaled-MFMA count, cache scope or fences."""

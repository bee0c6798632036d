"""What executing a code object can end in."""

from __future__ import annotations

from megamoe.errors import MegaMoEError


class IsaError(MegaMoEError):
    """Base of everything that the interpreter raises."""


class UnsupportedInstructionError(IsaError):
    """An instruction, operand or modifier that has no semantics here; raised while decoding, not when it is reached."""


class LaunchArgumentsError(IsaError):
    """Arguments that do not fit the kernel's kernarg segment."""


class ExecutionFault(IsaError):
    """Base of what a wave does wrong; names the rank, workgroup, wave and instruction.

    Args:
        message: what happened.
    """

    def located(self, where: str) -> ExecutionFault:
        """The same fault with the place in front of its message."""
        self.message = f"{where}: {self.message}"
        return self


class MemoryFault(ExecutionFault):
    """An access that is not wholly inside one buffer that the rank may use, or that the hardware would refuse."""


class PendingRegisterFault(ExecutionFault):
    """A register that is used while a load into it has not been waited for."""


class LdsRaceFault(ExecutionFault):
    """LDS bytes that two waves use, one of them writing, without a barrier between; or a DMA nobody waited for."""


class UndefinedFault(ExecutionFault):
    """An operation whose result the ISA documents leave open, or that this interpreter does not model."""


class DeadlockError(IsaError):
    """No wave can go on, or the bound on steps is reached; lists where every wave stands.

    Args:
        waves: one line a wave: rank, workgroup, wave, state, instruction.
    """

    def __init__(self, message: str, *, waves: tuple[str, ...], hint: str | None = None) -> None:
        super().__init__(message, got="\n  ".join(("waves:", *waves)), hint=hint)
        self.waves = waves

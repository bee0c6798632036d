"""Outstanding memory operations: when they take effect and what a wait makes sure of.

An operation takes effect at some moment between its issue and the wait that covers it, in any order, except that
operations of one workgroup on the same bytes keep their order (they pass one L1 cache). The interpreter picks the
moment: at issue, when the scheduler feels like it, or as late as the wait.

A store of one wave is *not* covered by another wave's wait. A workgroup whose waves store, meet at a barrier, and let
one wave raise a flag therefore needs `s_waitcnt vmcnt(0)` in every wave before that barrier.

Source: AMD CDNA4 ISA, "Data dependency resolution: S_WAITCNT"; LLVM AMDGPUUsage, memory model. On transitivity, LLVM
pull requests 160501 and 161638.
"""

from __future__ import annotations

from collections.abc import Callable

from megamoe_rocm.isa.address_space import Lanes
from megamoe_rocm.isa.errors import PendingRegisterFault
from megamoe_rocm.isa.wave import Wave


class Access:
    """One outstanding operation.

    Args:
        registers: those that it will write; they may not be used before the wait.
        effect: what happens to memory and registers; None if that has happened at issue.
        lanes: the bytes of global memory it touches.
        stores: whether it writes them.
        retire: what a wait does besides, such as recording that an LDS DMA is complete.
        ordered: whether it completes in issue order; false for scalar loads.
        lds_again: called when a barrier is passed before the wait.
    """

    __slots__ = ("effect", "lanes", "lds_again", "ordered", "registers", "retire", "stores")

    def __init__(
        self,
        *,
        registers: int = 0,
        effect: Callable[[], None] | None = None,
        lanes: tuple[Lanes, ...] = (),
        stores: bool = False,
        retire: Callable[[], None] | None = None,
        ordered: bool = True,
        lds_again: Callable[[], None] | None = None,
    ) -> None:
        self.registers = registers
        self.effect = effect
        self.lanes = lanes
        self.stores = stores
        self.retire = retire
        self.ordered = ordered
        self.lds_again = lds_again

    def conflicts(self, later: Access) -> bool:
        """Whether a later operation of the workgroup must not overtake this one."""
        if not (self.stores or later.stores):
            return False
        return any(mine.overlaps(other) for mine in self.lanes for other in later.lanes)


def issue(wave: Wave, access: Access) -> None:
    """Put a vector memory operation under way."""
    wave.vm.append(access)
    wave.pending |= access.registers
    group = wave.group
    group.outstanding.append(access)
    group.stores_outstanding += access.stores
    if group.machine.decide_early():
        perform(wave, access)


def perform(wave: Wave, access: Access) -> None:
    """Let an operation take effect, after what it must not overtake."""
    if access.effect is None:
        return
    group, outstanding = wave.group, wave.group.outstanding
    if group.stores_outstanding:
        position = outstanding.index(access)
        for earlier in [item for item in outstanding[:position] if item.conflicts(access)]:
            perform(wave, earlier)
    effect, access.effect = access.effect, None
    outstanding.remove(access)
    group.stores_outstanding -= access.stores
    effect()


def overwrite(wave: Wave, registers: int) -> None:
    """What a vector memory load does about loads into its registers that are under way.

    Vector memory loads return in order, so the later one wins without a wait; compilers count on it (LLVM,
    SIInsertWaitcnts: write after write). The registers stay pending until the later one is waited for.

    Raises:
        PendingRegisterFault: LDS or scalar data are under way to them, which may come later.
    """
    if any(access.registers & registers for access in wave.lgkm):
        raise PendingRegisterFault("loads into a register to which LDS or scalar data are under way")
    for access in [item for item in wave.vm if item.registers & registers]:
        perform(wave, access)


def complete(wave: Wave, access: Access) -> None:
    """What a wait does for one operation."""
    perform(wave, access)
    if access.retire is not None:
        access.retire()


def wait_vm(wave: Wave, allowed: int) -> None:
    """`s_waitcnt vmcnt(allowed)`: vector memory operations complete in order."""
    queue = wave.vm
    if len(queue) > allowed:
        while len(queue) > allowed:
            complete(wave, queue.popleft())
        wave.refresh_pending()


def wait_lgkm(wave: Wave, allowed: int) -> None:
    """`s_waitcnt lgkmcnt(allowed)`: LDS operations complete in order, scalar loads in any.

    With both kinds outstanding a count above zero guarantees only what it does in the worst case: that many of either.
    """
    queue = wave.lgkm
    if len(queue) <= allowed:
        return
    ordered = [access for access in queue if access.ordered]
    certain = max(len(ordered) - allowed, 0)
    done = list(queue) if allowed == 0 else ordered[:certain]
    for access in done:
        queue.remove(access)
        complete(wave, access)
    wave.refresh_pending()

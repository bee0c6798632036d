"""What a code object's instructions promise: counts, cache scopes, fences, and a check against what was stated.

A release at system scope is `buffer_wbl2 sc0 sc1`, a wait for it, then the flag's write; an acquire is the flag's read,
a wait for it, then `buffer_inv sc0 sc1`; at agent scope, the device, `sc1` stands alone (LLVM AMDGPUUsage, "Memory
Model GFX942", which gfx950 shares). Both are looked for in the order in which the instructions lie in the code; a
release or an acquire that lost its cache operation is found as a flag operation that is neither, so that the counts
that a kernel states stop matching.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megamoe_rocm.aot.code_object import CodeObject
from megamoe_rocm.aot.disassembly import Instruction
from megamoe_rocm.aot.errors import InspectionError
from megamoe_rocm.aot.occupancy import LDS_BYTES_PER_CU

VMCNT = re.compile(r"vmcnt\((\d+)\)")


def is_scaled_mfma(item: Instruction) -> bool:
    """Whether it is a block-scaled matrix instruction."""
    return item.mnemonic.startswith("v_mfma_scale_")


def is_vector_memory(item: Instruction) -> bool:
    """Whether it is a load, store or atomic of global memory."""
    return item.mnemonic.startswith(("global_", "buffer_", "flat_")) and not is_cache_operation(item)


def is_cache_operation(item: Instruction) -> bool:
    """Whether it writes back or invalidates a cache."""
    return item.mnemonic in ("buffer_wbl2", "buffer_inv")


def is_store(item: Instruction) -> bool:
    """Whether it is a plain store to global memory."""
    return is_vector_memory(item) and "_store_" in item.mnemonic


def is_atomic(item: Instruction) -> bool:
    """Whether it is an atomic on global memory."""
    return is_vector_memory(item) and "_atomic_" in item.mnemonic


def scope(item: Instruction) -> str:
    """Scope of an access or a cache operation by its cache bits: `system`, `agent` or `workgroup` (or narrower).

    On atomics `sc0` says "return the old value" and `sc1` alone the scope: without it, the device.
    """
    if is_atomic(item):
        return "system" if item.has("sc1") else "agent"
    if item.has("sc0", "sc1"):
        return "system"
    return "agent" if item.has("sc1") else "workgroup"


def waits_for_vector_memory(item: Instruction) -> bool:
    """Whether it waits until no vector memory access is outstanding."""
    match = VMCNT.search(item.text) if item.mnemonic == "s_waitcnt" else None
    return match is not None and match[1] == "0"


@dataclass(frozen=True, kw_only=True)
class Fences:
    """Flag operations of a kernel at one scope, by address.

    Args:
        releases: writes of flags with a write-back and a wait before them.
        acquires: reads of flags with a wait and an invalidate after them.
        polls: reads of flags without an invalidate: relaxed, or right only in a loop whose exit acquires.
        unfenced: atomics without a return value and without a write-back: relaxed.
    """

    releases: tuple[int, ...]
    acquires: tuple[int, ...]
    polls: tuple[int, ...]
    unfenced: tuple[int, ...]


def find_fences(instructions: Sequence[Instruction], at_scope: str = "system") -> Fences:
    """Sort the flag operations at one scope; plain stores count only where a write-back precedes them."""
    releases: list[int] = []
    acquires: list[int] = []
    polls: list[int] = []
    unfenced: list[int] = []
    for at, item in enumerate(instructions):
        if not is_vector_memory(item) or scope(item) != at_scope:
            continue
        released = _written_back(instructions[:at], at_scope)
        if released:
            releases.append(item.address)
        reads = not is_store(item) and (not is_atomic(item) or item.has("sc0"))
        if not is_store(item) and _invalidated(instructions[at + 1 :], at_scope):
            acquires.append(item.address)  # also an atomic whose result nobody uses
        elif reads:
            polls.append(item.address)
        elif is_atomic(item) and not released:
            unfenced.append(item.address)
    return Fences(releases=tuple(releases), acquires=tuple(acquires), polls=tuple(polls), unfenced=tuple(unfenced))


def _written_back(before: Sequence[Instruction], at_scope: str) -> bool:
    """Whether a write-back, and after it a wait, is the last that happened to global memory."""
    waited = False
    for item in reversed(before):
        if item.mnemonic == "buffer_wbl2":
            return waited and scope(item) in (at_scope, "system")
        if is_vector_memory(item) or item.mnemonic in ("s_barrier", "s_endpgm"):
            return False
        waited = waited or waits_for_vector_memory(item)
    return False


def _invalidated(after: Sequence[Instruction], at_scope: str) -> bool:
    """Whether a wait, and after it an invalidate, is the next that happens to global memory."""
    waited = False
    for item in after:
        if item.mnemonic == "buffer_inv":
            return waited and scope(item) in (at_scope, "system")
        if is_vector_memory(item) or item.mnemonic in ("s_barrier", "s_endpgm"):
            return False
        waited = waited or waits_for_vector_memory(item)
    return False


def peer_stores(instructions: Iterable[Instruction]) -> tuple[Instruction, ...]:
    """Plain stores that write through to system scope (`sc0 sc1`)."""
    return tuple(item for item in instructions if is_store(item) and scope(item) == "system")


def main_loop(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The innermost loop with the most scaled MFMAs; empty if none has any."""
    by_address = {item.address: at for at, item in enumerate(instructions)}
    bodies = []
    for at, item in enumerate(instructions):
        if item.mnemonic.startswith(("s_branch", "s_cbranch")):
            start = by_address.get(item.branch_target, len(instructions))
            if start <= at:
                bodies.append((start, at + 1))
    inner = [a for a in bodies if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in bodies)]
    loops = [tuple(instructions[start:stop]) for start, stop in inner]
    best = max(loops, key=lambda body: sum(map(is_scaled_mfma, body)), default=())
    return best if any(map(is_scaled_mfma, best)) else ()


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a kernel's author states about its code object; `None` is not checked.

    Args:
        scaled_mfmas: in the whole kernel.
        loop_scaled_mfmas: in one trip of the main loop.
        peer_stores: stores with `sc0 sc1`.
        releases: system-scope flag writes with a write-back and a wait before them.
        acquires: system-scope flag reads with a wait and an invalidate after them.
        polls: system-scope reads without an invalidate.
        agent_releases, agent_acquires: the same at agent scope.
        min_workgroups_per_cu: occupancy that the configuration counts on.
        max_vgprs: registers that the configuration counts on.
    """

    scaled_mfmas: int | None = None
    loop_scaled_mfmas: int | None = None
    peer_stores: int | None = None
    releases: int | None = None
    acquires: int | None = None
    polls: int | None = None
    agent_releases: int | None = None
    agent_acquires: int | None = None
    min_workgroups_per_cu: int | None = None
    max_vgprs: int | None = None


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What was found in a code object."""

    scaled_mfmas: int
    loop_scaled_mfmas: int
    peer_stores: int
    fences: Fences
    agent_fences: Fences
    workgroups_per_cu: int
    num_vgprs: int


def inspect(code: CodeObject) -> Inspection:
    """Count and find everything that `check` compares."""
    instructions = code.instructions
    return Inspection(
        scaled_mfmas=sum(map(is_scaled_mfma, instructions)),
        loop_scaled_mfmas=sum(map(is_scaled_mfma, main_loop(instructions))),
        peer_stores=len(peer_stores(instructions)),
        fences=find_fences(instructions),
        agent_fences=find_fences(instructions, "agent"),
        workgroups_per_cu=code.occupancy.workgroups_per_cu,
        num_vgprs=code.resources.num_vgprs,
    )


def check(code: CodeObject, expectation: Expectation) -> Inspection:
    """Hold a code object to what every kernel promises and to what its author states.

    Returns:
        what was found.

    Raises:
        InspectionError: spills, scratch, too much LDS, or any difference; the message lists all of them.
    """
    found, used = inspect(code), code.resources
    problems = [
        _differs("vector register spills", used.vgpr_spills, 0),
        _differs("scalar register spills", used.sgpr_spills, 0),
        _differs("bytes of scratch", used.scratch_bytes, 0),
        _differs("scratch accesses", sum(item.mnemonic.startswith("scratch_") for item in code.instructions), 0),
        _differs("scaled MFMAs", found.scaled_mfmas, expectation.scaled_mfmas),
        _differs("scaled MFMAs in the main loop", found.loop_scaled_mfmas, expectation.loop_scaled_mfmas),
        _differs("peer stores", found.peer_stores, expectation.peer_stores),
        _differs("releases", len(found.fences.releases), expectation.releases),
        _differs("acquires", len(found.fences.acquires), expectation.acquires),
        _differs("polls", len(found.fences.polls), expectation.polls),
        _differs("agent-scope releases", len(found.agent_fences.releases), expectation.agent_releases),
        _differs("agent-scope acquires", len(found.agent_fences.acquires), expectation.agent_acquires),
    ]
    if used.lds_bytes > LDS_BYTES_PER_CU:
        problems.append(f"bytes of LDS: {used.lds_bytes}, at most {LDS_BYTES_PER_CU}")
    if expectation.max_vgprs is not None and used.num_vgprs > expectation.max_vgprs:
        problems.append(f"vector registers: {used.num_vgprs}, at most {expectation.max_vgprs}")
    least = expectation.min_workgroups_per_cu
    if least is not None and found.workgroups_per_cu < least:
        problems.append(f"workgroups a compute unit: {found.workgroups_per_cu}, at least {least}")
    broken = [problem for problem in problems if problem]
    if broken:
        raise InspectionError(
            f"the code object of {code.name} breaks its promises",
            got="; ".join(broken),
            hint=f"built with {code.build}",
        )
    return found


def _differs(what: str, got: Any, expected: Any) -> str:
    return "" if expected is None or got == expected else f"{what}: {got}, expected {expected}"

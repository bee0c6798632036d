"""Delete one instruction at a time from a kernel that is right, and see whether running it shows.

What is noticed: a fault, a deadlock, or a wrong result. What is not is a survivor and needs a reason: that the kernel
without the instruction is equivalent, or that the interpreter does not model what the instruction is for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megamoe_rocm.aot.disassembly import Instruction
from megamoe_rocm.aot.inspection import is_atomic, is_store, is_vector_memory, scope, waits_for_vector_memory
from megamoe_rocm.isa.errors import DeadlockError, ExecutionFault
from megamoe_rocm.isa.instructions.control import CONDITIONS, COUNTER
from megamoe_rocm.isa.operands import Step, parse
from megamoe_rocm.isa.program import Program
from megamoe_rocm.isa.wave import Wave

# Runs a program with a seed: whether its results are right.
Subject = Callable[[Program, int], bool]

SURVIVED, NOT_EXECUTED = "survived", "not executed"
CROSS_LANE = ("ds_permute", "ds_bpermute", "ds_swizzle")  # between registers: they use no LDS
KINDS = ("mfma", "load", "lds", "wait", "barrier", "fence")


def kind_of(item: Instruction) -> str | None:
    """The kind of an instruction that is worth deleting."""
    name = item.mnemonic
    if name.startswith("v_mfma"):
        return "mfma"
    if name.startswith(("global_load", "buffer_load", "s_load")):
        return "load"
    if name.startswith("ds_"):
        return "lds"
    return {"s_waitcnt": "wait", "s_barrier": "barrier", "buffer_inv": "fence", "buffer_wbl2": "fence"}.get(name)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What deleting one instruction did.

    Args:
        index: of the instruction.
        kind: one of `KINDS`.
        instruction: as text.
        how: `fault: …`, `deadlock`, `wrong result`, `not executed` or `survived`.
        reason: why it may survive; "" if nobody has said so.
    """

    index: int
    kind: str
    instruction: str
    how: str
    reason: str = ""

    @property
    def noticed(self) -> bool:
        """Whether the deletion showed."""
        return self.how not in (SURVIVED, NOT_EXECUTED)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Outcomes of all deletions of one kernel."""

    kernel: str
    outcomes: tuple[Outcome, ...] = field(repr=False)

    @property
    def executed(self) -> tuple[Outcome, ...]:
        """Deletions of instructions that were executed."""
        return tuple(outcome for outcome in self.outcomes if outcome.how != NOT_EXECUTED)

    @property
    def survivors(self) -> tuple[Outcome, ...]:
        """Those of them that did not show."""
        return tuple(outcome for outcome in self.executed if not outcome.noticed)

    @property
    def unexplained(self) -> tuple[Outcome, ...]:
        """Survivors without a reason."""
        return tuple(outcome for outcome in self.survivors if not outcome.reason)

    @property
    def share_noticed(self) -> float:
        """Noticed deletions among those of executed instructions."""
        return 1 - len(self.survivors) / len(self.executed)

    def table(self) -> str:
        """Noticed of all by kind, then every survivor."""
        idle = len(self.outcomes) - len(self.executed)
        lines = [
            f"{self.kernel}: {self.share_noticed:.1%} of {len(self.executed)} deletions noticed; {idle} not executed"
        ]
        for kind in KINDS:
            of_kind = [outcome for outcome in self.executed if outcome.kind == kind]
            if of_kind:
                lines.append(f"  {kind}: {sum(outcome.noticed for outcome in of_kind)} of {len(of_kind)}")
        lines += [f"  survived: {item.instruction} ({item.reason or 'no reason given'})" for item in self.survivors]
        return "\n".join(lines)


def sites(program: Program, *, kinds: Iterable[str] = KINDS, sample: int | None = None, seed: int = 0) -> list[int]:
    """Indices of the instructions to delete, in order.

    Args:
        program: the kernel; what lies before its entry runs only on other hardware and is left out.
        kinds: which kinds.
        sample: at most so many, drawn with `seed`; all by default.
        seed: of the draw.
    """
    wanted = frozenset(kinds)
    found = [at for at, item in enumerate(program.instructions) if at >= program.entry and kind_of(item) in wanted]
    if sample is not None and sample < len(found):
        found = sorted(random.Random(seed).sample(found, sample))
    return found


def delete_each(
    program: Program,
    subject: Subject,
    indices: Sequence[int],
    *,
    seeds: Sequence[int] = (0, 1),
    reasons: Mapping[int, str] | None = None,
) -> Report:
    """Run the kernel without each of these instructions.

    Args:
        program: a kernel that is right.
        subject: runs it; must return True for the whole kernel with every seed.
        indices: instructions to delete, one at a time.
        seeds: schedules to try until one shows the deletion.
        reasons: index -> why a survivor may survive.

    Raises:
        AssertionError: the whole kernel is wrong, or slower than it may be.
    """
    for seed in seeds:
        assert subject(program, seed), f"{program.code.name} is wrong before anything is deleted (seed {seed})"
    outcomes = []
    for index in indices:
        item = program.instructions[index]
        how = _try(program, subject, index, seeds)
        kind = kind_of(item)
        assert kind is not None
        outcomes.append(
            Outcome(index=index, kind=kind, instruction=str(item), how=how, reason=(reasons or {}).get(index, ""))
        )
    return Report(kernel=program.code.name, outcomes=tuple(outcomes))


def _try(program: Program, subject: Subject, index: int, seeds: Sequence[int]) -> str:
    mutant, reached = program.without(index)
    for seed in seeds:
        try:
            if not subject(mutant, seed):
                return "wrong result"
        except ExecutionFault as fault:
            return f"fault: {fault.message}"
        except DeadlockError:
            return "deadlock"
    return SURVIVED if reached() else NOT_EXECUTED


TWIN_BARRIER = "equivalent: another barrier, with no access to memory or LDS between the two"
LAST_BARRIER = "equivalent: neither LDS nor a store, an atomic or a barrier after it"
NOTHING_OUTSTANDING = "equivalent: an earlier wait covers it, with nothing issued between the two"
COVERED_LATER = "equivalent: a later wait covers it, with neither an access nor a barrier between the two"
WRITE_BACK = "equivalent in the model: every store before it goes through the caches"  # and is waited for
IDLE = "equivalent where it was executed: nothing was outstanding that it waits for"
LOADS_COVERED = (
    "equivalent where it was executed: it waited for loads only, and to use one that no later wait covers is a fault"
)
LEFT_AS_IT_WAS = "equivalent where it was executed: it moved values between lanes to where they were already"
WAITED_LATER = (
    "equivalent: on every path the wave waits for its stores once more before a barrier, an atomic or an invalidate"
)
NO_LDS_AROUND = "equivalent: on every path from it or to it another barrier, with nothing but loads between the two"
OWN_ARRIVALS = (
    "equivalent in the model: on every path from it or to it another barrier, or an end, without LDS between the two; "
    "what is stored or counted there, each wave waits for and counts itself"
)
EQUIVALENT = frozenset(
    (
        TWIN_BARRIER, LAST_BARRIER, NO_LDS_AROUND, NOTHING_OUTSTANDING, COVERED_LATER, IDLE, LOADS_COVERED, WRITE_BACK,
        LEFT_AS_IT_WAS, WAITED_LATER,
    )
)  # fmt: skip
"""What runs or code prove; the others are arguments about a kernel."""


def explain(program: Program) -> dict[int, str]:
    """Reasons that straight-line reasoning proves: barriers and waits that another one makes redundant.

    Returns:
        index -> reason, for what may survive its deletion.
    """
    items, reasons = program.instructions, {}
    targets = {item.branch_target for item in items if _branches(item)}
    after, before = _flow(items)
    for at, item in enumerate(items):
        kind = kind_of(item)
        if kind == "barrier":
            ahead, behind = _straight(items[at + 1 :], targets), _straight(items[at - 1 :: -1] if at else (), targets)
            if _first(ahead, _touches) == "barrier" or _first(behind, _touches) == "barrier":
                reasons[at] = TWIN_BARRIER
            elif not any(map(_acts, items[at + 1 :])) and not _loops_back(items, at):
                reasons[at] = LAST_BARRIER
            elif after.leads_to_barriers(at, _acts) or before.leads_to_barriers(at, _acts):
                reasons[at] = NO_LDS_AROUND
            elif after.leads_to_barriers(at, _uses_or_raises) or before.leads_to_barriers(at, _touches_lds):
                reasons[at] = OWN_ARRIVALS
        elif item.mnemonic == "buffer_wbl2" and _all_write_through(items[:at]):
            reasons[at] = WRITE_BACK
        elif kind == "wait":
            reason = _explain_wait(items, at, targets)
            if not reason and items[at - 1].mnemonic == "buffer_wbl2" and before.leads_to_full_waits(at):
                reason = WRITE_BACK if _all_write_through(items[:at]) else ""
            if not reason and set(_counts(item)) == {"vmcnt"} and after.leads_to_waits(at):
                reason = WAITED_LATER
            if reason:
                reasons[at] = reason
    return reasons


def watch(program: Program) -> tuple[Program, dict[int, str]]:
    """The same program, and the reasons why waits and moves between lanes may be missing, as far as its runs show.

    Returns:
        a program to run, and a dict that has for each of them what has been true of it in all those runs.
    """
    steps, found = list(program.steps), {}
    for at, item in enumerate(program.instructions):
        if kind_of(item) == "wait":
            found[at] = IDLE
            steps[at] = _watched_wait(program.steps[at], at, _counts(item), found)
        elif item.mnemonic.startswith(CROSS_LANE):
            found[at] = LEFT_AS_IT_WAS
            steps[at] = _watched_move(program.steps[at], at, parse(item.operands[0]).index, found)
    return replace(program, steps=tuple(steps)), found


def _watched_move(step: Step, at: int, target: int, found: dict[int, str]) -> Step:
    def watched(wave: Wave) -> int | None:
        before = wave.v[target].copy()
        following = step(wave)
        if (before != wave.v[target])[wave.lanes].any():
            found.pop(at, None)
        return following

    return watched


def _watched_wait(step: Step, at: int, counts: Mapping[str, int], found: dict[int, str]) -> Step:
    def watched(wave: Wave) -> int | None:
        queues = ((wave.vm, counts.get("vmcnt")), (wave.lgkm, counts.get("lgkmcnt")))
        done = [item for queue, most in queues if most is not None for item in list(queue)[: max(len(queue) - most, 0)]]
        if done and found.get(at) == IDLE:
            found[at] = LOADS_COVERED
        if any(item.stores or not item.registers for item in done):
            found.pop(at, None)
        return step(wave)

    return watched


def _explain_wait(items: Sequence[Instruction], at: int, targets: set[int]) -> str:
    mine = _counts(items[at])
    for other in _straight(items[at - 1 :: -1] if at else (), targets | {items[at].address}):
        if kind_of(other) == "wait" and _covers(_counts(other), mine):
            return NOTHING_OUTSTANDING
        if _touches(other):
            break
    for other in _straight(items[at + 1 :], targets):
        if kind_of(other) == "wait" and _covers(_counts(other), mine):
            return COVERED_LATER
        if _touches(other) or not other.mnemonic.startswith(("s_nop", "s_waitcnt")):
            break
    return ""


def _all_write_through(items: Sequence[Instruction]) -> bool:
    return all(scope(item) == "system" for item in items if is_store(item))


def _counts(item: Instruction) -> dict[str, int]:
    return {name: int(value) for name, value in COUNTER.findall(item.text)}


def _covers(stronger: Mapping[str, int], weaker: Mapping[str, int]) -> bool:
    return all(name in stronger and stronger[name] <= value for name, value in weaker.items())


def _branches(item: Instruction) -> bool:
    return item.mnemonic in CONDITIONS


def _straight(items: Iterable[Instruction], targets: set[int]) -> Iterable[Instruction]:
    """Instructions up to where control may come in or go out."""
    for item in items:
        if _branches(item) or item.mnemonic == "s_endpgm":
            return
        yield item
        if item.address in targets:
            return


def _touches_lds(item: Instruction) -> bool:
    if item.mnemonic.startswith(CROSS_LANE):
        return False
    return item.mnemonic.startswith("ds_") or "lds" in item.modifiers or "_lds_" in item.mnemonic


def _uses_or_raises(item: Instruction) -> bool:
    """Whether it uses LDS, or raises a flag: a wave does that for others too, while each counts itself."""
    return _touches_lds(item) or (is_atomic(item) and "swap" in item.mnemonic)


def _acts(item: Instruction) -> bool:
    """Whether other waves may see it."""
    return _touches_lds(item) or is_store(item) or is_atomic(item) or item.mnemonic == "s_barrier"


def _touches(item: Instruction) -> str:
    """`barrier`, `access` or ""."""
    if item.mnemonic == "s_barrier":
        return "barrier"
    return "access" if item.mnemonic.startswith(("ds_", "global_", "buffer_", "s_load")) else ""


def _first(items: Iterable[Instruction], function: Callable[[Instruction], str]) -> str:
    return next((found for item in items if (found := function(item))), "")


def _loops_back(items: Sequence[Instruction], at: int) -> bool:
    """Whether some branch after an instruction goes to it or before it."""
    address = items[at].address
    return any(_branches(item) and item.branch_target <= address for item in items[at + 1 :])


def _flow(items: Sequence[Instruction]) -> tuple[_Flow, _Flow]:
    """What may be executed right after each instruction, and right before it."""
    positions = {item.address: at for at, item in enumerate(items)}
    after: list[list[int]] = []
    before: list[list[int]] = [[] for _ in items]
    for at, item in enumerate(items):
        following = [] if item.mnemonic in ("s_branch", "s_endpgm") or at + 1 == len(items) else [at + 1]
        if _branches(item) and item.branch_target in positions:
            following.append(positions[item.branch_target])
        after.append(following)
        for other in following:
            before[other].append(at)
    return _Flow(items=items, edges=after), _Flow(items=items, edges=before)


@dataclass(frozen=True, kw_only=True)
class _Flow:
    """Instructions and, for each, those to go on to."""

    items: Sequence[Instruction]
    edges: Sequence[Sequence[int]]

    def leads_to_barriers(self, at: int, refuse: Callable[[Instruction], bool]) -> bool:
        """Whether each path from an instruction comes to a barrier, or to an end, before one that is refused."""
        return self._leads_to(at, lambda item: kind_of(item) == "barrier", refuse)

    def leads_to_waits(self, at: int) -> bool:
        """Whether each path comes to a wait for all of vector memory, or to an end, before others may rely on one."""
        return self._leads_to(
            at, waits_for_vector_memory, lambda item: is_atomic(item) or item.mnemonic in ("s_barrier", "buffer_inv")
        )

    def leads_to_full_waits(self, at: int) -> bool:
        """Whether each path comes to a wait for all of vector memory, or to an end, before an access to it."""
        return self._leads_to(at, waits_for_vector_memory, is_vector_memory)

    def _leads_to(self, at: int, end: Callable[[Instruction], bool], refuse: Callable[[Instruction], bool]) -> bool:
        seen, ahead = set(), list(self.edges[at])
        while ahead:
            here = ahead.pop()
            if here in seen or end(self.items[here]):
                continue  # an end comes first: `refuse` may name barriers too
            if refuse(self.items[here]):
                return False
            seen.add(here)
            ahead.extend(self.edges[here])
        return True

"""Delete one instruction at a time from a kernel that is right, and see whether running it shows.

What is noticed: a fault, a deadlock, or a wrong result. What is not is a survivor and needs a reason: that the kernel
without the instruction is equivalent, or that the interpreter does not model what the instruction is for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megamoe_rocm.aot.disassembly import Instruction
from megamoe_rocm.isa.errors import DeadlockError, ExecutionFault
from megamoe_rocm.isa.program import Program

# Runs a program with a seed: whether its results are right.
Subject = Callable[[Program, int], bool]

KINDS = ("mfma", "load", "lds", "wait", "barrier")


def kind_of(item: Instruction) -> str | None:
    """The kind of an instruction that is worth deleting."""
    name = item.mnemonic
    if name.startswith("v_mfma"):
        return "mfma"
    if name.startswith(("global_load", "buffer_load", "s_load")):
        return "load"
    if name.startswith("ds_"):
        return "lds"
    return {"s_waitcnt": "wait", "s_barrier": "barrier"}.get(name)


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
        return self.how not in ("survived", "not executed")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Outcomes of all deletions of one kernel."""

    kernel: str
    outcomes: tuple[Outcome, ...] = field(repr=False)

    @property
    def survivors(self) -> tuple[Outcome, ...]:
        """Deletions that did not show."""
        return tuple(outcome for outcome in self.outcomes if not outcome.noticed)

    @property
    def unexplained(self) -> tuple[Outcome, ...]:
        """Survivors without a reason."""
        return tuple(outcome for outcome in self.survivors if not outcome.reason)

    @property
    def share_noticed(self) -> float:
        """Noticed deletions among all."""
        return 1 - len(self.survivors) / len(self.outcomes)

    def table(self) -> str:
        """Noticed of all by kind, then every survivor."""
        lines = [f"{self.kernel}: {self.share_noticed:.1%} of {len(self.outcomes)} deletions noticed"]
        for kind in KINDS:
            of_kind = [outcome for outcome in self.outcomes if outcome.kind == kind]
            if of_kind:
                lines.append(f"  {kind}: {sum(outcome.noticed for outcome in of_kind)} of {len(of_kind)}")
        lines += [f"  {item.how}: {item.instruction} ({item.reason or 'no reason given'})" for item in self.survivors]
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
    found = [
        at for at, item in enumerate(program.instructions) if at >= program.entry and kind_of(item) in wanted
    ]
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
    return "survived" if reached() else "not executed"

"""Units of the persistent stages, and the tickets by which programs take them.

A program takes the next run of units by a ticket, so units start in their order whatever the number of programs and
whichever are resident: whoever holds the lowest unit that has not run can run it, since it waits for lower units only.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def take_ticket(tickets):
    """The next number, counted from 0."""
    return tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")


@triton.jit
def lagging_unit(unit, num_blocks, num_first, num_second, lag):
    """Unit number `unit` where each block has `num_first` units, and `num_second` more that come `lag` blocks later.

    The closed form of `megamoe.schedule.persistent.unit_at`, for units that exist.

    Returns:
        whether it is of the second kind (int32), its block, its number within the block.
    """
    lead = tl.minimum(lag, num_blocks)
    lead_units = lead * num_first
    step_units = num_first + num_second
    both_units = (num_blocks - lead) * step_units
    in_both = unit - lead_units
    in_tail = in_both - both_units
    within = in_both % step_units
    is_lead = unit < lead_units
    is_tail = in_tail >= 0
    is_second = is_tail | ((is_lead == 0) & (within >= num_first))
    step = in_both // step_units
    block = tl.where(is_second, step, lead + step)
    block = tl.where(is_lead, unit // num_first, block)
    block = tl.where(is_tail, num_blocks - lead + in_tail // num_second, block)
    index = tl.where(is_second, within - num_first, within)
    index = tl.where(is_lead, unit % num_first, index)
    index = tl.where(is_tail, in_tail % num_second, index)
    return is_second.to(tl.int32), block, index

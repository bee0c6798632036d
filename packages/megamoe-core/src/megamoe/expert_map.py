"""Logical experts on redundant physical ones: which copy a token goes to, and what each logical expert received.

    experts = ExpertMap(physical_to_logical, num_logical_experts=256, ep_rank=3, ep_size=8)
    y = session.forward(x, experts.to_physical(topk_ids), topk_weights, weights)
    load = experts.logical_counts(session.receive_counts())       # this rank's part; all-reduce it for the total

A load balancer gives busy experts several physical copies and moves them now and then. It keeps, for each layer,
`physical_to_logical`: entry p is the logical expert whose weights physical slot p holds (vLLM and SGLang keep rows of
`[layers, num_physical]`, one row is what this class takes). The router names logical experts; a session of
`MoEProblem(num_experts=num_physical)` takes physical ids.

Local replica first: a rank that owns a copy uses its own, and else the copies are taken in turn. Which copy computes a
row changes where it travels and not its result: equal weights give equal bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.errors import ConfigError, InputError

NO_EXPERT = -1


class ExpertMap:
    """The copies of one layer's experts as one rank sees them. Its calls have fixed shapes and never synchronise.

    Its tables stay where they are: after `update` a captured graph follows the new map at its next replay.

    Args:
        physical_to_logical: `[P]` int32 or int64, logical expert of each physical slot; -1 is an empty slot. Every
            logical expert has at least one slot. Rank r owns slots [r * P/R, (r+1) * P/R).
        num_logical_experts: L.
        ep_rank: the rank whose copies come first.
        ep_size: R; it divides P.
        device: where `topk_ids` will be; None is the map's own device.

    Raises:
        ConfigError: sizes that contradict each other.
        InputError: no map of L experts; names the first expert that is missing.
    """

    def __init__(
        self,
        physical_to_logical: Tensor,
        *,
        num_logical_experts: int,
        ep_rank: int,
        ep_size: int,
        device: torch.device | str | None = None,
    ) -> None:
        num_physical = physical_to_logical.numel()
        if physical_to_logical.dim() != 1 or not 0 < num_logical_experts <= num_physical:
            raise ConfigError(
                "physical_to_logical is not one layer's map",
                got=f"shape {tuple(physical_to_logical.shape)} for {num_logical_experts} logical experts",
                expected="[P] with P >= num_logical_experts >= 1",
                hint="pass the row of this layer",
            )
        if ep_size < 1 or num_physical % ep_size or not 0 <= ep_rank < ep_size:
            raise ConfigError(
                "the ranks don't share the physical experts evenly",
                got=f"{num_physical} experts, rank {ep_rank} of {ep_size}",
                expected="a multiple of ep_size, and 0 <= ep_rank < ep_size",
            )
        self.num_logical_experts = num_logical_experts
        self.num_physical_experts = num_physical
        self.ep_rank = ep_rank
        self.ep_size = ep_size
        device = physical_to_logical.device if device is None else torch.device(device)
        # As wide as the most copies that an expert can have, so that any later map fits in place.
        width = num_physical - num_logical_experts + 1
        # One more row and slot than there are: what ids outside of the map, and empty slots, lead to.
        with torch.inference_mode(False):  # so that they can be updated in any mode
            self._copies = torch.zeros(num_logical_experts + 1, width, dtype=torch.int64, device=device)
            self._num_copies = torch.ones(num_logical_experts + 1, dtype=torch.int64, device=device)
            self._logical = torch.zeros(num_physical, dtype=torch.int64, device=device)
        self.update(physical_to_logical)

    def update(self, physical_to_logical: Tensor) -> None:
        """Follow a new map, in place: call it when experts have moved, between two calls. Synchronises.

        Args:
            physical_to_logical: like the one before, on any device.

        Raises:
            InputError: not a map of the same sizes; nothing has changed then.
        """
        new = physical_to_logical.detach().to("cpu", torch.int64)
        self._check(new)
        slots = torch.arange(self.num_physical_experts)
        local = slots // (self.num_physical_experts // self.ep_size) == self.ep_rank
        logical = torch.where(new == NO_EXPERT, self.num_logical_experts, new)
        # By expert; among an expert's copies those of this rank first.
        order = torch.argsort(2 * logical + (~local).long(), stable=True)
        num_rows = self.num_logical_experts + 1
        total = torch.bincount(logical, minlength=num_rows)
        own = torch.bincount(logical[local], minlength=num_rows)
        position = slots - (total.cumsum(0) - total)[logical[order]]
        copies = torch.zeros(self._copies.shape, dtype=torch.int64)
        held = logical[order] < self.num_logical_experts
        copies[logical[order][held], position[held]] = order[held]
        copies[-1] = self.num_physical_experts  # no such expert: the session skips and counts it
        num_copies = torch.where(own > 0, own, total)
        num_copies[-1] = 1
        for table, values in ((self._copies, copies), (self._num_copies, num_copies), (self._logical, logical)):
            table.copy_(values)

    def _check(self, new: Tensor) -> None:
        if new.shape != (self.num_physical_experts,):
            raise InputError(
                "a map of other sizes", got=tuple(new.shape), expected=f"[{self.num_physical_experts}]",
                hint="make a new ExpertMap",
            )  # fmt: skip
        foreign = (new < NO_EXPERT) | (new >= self.num_logical_experts)
        if foreign.any():
            slot = int(foreign.nonzero()[0])
            raise InputError(
                f"physical_to_logical[{slot}] is not a logical expert",
                got=int(new[slot]),
                expected=f"-1 to {self.num_logical_experts - 1}",
            )
        missing = torch.bincount(new[new != NO_EXPERT], minlength=self.num_logical_experts) == 0
        if missing.any():
            raise InputError(f"logical expert {int(missing.nonzero()[0])} has no physical slot")

    def to_physical(self, topk_ids: Tensor) -> Tensor:
        """Stream-ordered, graph-safe. The copy that each pick goes to.

        Args:
            topk_ids: `[T, K]` int32 or int64 logical ids; -1 means no expert.

        Returns:
            `[T, K]` of the same dtype: physical ids. -1 stays -1; any other id outside [0, L) becomes P, which a
            session counts as dropped. Row t takes copy (t + ep_rank) modulo their number, this rank's copies where it
            has some: ranks start at different copies, and the same batch goes the same way every time.
        """
        last = self.num_logical_experts
        row = torch.where((topk_ids >= 0) & (topk_ids < last), topk_ids, last).long()
        turn = torch.arange(topk_ids.shape[0], device=topk_ids.device).unsqueeze(1) + self.ep_rank
        physical = self._copies[row, turn % self._num_copies[row]]
        return torch.where(topk_ids == NO_EXPERT, NO_EXPERT, physical).to(topk_ids.dtype)

    def physical_counts(self, receive_counts: Tensor) -> Tensor:
        """Stream-ordered, graph-safe. This rank's counts in their place among all physical experts.

        Args:
            receive_counts: `[P / ep_size]`, what `Session.receive_counts()` of this rank gives.

        Returns:
            `[P]` int64, zero for slots of other ranks: summed over the ranks it is the load per physical expert, the
            row that vLLM's balancer keeps for a layer.

        Raises:
            InputError: another number of counts.
        """
        num_local = self.num_physical_experts // self.ep_size
        if receive_counts.shape != (num_local,):
            raise InputError("not one rank's counts", got=tuple(receive_counts.shape), expected=f"[{num_local}]")
        counts = receive_counts.new_zeros(self.num_physical_experts, dtype=torch.int64)
        counts[self.ep_rank * num_local : (self.ep_rank + 1) * num_local] = receive_counts
        return counts

    def logical_counts(self, counts: Tensor) -> Tensor:
        """Stream-ordered, graph-safe. Rows per logical expert, summed over its copies.

        Args:
            counts: `[P]` of all physical experts, or `[P / ep_size]` of this rank's.

        Returns:
            `[L]` int64. From one rank's counts it is that rank's part: an all-reduce over the group gives the total.

        Raises:
            InputError: counts of neither number.
        """
        if counts.shape != (self.num_physical_experts,):
            counts = self.physical_counts(counts)
        sums = counts.new_zeros(self.num_logical_experts + 1, dtype=torch.int64)
        return sums.index_add(0, self._logical, counts.long())[:-1]

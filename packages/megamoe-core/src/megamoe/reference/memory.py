"""The arrays of one rank's workspace as tensors, at the places that the plan gives them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megamoe.schedule.workspace import Section, WorkspaceLayout

Words = npt.NDArray[np.uint32]


class RankMemory:
    """One rank's workspace.

    Args:
        layout: where everything is.
        symmetric: uint8, the symmetric section.
        local: uint8, the local section; None for a peer, whose local section nobody else sees.
    """

    def __init__(self, layout: WorkspaceLayout, symmetric: Tensor, local: Tensor | None) -> None:
        self._layout = layout
        self._symmetric = symmetric
        self._local = local
        # The same few views are asked for thousands of times a call. Dictionaries, as a cache of bound methods would be
        # a cycle, and a closed session's memory would wait for the garbage collector.
        self._row_views: dict[tuple[str, torch.dtype], Tensor] = {}
        self._word_views: dict[str, Words] = {}

    def has(self, name: str) -> bool:
        """Whether the workspace has the array; formats without scales have none of scales."""
        return name in self._layout

    def rows(self, name: str, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Array `name` as `[*dims, row_bytes / itemsize]` of `dtype`."""
        view = self._row_views.get((name, dtype))
        if view is None:
            view = self._row_views[name, dtype] = self._view(name, dtype)
        return view

    def words(self, name: str) -> Words:
        """First word of each row of array `name`, numpy `[*dims]`: single loads and stores (megamoe.symm.base)."""
        words = self._word_views.get(name)
        if words is None:
            words = self._word_views[name] = self._view(name, torch.int32)[..., 0].numpy().view(np.uint32)
        return words

    def _view(self, name: str, dtype: torch.dtype) -> Tensor:
        array = self._layout[name]
        if array.section is Section.SYMMETRIC:
            section, offset = self._symmetric, array.offset
        else:
            assert self._local is not None, f"{name} of a peer"
            section, offset = self._local, array.offset - self._layout.symmetric_bytes
        return section[offset : offset + array.num_bytes].view(dtype).view(*array.dims, -1)

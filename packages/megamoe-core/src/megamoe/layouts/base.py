"""Layouts as objects: named, invertible, and carried as a tag by what they were applied to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from megamoe.errors import LayoutError


class Layout(ABC):
    """An order of a weight's (or scale's) items in memory. Frozen, comparable, hashable, picklable.

    `apply` takes a tensor from the checkpoint's order (row-major, gate rows first) to this one, `invert` takes it back.
    Neither changes the shape or any bit of an item, and the expert stays the first dimension: slot e of the result
    depends on slot e of the argument only. So experts can be moved in place, by copying slots, in any layout.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The tag, as error messages and prepared weights show it."""

    @abstractmethod
    def why_not(self, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        """What this layout takes instead of `shape` and `dtype`, or None if it takes them."""

    def apply(self, tensor: Tensor) -> Tensor:
        """`tensor` from the checkpoint's order to this layout; same shape and dtype.

        Raises:
            LayoutError: `why_not` of its shape and dtype.
        """
        return self._run(self._apply, tensor)

    def invert(self, tensor: Tensor) -> Tensor:
        """`tensor` from this layout to the checkpoint's order; same shape and dtype.

        Raises:
            LayoutError: `why_not` of its shape and dtype.
        """
        return self._run(self._invert, tensor)

    def _run(self, move: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
        expected = self.why_not(tuple(tensor.shape), tensor.dtype)
        if expected is not None:
            got = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise LayoutError(f"this tensor can't be in layout {self.name}", got=got, expected=expected)
        if tensor.dtype.itemsize > 1:
            return move(tensor)
        # Bytes are bytes: not every torch operation knows every 8-bit float.
        return move(tensor.view(torch.uint8)).view(tensor.dtype)

    @abstractmethod
    def _apply(self, tensor: Tensor) -> Tensor: ...

    @abstractmethod
    def _invert(self, tensor: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class CheckpointOrder(Layout):
    """The order that layouts start from. `apply` and `invert` return their argument, not a copy."""

    tag: str

    @property
    def name(self) -> str:
        return self.tag

    def why_not(self, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        return None

    def _apply(self, tensor: Tensor) -> Tensor:
        return tensor

    def _invert(self, tensor: Tensor) -> Tensor:
        return tensor


ROW_MAJOR = CheckpointOrder(tag="row_major")


@dataclass(frozen=True, kw_only=True)
class Composed(Layout):
    """Several layouts, the first applied first: gfx950's w13 is gate/up in 16-row blocks, then preshuffled."""

    layouts: tuple[Layout, ...]

    @property
    def name(self) -> str:
        return "+".join(layout.name for layout in self.layouts)

    def why_not(self, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        reasons = (layout.why_not(shape, dtype) for layout in self.layouts)
        return next((reason for reason in reasons if reason is not None), None)

    def _apply(self, tensor: Tensor) -> Tensor:
        return reduce(lambda moved, layout: layout.apply(moved), self.layouts, tensor)

    def _invert(self, tensor: Tensor) -> Tensor:
        return reduce(lambda moved, layout: layout.invert(moved), reversed(self.layouts), tensor)


@dataclass(frozen=True, kw_only=True, eq=False)
class LaidOut:
    """A tensor and the layout that it is in."""

    tensor: Tensor
    layout: Layout

    def require(self, layout: Layout) -> Tensor:
        """The tensor, if it is in `layout`.

        Raises:
            LayoutError: it is in another.
        """
        if self.layout != layout:
            raise LayoutError(
                "the tensor is in another layout",
                got=self.layout.name,
                expected=layout.name,
                hint="prepare the weights for this backend again, or convert them with LaidOut.to()",
            )
        return self.tensor

    def to(self, layout: Layout) -> LaidOut:
        """The same weight in `layout`; itself if it is there already.

        Raises:
            LayoutError: `layout` can't hold the tensor's shape.
        """
        if self.layout == layout:
            return self
        return LaidOut(tensor=layout.apply(self.layout.invert(self.tensor)), layout=layout)

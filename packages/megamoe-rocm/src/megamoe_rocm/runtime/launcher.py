"""What a session asks of whatever runs its launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from megamoe.errors import CaptureError
from megamoe_rocm.kernels.launch import INTERPRETER, Launch, Target


class Launcher(ABC):
    """Loads the kernels of launches and queues launches on one device.

    Attributes:
        device: where the tensors of a call are.
        target: what the kernels are told about the device.
    """

    device: torch.device
    target: Target

    @abstractmethod
    def load(self, launches: Iterable[Launch]) -> None:
        """Have the kernels of these launches ready; runs none of them."""

    @abstractmethod
    def launch(self, launch: Launch, *, rank: int) -> None:
        """Queue one launch of a rank behind the earlier ones on the current stream."""

    def flush(self) -> None:  # noqa: B027  # a GPU needs no telling
        """A call of all driven ranks has been queued."""

    def synchronize(self) -> None:
        """Wait until everything that was queued has ended."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def unload(self) -> None:  # noqa: B027  # not every launcher holds something
        """Give loaded kernels back, once no launch and no captured graph uses them."""


class InterpretedLauncher(Launcher):
    """Triton's interpreter (TRITON_INTERPRET=1): a launch has run when `launch` returns."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.target = INTERPRETER

    def load(self, launches: Iterable[Launch]) -> None:
        """Nothing is compiled."""

    def launch(self, launch: Launch, *, rank: int) -> None:
        """Run it."""
        launch.run()


def kernel_key(launch: Launch) -> Hashable:
    """What the machine code of a launch depends on, beyond the version of this package."""
    types = tuple(value.dtype if isinstance(value, Tensor) else type(value) for value in launch.arguments.values())
    return launch.kernel.__name__, types, tuple(launch.constants.items()), launch.num_warps


def refuse_capture(launch: Launch) -> None:
    """Raise if a graph is being captured: a kernel can't be loaded then.

    Raises:
        CaptureError: see above.
    """
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"kernel {launch.kernel.__name__} is not loaded, and can't be while a graph is captured",
            hint="call session.warmup() on every rank before the capture",
        )

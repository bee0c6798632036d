"""What a session asks of whatever runs its launches."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megamoe.errors import CaptureError
from megamoe_rocm.kernels.launch import INTERPRETER, Launch, Target
from megamoe_rocm.runtime.arguments import ArgumentLayout


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


# In the `extra` of cuLaunchKernel and hipModuleLaunchKernel, the same in both (cuda.h, hip_runtime_api.h).
BUFFER_POINTER, BUFFER_SIZE = 1, 2


@dataclass(frozen=True, kw_only=True)
class LoadedKernel:
    """A kernel in a driver's memory.

    Args:
        module: the driver's handle of what was loaded.
        function: its handle of the kernel.
        shared_bytes: dynamic shared memory (LDS) of a launch.
        layout: how the arguments of a launch lie in memory.
    """

    module: Any
    function: Any
    shared_bytes: int
    layout: ArgumentLayout


class ModuleLauncher(Launcher):
    """Machine code through a GPU's driver, in torch's context of the device: loaded once, then launched.

    Attributes:
        launch_function: the driver's function that launches.
        unload_function: the one that gives a module back.
        end: what ends the list that tells the driver where a launch's arguments lie.
    """

    launch_function: ClassVar[str]
    unload_function: ClassVar[str]
    end: ClassVar[int]

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._loaded: dict[Hashable, LoadedKernel] = {}

    def load(self, launches: Iterable[Launch]) -> None:
        """See `Launcher.load`."""
        with torch.cuda.device(self.device):
            for launch in launches:
                self._get(launch)

    def launch(self, launch: Launch, *, rank: int) -> None:
        """See `Launcher.launch`."""
        with torch.cuda.device(self.device):
            self._queue(self._get(launch), launch, torch.cuda.current_stream(self.device).cuda_stream)

    def unload(self) -> None:
        """See `Launcher.unload`."""
        with torch.cuda.device(self.device):
            for kernel in self._loaded.values():
                self._call(self.unload_function, kernel.module)
        self._loaded.clear()

    @abstractmethod
    def _load(self, launch: Launch) -> LoadedKernel:
        """Have the driver load the kernel of `launch`."""

    @abstractmethod
    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """Call a function of the driver; returns what it gives besides its status.

        Raises:
            BackendUnavailableError: it failed.
        """

    def _get(self, launch: Launch) -> LoadedKernel:
        key = kernel_key(launch)
        loaded = self._loaded.get(key)
        if loaded is None:
            refuse_capture(launch)
            loaded = self._loaded[key] = self._load(launch)
        return loaded

    def _queue(self, kernel: LoadedKernel, launch: Launch, stream: int) -> None:
        block = ctypes.create_string_buffer(kernel.layout.pack(launch.arguments), kernel.layout.num_bytes)
        num_bytes = ctypes.c_size_t(kernel.layout.num_bytes)
        extra = (ctypes.c_void_p * 5)(
            BUFFER_POINTER, ctypes.addressof(block), BUFFER_SIZE, ctypes.addressof(num_bytes), self.end
        )
        x, y = (*launch.grid, 1)[:2]
        lanes = launch.num_warps * self.target.lanes
        self._call(
            self.launch_function, kernel.function, x, y, 1, lanes, 1, 1, kernel.shared_bytes, stream, None, extra
        )


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

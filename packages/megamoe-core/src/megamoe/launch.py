"""Running one function on several ranks of this machine, each a process of its own.

`run_ranks` returns the ranks' results in rank order, or raises what went wrong first; `spawn_ranks` hands out every
rank's outcome, for tests that look at more than the first failure. Neither hangs: a rank that dies is noticed at once,
the others get `grace_s` seconds to fail by themselves, then they are stopped, and `timeout_s` bounds the whole.

Processes are started by spawn, never by fork, so `fn` has to be importable: a function of a module, not of a prompt,
and a script that calls this needs its `if __name__ == "__main__":`.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe import env
from megamoe.errors import BackendUnavailableError, ConfigError, MegaMoEError, ProtocolError

P = ParamSpec("P")
T = TypeVar("T")

GRACE_S = 15.0  # how long ranks may go on after the first has failed, so that each can say what it saw of it
TERMINATE_S = 3.0  # between SIGTERM and SIGKILL


class RankProcessError(MegaMoEError):
    """A rank's process died, ran out of time, was stopped, or raised what can't be carried to the launcher.

    Args:
        rank: the rank.
        exit_code: its process's exit code (negative: the signal), or None where it was still running.
    """

    def __init__(self, message: str, *, rank: int, exit_code: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.rank = rank
        self.exit_code = exit_code


@dataclass(frozen=True)
class RankContext:
    """What a rank is told by its launcher; first argument of the function it runs.

    Args:
        rank: this process, 0 to world_size - 1.
        world_size: processes.
        name: unique to this launch, letters and digits; a name for shared memory.
        directory: empty at first, seen by all ranks, removed with its contents at the end; a place to meet.
        pipe: to the launcher; use `report`.
    """

    rank: int
    world_size: int
    name: str
    directory: Path
    pipe: Connection

    def report(self, message: object) -> None:
        """Send `message` to the launcher's `on_report`, for progress bars and the like."""
        self.pipe.send_bytes(dumps(_Report(message)))

    @property
    def gpu(self) -> torch.device:
        """This rank's GPU: rank r has GPU r, unless `MEGAMOE_RANKS_PER_GPU` makes several ranks share one."""
        return torch.device("cuda", self.rank // env.ranks_per_gpu())

    def join_gpus(self, device: torch.device) -> None:
        """COLLECTIVE. Make `device` the current GPU, and all ranks torch's default process group, on CPU and GPUs.

        Raises:
            BackendUnavailableError: this machine has no such GPU.
        """
        num_gpus = torch.cuda.device_count()
        if device.index is not None and device.index >= num_gpus:
            raise BackendUnavailableError(f"no GPU for rank {self.rank}", got=f"{num_gpus} GPUs", expected=device)
        torch.cuda.set_device(device)
        alone = env.ranks_per_gpu() == 1
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if alone else "gloo",  # NCCL refuses two ranks on one GPU
            init_method=f"file://{self.directory / 'store'}",
            rank=self.rank,
            world_size=self.world_size,
            device_id=device if alone else None,
        )


@dataclass(frozen=True)
class _Report:
    message: object


@dataclass(frozen=True)
class RankOutcome(Generic[T]):
    """How one rank ended: with a value, or with an error and the traceback of its process."""

    rank: int
    value: T | None = None
    error: BaseException | None = None
    traceback: str = ""
    stopped: bool = False  # by the launcher, after another rank had failed or the time was up


def run_ranks(
    fn: Callable[Concatenate[RankContext, P], T],
    world_size: int,
    *args: Any,
    timeout_s: float,
    grace_s: float = GRACE_S,
    num_threads: int | None = None,
    on_report: Callable[[int, Any], None] | None = None,
) -> list[T]:
    """Run `fn(context, *args)` on `world_size` processes and return what each returned, in rank order.

    Args:
        fn: importable function.
        world_size: processes, 1 or more.
        args: passed to every rank; they must pickle. Tensors arrive on CPU, without gradients.
        timeout_s: seconds for all of it, the start of the processes included.
        grace_s: seconds that the other ranks get once one has failed.
        num_threads: torch threads of each rank; None shares the machine's cores out.
        on_report: called here with (rank, message) for each `RankContext.report`.

    Raises:
        the error of the rank that failed first, errors about a peer last, with the remote traceback as a note.
        RankProcessError: a rank died without an error of its own, left by `sys.exit`, or time ran out.
        ConfigError: `fn` or an argument does not pickle.
    """
    outcomes = spawn_ranks(
        fn,
        world_size,
        *args,
        timeout_s=timeout_s,
        grace_s=grace_s,
        num_threads=num_threads,
        on_report=on_report,
    )
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        raise _first_cause(failed)
    by_rank = sorted(outcomes, key=lambda outcome: outcome.rank)
    return [outcome.value for outcome in by_rank]  # type: ignore[misc]  # an outcome without error has a value


def _first_cause(failed: list[RankOutcome[T]]) -> BaseException:
    """The earliest error that is not about a peer's failure; `failed` is in order of time."""

    def distance(outcome: RankOutcome[T]) -> int:
        return 2 if outcome.stopped else isinstance(outcome.error, ProtocolError)

    outcome = min(failed, key=distance)
    assert outcome.error is not None
    if outcome.traceback:
        outcome.error.add_note(f"raised on rank {outcome.rank}:\n{outcome.traceback}")
    return outcome.error


def spawn_ranks(
    fn: Callable[Concatenate[RankContext, P], T],
    world_size: int,
    *args: Any,
    timeout_s: float,
    grace_s: float = GRACE_S,
    num_threads: int | None = None,
    on_report: Callable[[int, Any], None] | None = None,
) -> list[RankOutcome[T]]:
    """`run_ranks` that never raises for a rank: every rank's outcome, in the order in which they ended."""
    if world_size < 1:
        raise ConfigError("world_size is not a number of processes", got=world_size, expected="1 or more")
    if num_threads is None:
        num_threads = max(1, len(os.sched_getaffinity(0)) // world_size)
    try:
        call = dumps((fn, args))
    except Exception as error:
        raise ConfigError(
            "what the ranks are to run does not pickle",
            got=error,
            expected="a function of a module, and arguments that pickle",
        ) from error
    with tempfile.TemporaryDirectory(prefix="megamoe") as directory:
        launch: _Launch[T] = _Launch(world_size, Path(directory), call, num_threads, on_report)
        try:
            return launch.run(timeout_s, grace_s)
        finally:
            launch.stop()


class _Launch(Generic[T]):
    """The processes of one `spawn_ranks` and what is known of each."""

    def __init__(
        self,
        world_size: int,
        directory: Path,
        call: bytes,
        num_threads: int,
        on_report: Callable[[int, Any], None] | None,
    ) -> None:
        self.on_report = on_report
        self.outcomes: list[RankOutcome[T]] = []
        self.pipes: dict[Connection, int] = {}
        self.processes = []
        spawn = multiprocessing.get_context("spawn")
        name = directory.name.replace("_", "x")
        for rank in range(world_size):
            ours, theirs = spawn.Pipe(duplex=False)
            process = spawn.Process(
                target=_rank_main,
                args=(rank, world_size, name, directory, theirs, call, num_threads),
                name=f"megamoe-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()  # so that the death of the rank is the end of the file here
            self.pipes[ours] = rank
            self.processes.append(process)

    def run(self, timeout_s: float, grace_s: float) -> list[RankOutcome[T]]:
        """Listen to the ranks until each has ended or the time is up."""
        deadline, why = time.monotonic() + timeout_s, f"not finished after {timeout_s:g} s"
        while self.pipes:
            ready = wait(list(self.pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._give_up(why)
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                self._receive(pipe)
            first = next((outcome for outcome in self.outcomes if outcome.error is not None), None)
            if first is not None and time.monotonic() + grace_s < deadline:
                deadline = time.monotonic() + grace_s
                why = f"stopped {grace_s:g} s after rank {first.rank} had failed"
        return self.outcomes

    def _receive(self, pipe: Connection) -> None:
        rank = self.pipes[pipe]
        try:
            message = pickle.loads(pipe.recv_bytes())  # noqa: S301 - written by our own child, as multiprocessing does
        except (EOFError, OSError):
            message = RankOutcome(rank=rank, error=self._death(rank))
        except Exception as error:  # an object whose class does not unpickle
            message = RankOutcome(rank=rank, error=error)
        if isinstance(message, _Report):
            if self.on_report is not None:
                self.on_report(rank, message.message)
            return
        self.outcomes.append(message)
        del self.pipes[pipe]
        pipe.close()

    def _death(self, rank: int) -> RankProcessError:
        process = self.processes[rank]
        process.join(TERMINATE_S)
        code = process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code} and no result"
        hint = "out of memory is the usual cause of SIGKILL; the process's own output may say more"
        return RankProcessError(f"rank {rank}'s process {how}", rank=rank, exit_code=code, hint=hint)

    def _give_up(self, why: str) -> None:
        for rank in self.pipes.values():
            error = RankProcessError(
                f"rank {rank} was {why}",
                rank=rank,
                hint="raise timeout_s (`megamoe run --time-limit`) if it only is slow",
            )
            self.outcomes.append(RankOutcome(rank=rank, error=error, stopped=True))

    def stop(self) -> None:
        """End what still runs and reap it."""
        # Ranks that have delivered their outcome leave by themselves; the others are not waited for.
        for rank in self.pipes.values():
            self.processes[rank].terminate()
        deadline = time.monotonic() + TERMINATE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()


def _rank_main(
    rank: int, world_size: int, name: str, directory: Path, pipe: Connection, call: bytes, num_threads: int
) -> None:
    """Body of a rank's process: run the function and send one outcome."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        torch.set_num_threads(num_threads)
        fn, args = pickle.loads(call)  # noqa: S301 - pickled by our own parent
        context = RankContext(rank, world_size, name, directory, pipe)
        payload = dumps(RankOutcome(rank=rank, value=fn(context, *args)))
    except BaseException as error:
        payload = _portable(rank, error)
    pipe.send_bytes(payload)
    pipe.close()


def _portable(rank: int, error: BaseException) -> bytes:
    """The outcome of a rank that raised, in a form that certainly loads in the parent."""
    text = "".join(traceback.format_exception(error))
    error.__cause__ = error.__context__ = None
    try:
        if not isinstance(error, Exception):
            raise TypeError("SystemExit and the like end a rank; raised in the launcher, they would end it too")
        payload = dumps(RankOutcome(rank=rank, error=error, traceback=text))
        pickle.loads(payload)  # noqa: S301 - our own bytes; some exceptions pickle and do not unpickle
    except Exception:
        plain = RankProcessError(f"rank {rank} raised {type(error).__name__}: {error}", rank=rank)
        payload = pickle.dumps(RankOutcome(rank=rank, error=plain, traceback=text))
    return payload


def _leave_with_parent() -> None:
    """A rank never outlives its launcher, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def dumps(message: object) -> bytes:
    """Pickle with tensors by value and in host memory; `pickle.loads` reads it.

    `Connection.send` would move tensors through shared memory that the sender has to keep alive, and plain pickle takes
    whole storages and, in torch 2.13, no FP8.
    """
    buffer = io.BytesIO()
    _HostPickler(buffer).dump(message)
    return buffer.getvalue()


class _HostPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        host = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
        flat = host.as_strided((host.numel(),), (1,))  # contiguous, but a dimension of one element may have any stride
        return _tensor, (flat.view(torch.uint8).numpy().tobytes(), obj.dtype, tuple(obj.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)

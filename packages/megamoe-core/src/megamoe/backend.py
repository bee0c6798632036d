"""What a backend is: `Backend` decides and plans, `Plan` is the decision, `Session` runs it.

A backend package registers its `Backend` subclass in the entry-point group `megamoe.backends`. docs/adding-a-backend.md
walks through it; `megamoe.testing.conformance` is what it has to pass.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megamoe.errors import ConfigError, SessionError, UnsupportedProblemError
from megamoe.formats import Quantized
from megamoe.problem import ActFormat, Activation, MoEProblem, QuantMode, Transport, require_problem
from megamoe.schedule.device_spec import DeviceSpec
from megamoe.schedule.workspace import WorkspaceLayout
from megamoe.tensors import ExpertWeights, PreparedWeights, check_weights, make_weights

API_VERSION = 1  # raised when a backend written for the last one would no longer work; the registry compares it

logger = logging.getLogger("megamoe")

HiddenStates: TypeAlias = Tensor | tuple[Tensor, Tensor] | Quantized


class Reason(StrEnum):
    """Why a backend is or isn't usable: a closed list, so that programs can act on it. Details are free text."""

    OK = "ok"
    # probe(): the machine
    NOT_INSTALLED = "not_installed"
    IMPORT_FAILED = "import_failed"
    API_VERSION = "api_version"
    BROKEN = "broken"  # its own code raised, or it is no backend
    MISSING_LIBRARY = "missing_library"
    NO_DEVICE = "no_device"
    WRONG_DEVICE = "wrong_device"
    DRIVER_TOO_OLD = "driver_too_old"
    # supports(): the problem
    QUANT = "quant"
    ACT_FORMAT = "act_format"
    TRANSPORT = "transport"
    ACTIVATION = "activation"
    BIAS = "bias"
    TOP_K = "top_k"
    EP_SIZE = "ep_size"
    NUM_EXPERTS = "num_experts"
    SHAPE = "shape"
    CAPACITY = "capacity"
    # selection
    NOT_ASKED_FOR = "not_asked_for"
    REFERENCE_NOT_AUTOMATIC = "reference_not_automatic"


class Verdict(NamedTuple):
    """An answer with its reason."""

    ok: bool
    reason: Reason
    detail: str

    @classmethod
    def yes(cls, detail: str = "") -> Verdict:
        """A positive verdict; `detail` says what was found."""
        return cls(True, Reason.OK, detail)

    @classmethod
    def no(cls, reason: Reason, detail: str) -> Verdict:
        """A negative verdict; `detail` says what to do."""
        return cls(False, reason, detail)


class Capability(StrEnum):
    """What a backend can claim. tests/capabilities.toml lists what each must, so that none is lost unnoticed."""

    QUANT_BF16 = "quant:bf16"
    QUANT_A8W8 = "quant:a8w8"
    QUANT_A8W4 = "quant:a8w4"
    QUANT_A8W4_FP8_1X128 = "quant:a8w4:fp8_1x128"
    QUANT_A4W4 = "quant:a4w4"
    TRANSPORT_BF16 = "transport:bf16"
    TRANSPORT_FP8_BLOCKWISE_1X32 = "transport:fp8_blockwise_1x32"
    ACTIVATION_SWIGLU = "activation:swiglu"
    ACTIVATION_SWIGLU_OAI = "activation:swiglu_oai"
    EXPERT_BIAS = "expert_bias"
    INPUT_BF16 = "input:bf16"
    INPUT_QUANTIZED = "input:quantized"
    NUM_TOKENS = "num_tokens"  # rows past a scalar, on the device for a GPU backend, are padding
    RECEIVE_COUNTS = "receive_counts"  # Session.receive_counts()
    VIRTUAL_RANKS = "virtual_ranks"  # one session drives the whole group
    BATCH_INVARIANT = "batch_invariant"  # a row's bits don't depend on the rest of the batch
    GRAPH_CAPTURE = "graph_capture"
    STAGE_TAPS = "stage_taps"  # forward can hand out what stands between the stages, for tests


_QUANT_CAPABILITY = {
    (QuantMode.BF16, None): Capability.QUANT_BF16,
    (QuantMode.A8W8, None): Capability.QUANT_A8W8,
    (QuantMode.A8W4, None): Capability.QUANT_A8W4,
    (QuantMode.A8W4, ActFormat.MXFP8): Capability.QUANT_A8W4,
    (QuantMode.A8W4, ActFormat.FP8_1X128): Capability.QUANT_A8W4_FP8_1X128,
    (QuantMode.A4W4, None): Capability.QUANT_A4W4,
}
_OTHER_ACT_FORMAT = {
    Capability.QUANT_A8W4: ActFormat.FP8_1X128,
    Capability.QUANT_A8W4_FP8_1X128: ActFormat.MXFP8,
}
_TRANSPORT_CAPABILITY = {
    Transport.BF16: Capability.TRANSPORT_BF16,
    Transport.FP8_BLOCKWISE_1X32: Capability.TRANSPORT_FP8_BLOCKWISE_1X32,
}
_ACTIVATION_CAPABILITY = {
    Activation.SWIGLU: Capability.ACTIVATION_SWIGLU,
    Activation.SWIGLU_OAI: Capability.ACTIVATION_SWIGLU_OAI,
}


def missing_capability(problem: MoEProblem, claimed: frozenset[Capability]) -> Verdict:
    """Whether `claimed` covers the formats that `problem` names; the first that is missing is the reason."""
    act_format = None if problem.act_format is None else ActFormat(problem.act_format)
    needed = [
        (
            Reason.QUANT if problem.act_format is None else Reason.ACT_FORMAT,
            _QUANT_CAPABILITY[QuantMode(problem.quant), act_format],
        ),
        (Reason.TRANSPORT, _TRANSPORT_CAPABILITY[Transport(problem.transport)]),
        (Reason.ACTIVATION, _ACTIVATION_CAPABILITY[Activation(problem.activation)]),
    ]
    if problem.expert_bias:
        needed.append((Reason.BIAS, Capability.EXPERT_BIAS))
    for reason, capability in needed:
        if capability not in claimed:
            return Verdict.no(reason, f"does not offer {capability}{_try_instead(capability, claimed)}")
    return Verdict.yes()


def _try_instead(missing: Capability, claimed: frozenset[Capability]) -> str:
    """The format of activations with which the same weights are taken, if there is one."""
    other = _OTHER_ACT_FORMAT.get(missing)
    return f"; try act_format={other}" if other and _QUANT_CAPABILITY[QuantMode.A8W4, other] in claimed else ""


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """A named choice of tiles and pipeline depths. Backends derive theirs from it; all fields hashable."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All decisions about a problem, made before anything is allocated. Frozen, hashable, printable.

    It is the key of compiled kernels and of workspaces, and it alone decides the wire protocol: every rank of a group
    must open an equal plan.
    """

    backend: str
    problem: MoEProblem
    device: DeviceSpec
    config: KernelConfig
    workspace: WorkspaceLayout

    @property
    def bytes(self) -> int:
        """Bytes of workspace that a session allocates on each rank."""
        return self.workspace.num_bytes

    def __str__(self) -> str:
        lines = [f"plan of backend {self.backend}, configuration {self.config.name}, for {self.device.name}"]
        lines += [f"  {name} = {value}" for name, value in vars(self.problem).items()]
        lines += [f"  workspace: {self.bytes} bytes per rank"]
        return "\n".join(lines)


class Backend(ABC):
    """A way to run MoE layers on one kind of hardware. Stateless; made without arguments by the registry."""

    name: ClassVar[str]
    api_version: ClassVar[int] = API_VERSION

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def probe(self) -> Verdict:
        """Whether this machine can run the backend. Cheap: no context is made, nothing is compiled."""

    @abstractmethod
    def capabilities(self) -> frozenset[Capability]:
        """What the backend claims, whatever the machine. Every claim is tested by the conformance matrix."""

    def supports(self, problem: MoEProblem) -> Verdict:
        """Whether the backend can run `problem`, with the first reason against it. Pure: needs no hardware.

        Raises:
            ConfigError: it is no `MoEProblem`.
        """
        require_problem(problem)
        verdict = missing_capability(problem, self.capabilities())
        return verdict if not verdict.ok else self.check_limits(problem)

    @abstractmethod
    def check_limits(self, problem: MoEProblem) -> Verdict:
        """Limits of size that no capability names: alignments, counts, capacities. Pure."""

    def configs(self, problem: MoEProblem) -> tuple[str, ...]:
        """Names of the configurations that `plan(problem, config=...)` accepts, the default first."""
        return (self.plan(problem).config.name,)

    def require(self, problem: MoEProblem, device: object = None) -> None:
        """What `plan` asks first: raise UnsupportedProblemError with the reason where `supports` says no.

        Raises:
            ConfigError: `device` is neither a `DeviceSpec` nor None.
        """
        if device is not None and not isinstance(device, DeviceSpec):
            raise ConfigError(
                "this is no device to plan for",
                got=repr(device),
                expected="a DeviceSpec such as megamoe.H200, or None",
                hint="a plan needs no GPU; backend.open takes the current one",
            )
        verdict = self.supports(problem)
        if not verdict.ok:
            raise UnsupportedProblemError(
                f"backend {self.name} does not support this problem ({verdict.reason}): {verdict.detail}"
            )

    @abstractmethod
    def plan(self, problem: MoEProblem, device: DeviceSpec | None = None, *, config: str | None = None) -> Plan:
        """Decide everything about `problem`. Pure: no GPU, no collective, the same on every rank.

        Args:
            problem: what to compute.
            device: the device to plan for; None is the backend's own default device.
            config: name of a configuration to pin, for A/B runs; None lets the backend choose.

        Raises:
            UnsupportedProblemError: the problem is outside `supports()`.
            ConfigError: no configuration of that name fits, `problem` is no `MoEProblem`, or `device` no `DeviceSpec`.
        """

    @abstractmethod
    def open(
        self, plan: Plan, group: Any = None, *, timeout_s: float | None = None, workspace: Tensor | None = None
    ) -> Session:
        """COLLECTIVE. Allocate the workspace and load what `plan` needs, on every rank of `group`.

        Args:
            plan: equal on every rank.
            group: what joins the ranks: a `torch.distributed.ProcessGroup`, a `megamoe.symm.Group`, `VirtualRanks()`
                for a session that drives all ranks itself, or None for `ep_size` 1.
            timeout_s: how long a wait for a peer may take; None reads MEGAMOE_TIMEOUT_S (default 300).
            workspace: contiguous uint8 of at least `plan.bytes` to use instead of allocating, if the backend can.

        Raises:
            WorkspaceError: out of memory; raised on every rank, none hangs. Or a `workspace` that can't be used.
            ConfigError: `group` does not have `plan.problem.ep_size` ranks, or plans differ between ranks.
        """


@dataclass(frozen=True)
class VirtualRanks:
    """Group argument of `Backend.open`: one session drives all ranks; `forward` takes lists, one entry a rank."""


@dataclass(frozen=True, kw_only=True)
class StageTaps:
    """What stood between the stages of one rank in the last call, for tests. Rows are pool rows, experts in order.

    Args:
        src_rank: `[rows]` int32, home rank of the row.
        src_pick: `[rows]` int32, token * top_k + slot on that rank.
        local_expert: `[rows]` int32.
        gate_up: `[rows, 2I]` FP32 GEMM1 accumulators with biases, packed order; None where the backend can't show it.
        a2: the requantised activation.
        contribution: `[rows, H]` FP32 weighted GEMM2 rows before the transport; None where the backend can't show it.
    """

    src_rank: Tensor
    src_pick: Tensor
    local_expert: Tensor
    a2: Quantized
    gate_up: Tensor | None = None
    contribution: Tensor | None = None


@dataclass(kw_only=True)
class SessionStats:
    """Counters of one rank since the session was opened."""

    calls: int = 0
    dropped_ids: int = 0  # ids outside [-1, num_experts), skipped
    timeouts: int = 0
    stage_seconds: dict[str, float] = field(default_factory=dict)  # only where the backend measures them
    stage_rows: dict[str, int] = field(default_factory=dict)
    stage_bytes: dict[str, int] = field(default_factory=dict)


class Session(ABC):
    """The workspace and kernels of one plan on one rank (or on all, with virtual ranks).

    Weights are arguments of a call, not state: one session serves all layers of a model. Use it as a context manager.
    """

    weight_layout: ClassVar[str]  # tag of PreparedWeights that forward reads

    def __init__(self, plan: Plan, ep_rank: int | None) -> None:
        """Subclasses call this first.

        Args:
            plan: what to run.
            ep_rank: this process's rank, or None where the session drives all ranks.
        """
        self.plan = plan
        self.ep_rank = ep_rank
        self.closed = False
        self.once_closed = (
            "open a new one with backend.open(plan, group)"  # the hint then; a session's owner has its own
        )
        self._inherited = False
        self._calling = threading.Lock()
        _sessions.add(self)
        what = (plan.backend, plan.config.name, plan.device.name, plan.bytes, plan.problem)
        logger.info("MegaMoE opens backend %s, configuration %s, for %s, %d bytes a rank: %s", *what)

    def __repr__(self) -> str:
        driven = "all ranks" if self.ep_rank is None else f"rank {self.ep_rank}"
        config, closed = self.plan.config.name, ", closed" if self.closed else ""
        return f"<{type(self).__name__} of {driven}, EP{self.plan.problem.ep_size}, configuration {config}{closed}>"

    # -- weights ------------------------------------------------------------------------------------------------

    def prepare_weights(
        self,
        w13: Tensor | tuple[Tensor, Tensor],
        w2: Tensor | tuple[Tensor, Tensor],
        *,
        layout: str,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
    ) -> PreparedWeights:
        """Bring one rank's experts into the kernels' layout, once, when the model is loaded.

        Backends on GPUs copy them; the reference reads the caller's tensors, which must then stay as they are.

        Args:
            w13: `[E_local, 2I, H]` BF16, or (payload, scale) in the mode's weight format; see `megamoe.tensors`.
            w2: `[E_local, H, I]`, likewise.
            layout: "packed" (gate rows first) or "interleaved" (gate0, up0, ...); required, since a mix-up is silent.
            w13_bias: `[E_local, 2I]` FP32 in the same order, where the problem has biases.
            w2_bias: `[E_local, H]` FP32.

        Raises:
            InputError: a shape, dtype or type other than the mode's.
            LayoutError: an unknown layout.
        """
        return self.prepare(make_weights(self.plan.problem, w13, w2, layout=layout, w13_bias=w13_bias, w2_bias=w2_bias))

    def prepare(self, weights: ExpertWeights) -> PreparedWeights:
        """`prepare_weights` for weights that already are one of the types of `megamoe.tensors`."""
        self.require_open()
        check_weights(weights, self.plan.problem)
        with torch.inference_mode(False), torch.no_grad():  # so that experts can be moved in place in any mode
            return self._prepare(weights)

    @abstractmethod
    def _prepare(self, weights: ExpertWeights) -> PreparedWeights:
        """Lay out checked weights."""

    # -- calls --------------------------------------------------------------------------------------------------

    def forward(
        self,
        hidden_states: HiddenStates | Sequence[HiddenStates],
        topk_ids: Tensor | Sequence[Tensor],
        topk_weights: Tensor | Sequence[Tensor],
        weights: PreparedWeights | Sequence[PreparedWeights],
        *,
        out: Tensor | Sequence[Tensor] | None = None,
        num_tokens: int | Tensor | Sequence[int | Tensor] | None = None,
    ) -> Any:
        """COLLECTIVE, stream-ordered. Run the layer: `y[t] = sum over k of topk_weights[t, k] * Expert_id(x[t])`.

        Every rank calls every forward, with zero tokens too. With virtual ranks each argument is a list, one entry a
        rank, and so is the result.

        In a session with peers, whatever this raises, a bad argument of this rank alone included, every rank calls
        `reset()` before its next call: peers end with an error of their own, at once on a CPU, after the time-out on
        GPUs, and until its reset a rank raises SessionError. Two need none: CaptureError, which sends nothing, and bad
        arguments where there are no peers (`ep_size` 1, virtual ranks). Ctrl-C in the middle of it counts as an error.

        Threads take turns: while one is in here, SessionError in another.

        Args:
            hidden_states: `[T, H]` BF16, or (payload, scales) in the mode's activation format. 0 <= T <= capacity.
            topk_ids: `[T, K]` int32 or int64, global physical expert ids; -1 means no expert. An expert may stand in a
                row several times: its contributions add up.
            topk_weights: `[T, K]` FP32, any sign.
            weights: made by this session's `prepare_weights`.
            out: `[T, H]` BF16 to write into, contiguous; on a GPU aligned to 16 bytes. It may lie over BF16
                `hidden_states`, any rank's with virtual ranks, but share memory with no other argument and no other
                `out`. None allocates.
            num_tokens: rows past this number are padding: they send nothing, and their output rows are zero. An int, or
                an int32 scalar tensor on the device that may change between replays of a graph.

        Returns:
            `[T, H]` BF16.

        Raises:
            CapacityError: T above the capacity; before anything is sent.
            InputError: a wrong shape, dtype, device or alignment; grad mode is on and an argument requires grad, for
                there is no backward; in debug mode also an id outside [-1, num_experts).
            LayoutError: weights prepared for something else.
            MegaMoETimeoutError, RankFailedError: a peer did not arrive, or failed.
            SessionError: closed, waits for a reset, or another thread is in a call.
        """
        arguments = (hidden_states, topk_ids, topk_weights, weights, out, num_tokens)
        if not self._calling.acquire(False):
            error = SessionError(
                "another thread is in a call of this session", hint="call in turn, or open a session for each thread"
            )
            self._leave_out(error)
            raise error
        try:
            return self._forward(arguments)
        finally:
            self._calling.release()

    @abstractmethod
    def _forward(self, arguments: Sequence[Any]) -> Any:
        """`forward` of the arguments that `call_checks.ARGUMENTS` names, in one thread at a time."""

    def _leave_out(self, error: BaseException) -> None:  # noqa: B027  # nobody is left out where there are no peers
        """`error` keeps this rank from making a call: with peers, refuse later ones until a reset."""

    @abstractmethod
    def warmup(self) -> float:
        """COLLECTIVE. Compile and load all that forward can need; returns the seconds it took."""

    @abstractmethod
    def check(self) -> None:
        """Raise what the last call left behind: a timeout or a failed peer. Synchronises."""

    @abstractmethod
    def reset(self) -> None:
        """COLLECTIVE. Make the session usable again after a failed call."""

    @abstractmethod
    def receive_counts(self) -> Any:
        """`[E_local]` int32 rows that each local expert received in the last call; a list with virtual ranks."""

    @abstractmethod
    def stats(self) -> Any:
        """`SessionStats` of this rank; a list with virtual ranks."""

    def keep_taps(self) -> None:
        """COLLECTIVE. From the next call on, keep what stands between the stages, for tests; costs memory and time.

        Raises:
            SessionError: the backend does not claim `Capability.STAGE_TAPS`.
        """
        raise SessionError(f"backend {self.plan.backend} has no stage taps", hint="ask Capability.STAGE_TAPS first")

    def taps(self) -> Any:
        """`StageTaps` of the last call, None for a rank that received no rows; a list with virtual ranks.

        Raises:
            SessionError: the backend does not claim `Capability.STAGE_TAPS`, or they were not kept.
        """
        raise SessionError(f"backend {self.plan.backend} has no stage taps", hint="ask Capability.STAGE_TAPS first")

    @abstractmethod
    def close(self) -> None:
        """COLLECTIVE. Free everything; calling it again does nothing."""

    def __enter__(self) -> Session:
        self.require_open()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse copies and pickles: a second object would give back the same memory."""
        raise SessionError("a session can't be copied or pickled", hint="open one with backend.open(plan, group)")

    def __exit__(self, *exc: object) -> None:
        self.close()

    def require_open(self) -> None:
        """Raise SessionError once closed, and in a process that inherited the session through a fork."""
        if self._inherited:
            raise SessionError(
                "this session belongs to the process that forked this one", hint="open one after the fork"
            )
        if self.closed:
            raise SessionError("this session is closed", hint=self.once_closed)


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _disown() -> None:
    """In the child of a fork: its parent's sessions count as closed, and nothing of theirs is given back."""
    for session in _sessions:
        session._inherited = session._inherited or not session.closed
        session.closed = True


os.register_at_fork(after_in_child=_disown)

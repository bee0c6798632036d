"""What adapters to serving engines share: one MoE layer of FP8-block experts, opened and ready to be called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from megamoe import ops
from megamoe.backend import Session
from megamoe.errors import ConfigError, LayoutError
from megamoe.integrations.sessions import SessionPool
from megamoe.meter import LayerCounter
from megamoe.problem import MoEProblem, Transport, member, require_positive
from megamoe.registry import require_name
from megamoe.tensors import Fp8BlockWeights, PreparedWeights


class Unsupported(StrEnum):
    """What to do with a layer that no usable backend can run."""

    ERROR = "error"  # raise, with the reason against each backend
    ENGINE = "engine"  # the engine's own path, and one warning in the log


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine's MoE layers are run.

    Args:
        backend: "auto", or the name of a backend. "auto" is the reference for a model on the CPU, and a GPU backend for
            a model on a GPU; the CPU never computes for a GPU.
        unsupported: what to do with a layer that no usable backend can run.
        transport: how rows travel home.
        num_max_tokens_per_rank: capacity of a session; None takes what the engine says its largest batch is.
        metrics: count rows per expert, for each layer; see `megamoe.meter`.

    Raises:
        ConfigError: an option that no layer could be run with.
    """

    backend: str = "auto"
    unsupported: Unsupported | str = Unsupported.ERROR
    transport: Transport | str = Transport.BF16
    num_max_tokens_per_rank: int | None = None
    metrics: bool = False

    def __post_init__(self) -> None:
        require_name(self.backend, known=True)
        if self.num_max_tokens_per_rank is not None:
            require_positive("num_max_tokens_per_rank", self.num_max_tokens_per_rank)
        if not isinstance(self.metrics, bool):
            raise ConfigError("metrics is not a bool", got=repr(self.metrics), expected="True or False")
        object.__setattr__(self, "unsupported", member("unsupported", Unsupported, self.unsupported))
        object.__setattr__(self, "transport", member("transport", Transport, self.transport))


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineLayer:
    """One MoE layer of an engine: an open session, and the layer's weights as that session reads them.

    Args:
        session: runs it, and every other layer that is alike.
        weights: made by that session.
        handle: what stands for the session in `torch.ops.megamoe.forward`.
        counter: counts this layer's calls, where metrics were asked for.
    """

    session: Session
    weights: PreparedWeights
    handle: int
    counter: LayerCounter | None = None

    @classmethod
    def open(
        cls,
        pool: SessionPool,
        problem: MoEProblem,
        experts: Fp8BlockWeights,
        *,
        backend: str,
        device: torch.device,
        group: Any = None,
        counted_as: str | None = None,
    ) -> EngineLayer:
        """COLLECTIVE for the first layer of a problem on several ranks: its session is opened and warmed up then.

        Args:
            pool: the adapter's sessions.
            problem: equal on every rank.
            experts: this rank's, as the checkpoint has them.
            backend: "auto" or a name.
            device: where the experts are.
            group: process group of torch.distributed, or None for `ep_size` 1.
            counted_as: the layer's name among the pool's metrics; None counts nothing.

        Raises:
            BackendError: no backend can be used; see `megamoe.integrations.sessions.backend_for`.
        """
        # Not as inference tensors, so that experts can be moved in place in any mode.
        with torch.inference_mode(False), torch.no_grad():
            session = pool.get(problem, backend=backend, device=device, group=group)
            weights = session.prepare(experts)
            counter = None if counted_as is None else pool.counter(session, counted_as)
        return cls(session=session, weights=weights, handle=ops.register(session, counter), counter=counter)

    @property
    def capacity(self) -> int:
        """Tokens that a call takes on each rank."""
        return self.session.plan.problem.num_max_tokens_per_rank

    def expert_tensors(self) -> dict[str, Tensor]:
        """What the operation reads, `[E_local, ...]`, under the names of `Fp8BlockWeights`."""
        return {_plain(name): tensor for name, tensor in self.weights.tensors.items()}

    def reading(self, tensors: Mapping[str, Tensor]) -> EngineLayer:
        """The same layer with `tensors` in the place of `expert_tensors()`: the engine's parameters.

        Args:
            tensors: each holds what the tensor of that name held. A parameter whose data is exchanged later is
                followed; moving experts in place is seen by the next call.

        Raises:
            LayoutError: other names, shapes or dtypes.
        """
        own = self.expert_tensors()
        facts = {name: (tuple(tensor.shape), tensor.dtype, tensor.device) for name, tensor in own.items()}
        given = {name: (tuple(tensor.shape), tensor.dtype, tensor.device) for name, tensor in tensors.items()}
        strided = [name for name, tensor in tensors.items() if not tensor.is_contiguous()]
        if given != facts or strided:
            raise LayoutError("these tensors are not the layer's", got=given, expected=f"{facts}, contiguous")
        bound = {name: tensors[_plain(name)] for name in self.weights.tensors}
        return replace(self, weights=replace(self.weights, tensors=bound))

    def __call__(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_tokens: Tensor | None = None
    ) -> Tensor:
        """COLLECTIVE, stream-ordered. `[T, H]` BF16, ids and weights `[T, K]` -> `[T, H]` BF16; see `Session.forward`.

        Under torch.compile it is one operator. Else that is passed by: it costs the host some 33 us.
        """
        topk_weights = topk_weights.float()
        if torch.compiler.is_compiling():
            tag, tensors = ops.flatten_weights(self.weights)
            return torch.ops.megamoe.forward(  # type: ignore[no-any-return]
                self.handle, hidden_states, None, topk_ids, topk_weights, tag, tensors, num_tokens
            )
        y: Tensor = self.session.forward(hidden_states, topk_ids, topk_weights, self.weights, num_tokens=num_tokens)
        if self.counter is not None:
            self.counter()
        return y


def _plain(name: str) -> str:
    """A prepared tensor's name without what a backend adds to say in which order its rows are."""
    return name.partition(".")[0]

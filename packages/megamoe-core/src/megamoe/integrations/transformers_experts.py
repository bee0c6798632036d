"""The forward of experts modules and the expert-parallel implementation that `transformers.register` enters.

Imports transformers: go through `megamoe.integrations.transformers`, which checks its version first.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers.distributed.expert_parallel import AutoEP, EPImplementation, EPImplementationInterface
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from megamoe import ops
from megamoe.backend import Session
from megamoe.checkpoint.convert import STORED_AS
from megamoe.errors import BackendError, CaptureError, ConfigError, SessionError
from megamoe.integrations.sessions import SessionPool
from megamoe.integrations.transformers import ExpertsOptions, Unsupported
from megamoe.integrations.transformers_weights import StoredExperts, experts_device, in_format_of, read_experts
from megamoe.meter import LayerCounter, Metrics
from megamoe.problem import MoEProblem, QuantMode
from megamoe.tensors import PreparedWeights

logger = logging.getLogger("megamoe")

_LAYER = "_megamoe_layer"  # attribute of a module: where torch.compile can follow it


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """One experts module, ready to be called.

    Args:
        adapter: whose session it is.
        made_from: `_fingerprint` of the module when it was prepared.
        session: runs it.
        weights: made by that session.
        capacity: tokens of a call.
        as_operands: session, weights' tag and tensors as `torch.ops.megamoe.forward` takes them.
        counter: counts this layer's calls, where metrics were asked for.
    """

    adapter: Adapter
    made_from: tuple[object, ...]
    session: Session
    weights: PreparedWeights
    capacity: int
    as_operands: tuple[int, str, list[Tensor]]
    counter: LayerCounter | None

    def __call__(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_calls: int = 1) -> Tensor:
        """COLLECTIVE. `[T, H]` in, `[T, H]` out in the same dtype, in `num_calls` calls of at most `capacity` rows."""
        x, weights = hidden_states.to(torch.bfloat16), topk_weights.float()
        if num_calls == 1:
            return self._forward(x, topk_ids, weights).to(hidden_states.dtype)
        bounds = [slice(call * self.capacity, (call + 1) * self.capacity) for call in range(num_calls)]
        return torch.cat([self._forward(x[rows], topk_ids[rows], weights[rows]) for rows in bounds]).to(
            hidden_states.dtype
        )

    def _forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        # The operator is what torch.compile can trace, and what says that there is no backward. It costs the host some
        # 33 us (2026-11, beside an H200), so it is passed by where neither matters.
        if torch.compiler.is_compiling() or (
            torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad)
        ):
            handle, tag, tensors = self.as_operands
            return torch.ops.megamoe.forward(  # type: ignore[no-any-return]
                handle, x, None, topk_ids, topk_weights, tag, tensors, None
            )
        y: Tensor = self.session.forward(x, topk_ids, topk_weights, self.weights)
        if self.counter is not None:
            self.counter()
        return y

    def __reduce__(self) -> tuple[object, ...]:
        """Copied and pickled as None: a copy of the module has weights of its own, to be prepared anew."""
        return type(None), ()


class Adapter:
    """One registered name: its options, its sessions, and the forward of the modules that run under it."""

    def __init__(self, name: str, options: ExpertsOptions) -> None:
        """Use `megamoe.integrations.transformers.register`."""
        self.name = name
        self.options = options
        self._pool = SessionPool(once_closed="register() it again")
        self._refused: set[str] = set()
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._pool.closed

    def problems(self) -> tuple[MoEProblem, ...]:
        """What the open sessions run, one for all layers that are alike."""
        return self._pool.problems()

    def metrics(self) -> list[Metrics]:
        """What each session's calls did on this rank since this was asked last, where the option `metrics` is set.

        Layers are named by their class and the order in which they were prepared, as "MixtralExperts.0". Synchronises.
        """
        return self._pool.metrics()

    def close(self) -> None:
        """COLLECTIVE where experts are spread over ranks. Close the sessions; models that name it can't run then."""
        self._pool.close()

    def forward(self, experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """What transformers calls for a module: `[T, H]`, ids and weights `[T, K]` -> `[T, H]`.

        Under an expert-parallel implementation of transformers' own the module holds a share of the experts, and ids
        are its own, with `num_experts` for those of other ranks.

        Raises:
            BackendError: the experts can't be run, and the option `unsupported` is "error".
            SessionError: the adapter is closed.
        """
        layer = self.layer(experts, top_k_index.shape[-1])
        if layer is None:
            return own_forward(experts)(experts, hidden_states, top_k_index, top_k_weights)
        if experts._is_expert_parallel:
            foreign: int = experts.num_experts  # type: ignore[assignment]
            top_k_index = top_k_index.masked_fill(top_k_index == foreign, -1)
        return layer(hidden_states, top_k_index, top_k_weights, max(1, -(-hidden_states.shape[0] // layer.capacity)))

    def layer(self, experts: nn.Module, top_k: int, group: Any = None) -> Layer | None:
        """COLLECTIVE when a group's first layer is prepared. The module, prepared; None if it runs its own forward.

        It is prepared again when its parameters are not the ones it was prepared from. Under torch.compile that is not
        looked at: what is traced is the layer as it is.
        """
        layer: Layer | None = experts.__dict__.get(_LAYER)
        if (
            layer is None
            or layer.adapter is not self
            or not (torch.compiler.is_compiling() or layer.made_from == _fingerprint(experts, top_k, group))
        ):
            layer = self._prepare(experts, top_k, group)
        return layer

    @torch.compiler.disable(  # type: ignore[no-untyped-call]
        reason="run the model once before torch.compile: its experts are prepared then"
    )
    def _prepare(self, experts: nn.Module, top_k: int, group: Any) -> Layer | None:
        if self.closed:
            raise SessionError(f'the adapter "{self.name}" is closed', hint="register() it again")
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"{type(experts).__name__} is not prepared, and can't be while a graph is captured",
                hint="run the model once before the capture",
            )
        if not any(parameter.numel() for parameter in experts.parameters(recurse=False)):
            raise ConfigError(
                f"the parameters of {type(experts).__name__} were dropped when it was prepared",
                hint="load the model again, or register with keep_parameters=True",
            )
        with torch.inference_mode(False), torch.no_grad():  # so that experts can be moved in place in any mode
            return self._prepare_now(experts, top_k, group)

    def _prepare_now(self, experts: nn.Module, top_k: int, group: Any) -> Layer | None:
        try:
            stored = read_experts(experts)
            problem = self._problem(stored, top_k, 1 if group is None else group.size())
            session = self._pool.get(problem, backend=self.options.backend, device=experts_device(experts), group=group)
        except BackendError as error:
            if self.options.unsupported is Unsupported.ERROR:
                raise
            self._say_once(experts, error)
            return None
        return self._enter(experts, stored, session, top_k, group)

    def _problem(self, stored: StoredExperts, top_k: int, ep_size: int) -> MoEProblem:
        options = self.options
        return MoEProblem(
            hidden_size=stored.hidden_size,
            intermediate_size=stored.intermediate_size,
            num_experts=stored.num_experts * ep_size,
            top_k=top_k,
            num_max_tokens_per_rank=options.num_max_tokens_per_rank,
            ep_size=ep_size,
            quant=options.quant or STORED_AS[type(stored.weights)],
            transport=options.transport,
            activation=stored.activation,
            swiglu_limit=stored.swiglu_limit,
            expert_bias=stored.weights.w13_bias is not None,
            act_format=options.act_format,
        )

    def _enter(self, experts: nn.Module, stored: StoredExperts, session: Session, top_k: int, group: Any) -> Layer:
        """Prepare the weights and leave the layer at its module."""
        problem = session.plan.problem
        prepared = session.prepare(in_format_of(stored.weights, QuantMode(problem.quant)))
        if not self.options.keep_parameters:
            _drop_parameters(experts)
        counter = self._counter(experts, session)
        layer = Layer(
            adapter=self,
            made_from=_fingerprint(experts, top_k, group),
            session=session,
            weights=prepared,
            capacity=problem.num_max_tokens_per_rank,
            as_operands=(ops.register(session, counter), *ops.flatten_weights(prepared)),
            counter=counter,
        )
        experts.__dict__[_LAYER] = layer
        return layer

    def _counter(self, experts: nn.Module, session: Session) -> LayerCounter | None:
        """Of the module, under the same name when it is prepared again."""
        if not self.options.metrics:
            return None
        name = self._names.setdefault(experts, f"{type(experts).__name__}.{len(self._names)}")
        return self._pool.counter(session, name)

    def _say_once(self, experts: nn.Module, error: BackendError) -> None:
        name = type(experts).__name__
        if name not in self._refused:
            self._refused.add(name)
            logger.warning("%s runs its own forward, not MegaMoE's: %s", name, error)


class MegaMoEExpertParallel(EPImplementation):  # type: ignore[misc]
    """Tokens go to their experts' ranks and come back inside one call, from the batch that each rank holds.

    Ranks of a tensor-parallel group hold the same batch: each brings its share of the rows, so that none is computed
    twice, and the results are gathered.
    """

    def __init__(self, adapter: Adapter, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._adapter = adapter
        self._experts = experts
        self._own = AutoEP(experts, ep_mesh, tp_mesh)  # for experts that no usable backend can run

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """COLLECTIVE. `[T, H]`, global ids and weights `[T, K]` -> `[T, H]`.

        Raises:
            CapacityError: more tokens than the capacity, on ranks that don't share their batch: only they know how many
                calls they would need.
        """
        layer = self._adapter.layer(self._experts, top_k_index.shape[-1], self.ep_mesh.get_group())
        if layer is None:
            return self._own(hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        num_tokens, num_shares = hidden_states.shape[0], self.tp_mesh.size()
        rows_per_rank = -(-num_tokens // num_shares)
        num_calls = max(1, -(-rows_per_rank // layer.capacity)) if self.shares_batch else 1
        if num_shares == 1:
            return layer(hidden_states, top_k_index, top_k_weights, num_calls)
        first = self.tp_mesh.get_local_rank() * rows_per_rank
        rows = slice(first, first + rows_per_rank)
        share = layer(hidden_states[rows], top_k_index[rows], top_k_weights[rows], num_calls)
        whole = torch.Size((num_tokens, hidden_states.shape[1]))
        gathered = DTensor.from_local(share, self.tp_mesh, [Shard(0)], shape=whole, stride=(whole[1], 1))
        return gathered.full_tensor()


def own_forward(experts: nn.Module) -> Callable[..., Tensor]:
    """The forward that the class was written with, under all decorators."""
    own: Callable[..., Tensor] = inspect.unwrap(type(experts).forward)
    return own


def _fingerprint(experts: nn.Module, top_k: int, group: Any) -> tuple[object, ...]:
    """What a prepared layer was made from: which memory, and how often it was written to.

    Writes through `parameter.data`, and to parameters made in inference mode, are not counted.
    """
    parameters = [parameter for parameter in experts._parameters.values() if parameter is not None]
    return (
        top_k,
        None if group is None else group.group_name,
        *((p.data_ptr(), p.device, p.dtype, 0 if p.is_inference() else p._version) for p in parameters),
    )


def _drop_parameters(experts: nn.Module) -> None:
    """Leave empty parameters, and refuse to save them."""
    for name, parameter in experts._parameters.items():
        if parameter is not None:
            experts._parameters[name] = nn.Parameter(parameter.detach().new_empty(0), requires_grad=False)

    def refuse(*_: object) -> None:
        raise ConfigError(
            f"the parameters of {type(experts).__name__} were dropped when it was prepared",
            hint="register with keep_parameters=True to save the model",
        )

    experts.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]


def require_free(name: str, *, ours: Adapter | None) -> None:
    """Refuse a name that already stands for something else.

    Raises:
        ConfigError: it is one of transformers' or of another library.
    """
    taken = [
        type(registry).__name__
        for registry in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS, EPImplementationInterface())
        if name in registry
    ]
    if name == "eager" or (taken and ours is None):
        raise ConfigError(f'"{name}" already is an implementation of transformers', got=taken, hint="take another name")


def enter(adapter: Adapter) -> None:
    """Put the adapter into the registries of transformers."""

    def experts_forward(experts: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return adapter.forward(experts, *args, **kwargs)

    ALL_EXPERTS_FUNCTIONS.register(adapter.name, experts_forward)
    ALL_FP8_EXPERTS_FUNCTIONS.register(adapter.name, experts_forward)
    EPImplementationInterface.register(adapter.name, partial(MegaMoEExpertParallel, adapter))

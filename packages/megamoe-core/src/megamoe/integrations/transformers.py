"""MegaMoE in Hugging Face transformers: an experts implementation, for FP8 experts too, and an expert-parallel one.

    from megamoe.integrations import transformers as megamoe_transformers

    megamoe_transformers.register(num_max_tokens_per_rank=4096)
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="megamoe")
    model.generate(...)

    # several ranks: each has its share of the experts
    DistributedConfig(tp_size=2, ep_size=2, ep_implementation="megamoe")

docs/transformers.md is the guide. Nothing is changed for models that don't name it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from megamoe.errors import ConfigError
from megamoe.integrations.versions import require_version
from megamoe.problem import ActFormat, QuantMode, Transport, member, require_positive
from megamoe.registry import require_name

if TYPE_CHECKING:
    from megamoe.integrations.transformers_experts import Adapter

SUPPORTED = ">=5.24,<5.25"  # as the extra `transformers` of megamoe-core says
NAME = "megamoe"


class Unsupported(StrEnum):
    """What to do with experts that no usable backend can run."""

    ERROR = "error"  # raise, with the reason against each backend
    EAGER = "eager"  # the model's own forward, and one warning in the log


@dataclass(frozen=True, kw_only=True)
class ExpertsOptions:
    """How models that name the implementation are run.

    Args:
        num_max_tokens_per_rank: capacity of a session, which fixes its workspace. A larger batch is split into calls of
            this size where every rank knows how many calls that makes (one rank, or ranks that share a batch); where
            ranks bring batches of their own it raises CapacityError.
        backend: "auto", or the name of a backend. "auto" is the reference for a model on the CPU, and a GPU backend for
            a model on a GPU; the CPU never computes for a GPU.
        unsupported: what to do with experts that no usable backend can run.
        quant: quant mode; None takes the mode of the weights as they are (BF16: bf16, FP8 blocks: a8w8, FP4: a8w4).
            Another mode rounds the weights when they are prepared.
        act_format: activation format, for a8w4 only.
        transport: how rows travel home.
        keep_parameters: False drops a layer's parameters once they are prepared, for backends that prepare a copy. The
            model then can't be saved, or run by another implementation.
        metrics: count rows per expert, for each layer: `Adapter.metrics`.

    Raises:
        ConfigError: an option that no layer could be run with.
    """

    num_max_tokens_per_rank: int = 8192
    backend: str = "auto"
    unsupported: Unsupported | str = Unsupported.ERROR
    quant: QuantMode | str | None = None
    act_format: ActFormat | str | None = None
    transport: Transport | str = Transport.BF16
    keep_parameters: bool = True
    metrics: bool = False

    def __post_init__(self) -> None:
        require_positive("num_max_tokens_per_rank", self.num_max_tokens_per_rank)
        require_name(self.backend, known=True)
        enums: dict[str, type[StrEnum]] = {"unsupported": Unsupported, "transport": Transport}
        optional: dict[str, type[StrEnum]] = {"quant": QuantMode, "act_format": ActFormat}
        enums.update((name, enum) for name, enum in optional.items() if getattr(self, name) is not None)
        for name, enum in enums.items():
            object.__setattr__(self, name, member(name, enum, getattr(self, name)))
        if self.act_format is not None and self.quant not in (None, QuantMode.A8W4):
            raise ConfigError("act_format is a choice of a8w4 only", got=f"quant {self.quant}", expected="quant a8w4")
        for name in ("keep_parameters", "metrics"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is not a bool", got=repr(getattr(self, name)), expected="True or False")


_adapters: dict[str, Adapter] = {}


def register(
    name: str = NAME,
    *,
    num_max_tokens_per_rank: int = 8192,
    backend: str = "auto",
    unsupported: Unsupported | str = Unsupported.ERROR,
    quant: QuantMode | str | None = None,
    act_format: ActFormat | str | None = None,
    transport: Transport | str = Transport.BF16,
    keep_parameters: bool = True,
    metrics: bool = False,
) -> Adapter:
    """Make `name` an `experts_implementation` and an `ep_implementation` of transformers. Opens nothing yet.

    Calling it again with equal options changes nothing. Arguments are those of `ExpertsOptions`; register several names
    to use several options in one process.

    Returns:
        the adapter, whose `close()` gives back what its sessions hold.

    Raises:
        ConfigError: transformers is missing or outside of the supported range, `name` stands for something else, or an
            option is none of `ExpertsOptions`.
    """
    require_version("transformers", SUPPORTED)
    from megamoe.integrations import transformers_experts

    options = ExpertsOptions(
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        backend=backend,
        unsupported=unsupported,
        quant=quant,
        act_format=act_format,
        transport=transport,
        keep_parameters=keep_parameters,
        metrics=metrics,
    )
    known = _adapters.get(name)
    if known is not None and not known.closed:
        if known.options != options:
            raise ConfigError(
                f'"{name}" is registered with other options',
                got=options,
                expected=known.options,
                hint="close() that adapter first, or register another name",
            )
        return known
    transformers_experts.require_free(name, ours=known)
    _adapters[name] = adapter = transformers_experts.Adapter(name, options)
    transformers_experts.enter(adapter)
    return adapter

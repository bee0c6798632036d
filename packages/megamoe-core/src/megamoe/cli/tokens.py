"""Where the tokens of a run come from, and where they go: made from a seed, or read from a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megamoe.bench.routing import router_weights, routing
from megamoe.checkpoint import LayerCheckpoint, load_router
from megamoe.errors import ConfigError, InputError
from megamoe.problem import MoEProblem
from megamoe.schedule.tiles import share
from megamoe.testing.data import Call
from megamoe.testing.routings import Picks

FROM_ROUTER = "router"  # a routing besides the generated ones: by the checkpoint's own router

_FLOATS = {"BF16": "BF16", "F16": "FP16", "F32": "FP32"}
_INTEGERS = {"I32", "I64"}


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """Tokens in a safetensors file: `hidden_states [N, H]`, and `topk_ids`, `topk_weights` `[N, K]` or neither.

    Args:
        path: the file.
        num_tokens: N.
        hidden_size: H.
        dtype: of hidden_states: BF16, or FP16 or FP32, which `TokenSource` rounds.
        top_k: K, or None without routing.
    """

    path: Path
    num_tokens: int
    hidden_size: int
    dtype: str
    top_k: int | None

    @classmethod
    def open(cls, path: Path) -> InputFile:
        """Look at the file's header.

        Raises:
            InputError: unreadable, or not of this form.
        """
        with _reading(path) as handle:
            shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
            dtypes = {name: handle.get_slice(name).get_dtype() for name in shapes}
        form = "hidden_states [N, H] BF16, and topk_ids [N, K] with topk_weights [N, K] or neither"
        hidden, ids, weights = (shapes.get(name) for name in ("hidden_states", "topk_ids", "topk_weights"))
        if hidden is None or len(hidden) != 2 or dtypes["hidden_states"] not in _FLOATS:
            raise InputError(f"{path} holds no tokens", got={**shapes}, expected=form)
        if ids != weights or (ids is not None and (len(ids) != 2 or ids[0] != hidden[0])):
            raise InputError(f"the tensors of {path} don't fit together", got={**shapes}, expected=form)
        if ids is not None and (dtypes["topk_ids"] not in _INTEGERS or dtypes["topk_weights"] not in _FLOATS):
            raise InputError(
                f"the routing of {path} has the wrong dtype",
                got=f"{dtypes['topk_ids']} and {dtypes['topk_weights']}",
                expected="topk_ids int32 or int64, and topk_weights FP32",
            )
        return cls(
            path=path,
            num_tokens=hidden[0],
            hidden_size=hidden[1],
            dtype=_FLOATS[dtypes["hidden_states"]],
            top_k=ids[1] if ids else None,
        )

    def rows(self, name: str, rows: range) -> Tensor:
        """Some rows of a tensor, copied."""
        with _reading(self.path) as handle:
            tensor: Tensor = handle.get_slice(name)[rows.start : rows.stop]
            return tensor.clone()


@dataclass(frozen=True, kw_only=True)
class TokenSource:
    """Each rank's tokens and routing, the same whoever asks. Picklable.

    Args:
        problem: sizes.
        num_tokens: tokens of each rank.
        routing: a generated routing's name, or `FROM_ROUTER`; not looked at where `file` has one.
        seed: of what is generated.
        file: tokens to take instead of generated ones, spread over the ranks in order.
        layer: whose router `FROM_ROUTER` means.
    """

    problem: MoEProblem
    num_tokens: tuple[int, ...]
    routing: str
    seed: int
    file: InputFile | None = None
    layer: LayerCheckpoint | None = None

    def call(self, rank: int) -> Call:
        """BF16 tokens, int64 ids and FP32 weights of one rank.

        Raises:
            InputError: they do not fit in memory, or a file that can't be read.
        """
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + rank)
        first = sum(self.num_tokens[:rank])
        rows = range(first, first + self.num_tokens[rank])
        try:
            if self.file is None:
                hidden = torch.randn(len(rows), self.problem.hidden_size, generator=rng).bfloat16()
            else:
                hidden = self.file.rows("hidden_states", rows).bfloat16()
            ids, weights = self._route(hidden, rank, rows, rng)
        except (MemoryError, RuntimeError) as error:  # the latter from torch's allocator
            raise InputError(
                "these tokens do not fit in memory",
                got=f"{len(rows)} tokens of {self.problem.hidden_size} columns on rank {rank}: "
                f"{str(error).splitlines()[0]}",
                hint="run fewer at a time",
            ) from error
        return Call(hidden_states=hidden, topk_ids=ids, topk_weights=weights)

    def _route(self, hidden: Tensor, rank: int, rows: range, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        problem = self.problem
        if self.file is not None and self.file.top_k is not None:
            return self.file.rows("topk_ids", rows).long(), self.file.rows("topk_weights", rows).float()
        if self.routing == FROM_ROUTER:
            assert self.layer is not None
            return load_router(self.layer, problem.top_k)(hidden)
        picks = Picks.of(problem, num_tokens=len(rows), src_rank=rank)
        return routing(self.routing)(picks, rng), router_weights(len(rows), problem.top_k, rng)


def spread(num_tokens: int, ep_size: int) -> tuple[int, ...]:
    """`num_tokens` over the ranks, as evenly as possible."""
    return tuple(len(share(num_tokens, ep_size, rank)) for rank in range(ep_size))


def parse_tokens(text: str, ep_size: int) -> tuple[int, ...]:
    """Tokens of each rank from `--tokens`: "512" for every rank, or "512,0,7,64", one number a rank.

    Raises:
        ConfigError: no such numbers, or not as many as ranks.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts) or len(parts) not in (1, ep_size):
        raise ConfigError(
            "--tokens is not a number of tokens",
            got=repr(text),
            expected="one number >= 0" + (f", or {ep_size} with commas between them" if ep_size > 1 else "; --ep is 1"),
        )
    counts = tuple(map(int, parts))
    return counts * ep_size if len(counts) == 1 else counts


def _reading(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"input file {path} can't be read", got=error, hint="write it with safetensors.torch.save_file"
        ) from error

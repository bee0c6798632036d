"""What the ranks of the expert-parallel tests run; a module of its own, since a spawned process has to import it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tiny_models import VOCAB
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from megamoe.errors import MegaMoEError
from megamoe.integrations import transformers as megamoe_transformers
from megamoe.launch import RankContext

CAPACITY = 16


@dataclass(frozen=True)
class Run:
    """A model spread over the ranks, and the shape of the batch that each rank brings."""

    layout: dict[str, int]
    ep_implementation: str
    shapes: tuple[tuple[int, int], ...]
    unsupported: str = "error"
    dtype: torch.dtype = torch.bfloat16
    keep_parameters: bool = True


@dataclass(frozen=True)
class Result:
    """One rank's logits or its error, and the EP sizes of its sessions."""

    logits: Tensor
    error: str
    ep_sizes: list[int]


def run_all(context: RankContext, path: str, runs: Mapping[str, Run]) -> dict[str, Result]:
    """One rank's result of each run, in one process group."""
    os.environ.update(RANK=str(context.rank), LOCAL_RANK=str(context.rank), WORLD_SIZE=str(context.world_size))
    store = dist.FileStore(str(context.directory / "store"), context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
    results = {name: _run(context, path, run) for name, run in runs.items()}
    dist.destroy_process_group()
    return results


def _run(context: RankContext, path: str, run: Run) -> Result:
    adapter = megamoe_transformers.register(
        num_max_tokens_per_rank=CAPACITY, unsupported=run.unsupported, keep_parameters=run.keep_parameters
    )
    config = DistributedConfig(**run.layout, ep_size=context.world_size, ep_implementation=run.ep_implementation)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path,
        dtype=run.dtype,
        experts_implementation="eager" if run.ep_implementation == "megamoe" else "megamoe",
        distributed_config=config,
    ).eval()
    error, output = "", torch.empty(0)
    try:
        with torch.no_grad():
            model(batch(run.shapes[context.rank]))
            output = model(batch(run.shapes[context.rank])).logits  # by layers that are prepared already
        output = output.full_tensor() if isinstance(output, DTensor) else output
    except MegaMoEError as raised:
        error = f"{type(raised).__name__}: {raised}"
    ep_sizes = [problem.ep_size for problem in adapter.problems()]
    adapter.close()
    return Result(output.clone(), error, ep_sizes)


def batch(shape: tuple[int, int]) -> Tensor:
    """Token ids that only the shape decides: ranks with equal shapes get equal batches."""
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(shape[1]))

"""Write a checkpoint of one MoE layer with random weights of real sizes, in the naming of a real model family.

    python examples/make_checkpoint.py moe.safetensors                        # DeepSeek-V2-Lite's sizes in FP8 blocks
    python examples/make_checkpoint.py mixtral/ --style mixtral --hidden 4096 --intermediate 14336 --experts 8 --top-k 2
    python examples/make_checkpoint.py oss/ --style gpt-oss --hidden 2880 --intermediate 2880 --experts 32 --top-k 4
    python examples/make_checkpoint.py big/ --experts 256 --shards 8          # with model.safetensors.index.json

`OUT` is a file, or a directory for shards. config.json is written beside it, with the sizes that `megamoe run` reads.
Weights are Gaussian with variance 1 / fan-in, so that outputs are of the inputs' size.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megamoe.formats import FP8_128X128, MXFP4

LAYER = 0

Tensors = Iterator[tuple[str, Tensor]]


def matrix(rows: int, columns: int, rng: torch.Generator) -> Tensor:
    """FP32 `[rows, columns]`."""
    return torch.randn(rows, columns, generator=rng).mul_(columns**-0.5)


def deepseek_v3(args: argparse.Namespace, rng: torch.Generator) -> Tensors:
    """FP8 e4m3fn matrices, an FP32 scale per 128x128 block, a sigmoid router with a correction bias."""
    prefix, hidden, inter = f"model.layers.{LAYER}.mlp", args.hidden, args.intermediate
    yield f"{prefix}.gate.weight", matrix(args.experts, hidden, rng)
    yield f"{prefix}.gate.e_score_correction_bias", torch.zeros(args.experts)
    for expert in range(args.experts):
        for name, rows, columns in (("gate", inter, hidden), ("up", inter, hidden), ("down", hidden, inter)):
            quantized = FP8_128X128.quantize(matrix(rows, columns, rng))
            weight = f"{prefix}.experts.{expert}.{name}_proj.weight"
            yield weight, quantized.payload
            assert quantized.scales is not None
            yield f"{weight}_scale_inv", quantized.scales


def mixtral(args: argparse.Namespace, rng: torch.Generator) -> Tensors:
    """BF16 matrices: w1 is gate, w3 is up, w2 is down."""
    prefix, hidden, inter = f"model.layers.{LAYER}.block_sparse_moe", args.hidden, args.intermediate
    yield f"{prefix}.gate.weight", matrix(args.experts, hidden, rng).bfloat16()
    for expert in range(args.experts):
        for name, rows, columns in (("w1", inter, hidden), ("w3", inter, hidden), ("w2", hidden, inter)):
            yield f"{prefix}.experts.{expert}.{name}.weight", matrix(rows, columns, rng).bfloat16()


def gpt_oss(args: argparse.Namespace, rng: torch.Generator) -> Tensors:
    """MXFP4 blocks and E8M0 scales of all experts in one tensor, gate and up interleaved, BF16 biases."""
    prefix, hidden, inter, experts = f"model.layers.{LAYER}.mlp", args.hidden, args.intermediate, args.experts
    yield f"{prefix}.router.weight", matrix(experts, hidden, rng).bfloat16()
    yield f"{prefix}.router.bias", torch.zeros(experts).bfloat16()
    for name, rows, columns in (("gate_up_proj", 2 * inter, hidden), ("down_proj", hidden, inter)):
        parts = [MXFP4.quantize(matrix(rows, columns, rng)) for _ in range(experts)]
        blocks = torch.stack([part.payload for part in parts])
        yield f"{prefix}.experts.{name}_blocks", blocks.view(experts, rows, columns // 32, 16)
        yield f"{prefix}.experts.{name}_scales", torch.stack([part.scales for part in parts if part.scales is not None])
        yield f"{prefix}.experts.{name}_bias", (torch.randn(experts, rows, generator=rng) / 4).bfloat16()


STYLES = {"deepseek-v3": deepseek_v3, "mixtral": mixtral, "gpt-oss": gpt_oss}


def config(args: argparse.Namespace) -> dict[str, object]:
    """What `megamoe run` reads of a model's configuration, in the keys of each family."""
    common = {"hidden_size": args.hidden, "num_experts_per_tok": args.top_k}
    if args.style == "deepseek-v3":
        sizes = {"moe_intermediate_size": args.intermediate, "n_routed_experts": args.experts, "norm_topk_prob": True}
        return {"model_type": "deepseek_v3", **common, **sizes}
    sizes = {"intermediate_size": args.intermediate, "num_local_experts": args.experts}
    if args.style == "mixtral":
        return {"model_type": "mixtral", **common, **sizes}
    return {"model_type": "gpt_oss", **common, **sizes, "swiglu_limit": 7.0}


def write_shards(tensors: Tensors, directory: Path, num_shards: int) -> list[Path]:
    """Deal the tensors out to files of about one size, and write the index."""
    shards: list[dict[str, Tensor]] = [{} for _ in range(num_shards)]
    for name, tensor in tensors:
        min(shards, key=lambda shard: sum(held.nbytes for held in shard.values()))[name] = tensor
    files = [directory / f"model-{index + 1:05}-of-{num_shards:05}.safetensors" for index in range(num_shards)]
    weight_map: dict[str, str] = {}
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file.name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return files


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="a .safetensors file, or a directory")
    parser.add_argument("--style", choices=STYLES, default="deepseek-v3")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=1408)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    single = args.out.suffix == ".safetensors"
    if single and args.shards > 1:
        parser.error("several shards need a directory as OUT")
    directory = args.out.parent if single else args.out
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(args), indent=2) + "\n")
    tensors = STYLES[args.style](args, torch.Generator().manual_seed(args.seed))
    if single:
        save_file(dict(tensors), args.out, metadata={"format": "pt"})
        files = [args.out]
    else:
        files = write_shards(tensors, directory, args.shards)
    for file in files:
        print(f"{file}  {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

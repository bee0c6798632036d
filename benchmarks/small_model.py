"""Accuracy of the quant modes on a language model that is trained on the spot: loss and next-token accuracy of each.

    python benchmarks/small_model.py --output benchmarks/results/small-model/DATE.json

A byte-level Mixtral of a few layers learns the help texts of Python's `pydoc`, is rounded to BF16, and is then
run on texts that it has not seen, its experts by MegaMoE's transformers adapter in one mode after the other. Needs
`megamoe-core[transformers]`; a few minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from small_model_report import markdown
from torch import Tensor

from megamoe.bench.commit import current_commit
from megamoe.integrations import transformers as megamoe_transformers
from megamoe.problem import QuantMode

VOCAB = 256  # bytes
WINDOW = 128  # bytes that a prediction can look back over, at most
BATCH = 16  # windows of a training step
CHUNK, HELD_OUT = 4096, 10  # bytes; every tenth chunk of text is for evaluation
PEAK_RATE = 3e-3
Z_95 = 1.96
SHAPE = {
    "hidden_size": 128, "intermediate_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One way to run the experts: loss in nats and next-byte accuracy, each with half a 95% interval.

    The interval is over windows of text. `loss_change` is against the model's own forward on the same windows.
    """

    experts: str
    loss: float
    loss_half: float
    accuracy: float
    accuracy_half: float
    loss_change: float
    loss_change_half: float


def texts() -> tuple[Tensor, Tensor]:
    """Bytes to learn from and bytes to be asked about."""
    names = sorted(topics)
    random.Random(0).shuffle(names)
    text = torch.tensor(list("\n\n".join(topics[name] for name in names).encode()))
    chunks = text.split(CHUNK)
    asked = torch.cat(chunks[::HELD_OUT])
    return torch.cat([chunk for index, chunk in enumerate(chunks) if index % HELD_OUT]), asked


def new_model() -> Any:
    """Random weights from a fixed seed."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **SHAPE, vocab_size=VOCAB, max_position_embeddings=WINDOW, bos_token_id=None, eos_token_id=None,
        initializer_range=0.05,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")


def train(model: Any, data: Tensor, num_steps: int) -> float:
    """Next-byte training with AdamW; the mean loss of the last steps."""
    rng = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.05, betas=(0.9, 0.98))
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=num_steps + 1, pct_start=0.1)
    losses = []
    model.train()
    for step in range(num_steps):
        starts = torch.randint(0, len(data) - WINDOW, (BATCH,), generator=rng)
        windows = torch.stack([data[start : start + WINDOW] for start in starts])
        loss = model(input_ids=windows, labels=windows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        losses.append(loss.item())
        if step % 100 == 99:
            print(f"step {step + 1}: loss {sum(losses[-50:]) / 50:.3f}", flush=True)
    return sum(losses[-50:]) / len(losses[-50:])


@torch.no_grad()
def per_window(model: Any, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss and share of right guesses of each window `[N, WINDOW]`, its second half only, so that every guess has
    something to look back on."""
    losses, right = [], []
    for part in windows.split(BATCH):
        logits = model(input_ids=part).logits[:, WINDOW // 2 - 1 : -1].float()
        targets = part[:, WINDOW // 2 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses.append(loss.view_as(targets).mean(1))
        right.append((logits.argmax(-1) == targets).float().mean(1))
    return torch.cat(losses).double(), torch.cat(right).double()


def half_interval(values: Tensor) -> float:
    """Half of the 95% interval of the mean."""
    return float(Z_95 * values.std() / len(values) ** 0.5)


def evaluate(model: Any, windows: Tensor) -> list[Evaluation]:
    """The model's own forward, then MegaMoE's in every mode."""
    model.eval()
    baseline: Tensor | None = None
    results = []
    for mode in (None, *QuantMode):
        name = "eager" if mode is None else f"megamoe_{mode}"
        if mode is not None:
            megamoe_transformers.register(name, num_max_tokens_per_rank=BATCH * WINDOW, quant=mode)
        model.set_experts_implementation(name)
        loss, right = per_window(model, windows)
        baseline = loss if baseline is None else baseline
        results.append(
            Evaluation(
                experts="the model's own, BF16" if mode is None else str(mode),
                loss=float(loss.mean()),
                loss_half=half_interval(loss),
                accuracy=float(right.mean()),
                accuracy_half=half_interval(right),
                loss_change=float((loss - baseline).mean()),
                loss_change_half=half_interval(loss - baseline),
            )
        )
        print(results[-1], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--output", type=Path, default=Path("small-model.json"))
    parser.add_argument("--steps", type=int, default=1000, help="of training")
    parser.add_argument("--windows", type=int, default=256, help="of evaluation")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # steps are small; more threads took longer on two cores
    learned, asked = texts()
    model = new_model()
    began = time.perf_counter()
    train_loss = train(model, learned, arguments.steps)
    train_seconds = time.perf_counter() - began
    model = model.to(torch.bfloat16)
    windows = asked[: len(asked) // WINDOW * WINDOW].view(-1, WINDOW)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(2))
    began = time.perf_counter()
    results = evaluate(model, windows[order[: arguments.windows]])
    report = {
        "bench": "small-model",
        "commit": current_commit(),
        "command": f"python benchmarks/small_model.py --steps {arguments.steps} --windows {arguments.windows}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "text_sha256": hashlib.sha256(bytes(learned.tolist()) + bytes(asked.tolist())).hexdigest(),
        "bytes_learned": len(learned),
        "bytes_held_out": len(asked),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "shape": SHAPE,
        "train_loss": train_loss,
        "train_seconds": train_seconds,
        "evaluate_seconds": time.perf_counter() - began,
        "rows": [vars(result) for result in results],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(markdown(report))


if __name__ == "__main__":
    main()

"""What `run.py` measured, as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OURS, REST = "megamoe", "without experts"


def markdown(files: list[Path]) -> str:
    """A section of each result, the latest first; empty without results."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return "\n".join(_section(result) for result in sorted(results, key=lambda result: result["date"], reverse=True))


def _section(result: dict[str, Any]) -> str:
    rows = {
        phase: [row for row in result["rows"] if row["phase"] == phase] for phase in ("decode", "prefill", "layers")
    }
    lines = [
        f"### {result['num_moe_layers']} MoE layers of DeepSeek-V3's size on {result['num_gpus']} x {result['gpu']} "
        f"(H={result['hidden_size']} I={result['moe_intermediate_size']} E={result['n_routed_experts']} "
        f"top-{result['num_experts_per_tok']}, EP{result['ep_size']})",
        "",
    ]
    lines += _table(rows["decode"], "sequences per rank", "batch_per_rank", "time per output token, ms")
    lines += _table(rows["prefill"], "prompt per rank, tokens", "tokens_per_rank", "time to first token, ms")
    lines += _tokens_per_second(rows["prefill"], result["ep_size"])
    for row in rows["layers"]:
        distances = ", ".join(f"{name} {value:.4f}" for name, value in row["rel_l2_from_exact"].items())
        lines += [f"MoE layers on the model's own activations, relL2 from FP32: {distances}; gate {row['gate']}.", ""]
    distances = [
        f"{name} {distance:.3f} ({row['phase']}, {row['batch_per_rank']})"
        for row in rows["decode"] + rows["prefill"]
        for name, distance in row["logits_rel_l2"].items()
    ]
    lines += [f"Logits against MegaMoE's, median row relL2: {'; '.join(distances)}.", ""]
    lines += [
        f"GEMMs of the unfused block: {result['gemm']}. torch {result['torch']}, "
        f"transformers {result['transformers']}, commit {result['commit']}, {result['date']}: "
        f"`python benchmarks/end_to_end/run.py --ranks {result['ep_size']} --layers {result['num_moe_layers']} "
        f"--experts {result['n_routed_experts']}`",
        "",
    ]
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]], head: str, key: str, what: str) -> list[str]:
    """Medians of the whole model, and of its MoE blocks: what is left when the model without experts is taken off."""
    if not rows:
        return []
    names = list(rows[0]["ms"])
    others = [name for name in names if name not in (OURS, REST)]
    columns = [OURS, *others, REST, "experts alone: megamoe", *(f"experts alone: {name}" for name in others)]
    lines = [f"| {head} | {' | '.join(columns)} |", "|---:" * (1 + len(columns)) + "|"]
    for row in rows:
        ms = {name: row["ms"][name]["median"] for name in names}
        cells = [ms[name] for name in (OURS, *others, REST)] + [ms[name] - ms[REST] for name in (OURS, *others)]
        lines.append(f"| {row[key]} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return [f"**{what[0].upper()}{what[1:]}**", "", *lines, ""]


def _tokens_per_second(rows: list[dict[str, Any]], num_ranks: int) -> list[str]:
    lines = []
    for row in rows:
        rates = [
            f"{name} {num_ranks * row['tokens_per_rank'] / times['median']:.0f}k"
            for name, times in row["ms"].items()
            if name != REST
        ]
        lines += [f"Prompt tokens per second, all ranks: {'; '.join(rates)}.", ""]
    return lines

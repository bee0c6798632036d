"""What `small_model.py` measured, as Markdown."""

from __future__ import annotations

from typing import Any


def markdown(report: dict[str, Any]) -> str:
    """A table, and where it comes from."""
    lines = ["| experts | loss, nats a byte | next byte right | loss against the model's own |", "|---|---|---|---|"]
    for row in report["rows"]:
        lines.append(
            f"| {row['experts']} | {row['loss']:.4f} ± {row['loss_half']:.4f} "
            f"| {row['accuracy']:.2%} ± {row['accuracy_half']:.2%} "
            f"| {row['loss_change']:+.4f} ± {row['loss_change_half']:.4f} |"
        )
    shape = report["shape"]
    lines += [
        "",
        f"{report['parameters'] / 1e6:.1f} million parameters: {shape['num_hidden_layers']} layers, "
        f"H={shape['hidden_size']}, I={shape['intermediate_size']}, {shape['num_local_experts']} experts, "
        f"top-{shape['num_experts_per_tok']}. Trained on {report['bytes_learned']} bytes to a loss of "
        f"{report['train_loss']:.2f} in {report['train_seconds']:.0f} s, "
        f"evaluated in {report['evaluate_seconds']:.0f} s. "
        f"Python {report['python']}, torch {report['torch']}, commit {report['commit']}: `{report['command']}`",
        "",
    ]
    return "\n".join(lines)

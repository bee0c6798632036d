"""A small Mixtral of random weights generates tokens with MegaMoE, and then by itself.

    pip install "megamoe-core[transformers]"
    python examples/transformers_generate.py                   # on the CPU: MegaMoE's reference computes the experts
    python examples/transformers_generate.py --device cuda     # on a GPU, by the backend that is installed for it

Nothing is downloaded. Both continuations are the same but where two tokens are so close that BF16 rounding decides.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from megamoe.integrations import transformers as megamoe_transformers

CONFIG = MixtralConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
    bos_token_id=None,
    eos_token_id=None,
)


def generate(model: torch.nn.Module, prompt: torch.Tensor) -> list[int]:
    """The greedy continuation of `prompt` by eight tokens."""
    tokens = model.generate(  # type: ignore[operator]
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
    )
    continuation: list[int] = tokens[0, prompt.shape[1] :].tolist()
    return continuation


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate eight tokens with MegaMoE, and eight without.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    device = parser.parse_args().device
    torch.manual_seed(0)
    adapter = megamoe_transformers.register(num_max_tokens_per_rank=256)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16, experts_implementation="megamoe").eval()
    model = model.to(device)
    prompt = torch.tensor([list(b"Mixture of experts")], device=device)

    with_megamoe = generate(model, prompt)
    for problem in adapter.problems():
        print("MegaMoE ran", problem)
    model.set_experts_implementation("eager")
    by_itself = generate(model, prompt)

    print("with MegaMoE:", *with_megamoe)
    print("by itself:   ", *by_itself)
    adapter.close()


if __name__ == "__main__":
    main()

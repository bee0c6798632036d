"""Generate with an engine of SGLang that runs its experts by MegaMoE: `sglang_generate.py PATH PROMPTS NEW_TOKENS`."""

from __future__ import annotations

import json
import sys

if __name__ == "__main__":
    import sglang

    path, prompts, new_tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    engine = sglang.Engine(
        model_path=path,
        device="cpu",
        moe_runner_backend="megamoe_ep",
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        max_total_tokens=1024,
        max_prefill_tokens=64,
        chunked_prefill_size=64,
        log_level="info",
    )
    greedy = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    together = engine.generate(input_ids=prompts, sampling_params=greedy)
    alone = [engine.generate(input_ids=prompt, sampling_params=greedy) for prompt in prompts]
    print("together", json.dumps([result["output_ids"] for result in together]), flush=True)
    print("alone", json.dumps([result["output_ids"] for result in alone]), flush=True)
    engine.shutdown()

"""lm-eval as megamoe_rocm calls it: options and result of lm_eval 0.4.13 (lm_eval/_cli/run.py)."""

import argparse
import json
import urllib.request
from pathlib import Path

OPTIONS = ("--model", "--model_args", "--tasks", "--num_fewshot", "--output_path")
MODEL_ARGUMENTS = ("model", "base_url", "num_concurrent", "max_retries", "tokenized_requests")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in OPTIONS:
        parser.add_argument(option)
    arguments = parser.parse_args()
    assert (arguments.model, arguments.tasks) == ("local-completions", "gsm8k")
    values = dict(each.split("=", 1) for each in arguments.model_args.split(","))
    assert set(values) == set(MODEL_ARGUMENTS)
    assert urllib.request.urlopen(values["base_url"].replace("/v1/completions", "/health")).status == 200
    folder = Path(arguments.output_path) / values["model"].replace("/", "__")
    folder.mkdir(parents=True)
    found = {"alias": "gsm8k", "exact_match,strict-match": 0.95, "exact_match_stderr,strict-match": 0.01}
    found |= {"exact_match,flexible-extract": 0.96}
    (folder / "results_2026-11-30T00-00-00.json").write_text(json.dumps({"results": {"gsm8k": found}}))

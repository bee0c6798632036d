"""vLLM's client as megamoe_rocm calls it: options and result of vLLM 0.33.0 (vllm/benchmarks/serve.py)."""

import argparse
import json
import urllib.request
from pathlib import Path

OPTIONS = (
    "--backend",
    "--base-url",
    "--dataset-name",
    "--dataset-path",
    "--model",
    "--num-prompts",
    "--random-input-len",
    "--random-output-len",
    "--random-range-ratio",
    "--request-rate",
    "--max-concurrency",
    "--num-warmups",
    "--percentile-metrics",
    "--metric-percentiles",
    "--result-dir",
    "--result-filename",
    "--seed",
)
SWITCHES = ("--ignore-eos", "--save-result")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", nargs=2)
    for option in OPTIONS:
        parser.add_argument(option)
    for switch in SWITCHES:
        parser.add_argument(switch, action="store_true")
    arguments = parser.parse_args()
    assert arguments.command == ["bench", "serve"]
    assert urllib.request.urlopen(f"{arguments.base_url}/health").status == 200
    assert arguments.ignore_eos
    assert arguments.save_result
    assert arguments.random_range_ratio == "0.0"
    result = {
        "completed": int(arguments.num_prompts),
        "request_throughput": 4.9,
        "output_throughput": 5000.0,
        "total_token_throughput": 45000.0,
    }
    for name in arguments.percentile_metrics.split(","):
        result |= {f"mean_{name}_ms": 3.0, f"median_{name}_ms": 2.0}
        result |= {f"p{percentile}_{name}_ms": 9.0 for percentile in arguments.metric_percentiles.split(",")}
    (Path(arguments.result_dir) / arguments.result_filename).write_text(json.dumps(result))

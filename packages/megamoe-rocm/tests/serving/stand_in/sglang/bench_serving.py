"""SGLang's client as megamoe_rocm calls it: options and result of SGLang 0.5.23 (sglang/benchmark/serving.py)."""

import argparse
import json
import urllib.request

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
    "--output-file",
    "--seed",
    "--warmup-requests",
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in OPTIONS:
        parser.add_argument(option)
    arguments = parser.parse_args()
    if arguments.model == "that ends the server":
        urllib.request.urlopen(f"{arguments.base_url}/workload", data=b"")
    assert urllib.request.urlopen(f"{arguments.base_url}/health").status == 200
    assert arguments.dataset_name in ("random-ids", "sharegpt")
    assert arguments.dataset_name == "sharegpt" or arguments.random_range_ratio == "1.0"
    missing = 1 if arguments.model == "that loses a request" else 0
    result = {
        "completed": int(arguments.num_prompts) - missing,
        "request_throughput": 4.9,
        "output_throughput": 5000.0,
        "total_throughput": 45000.0,
    }
    for name in ("ttft", "tpot", "itl", "e2e_latency"):
        result |= {f"mean_{name}_ms": 3.0, f"median_{name}_ms": 2.0, f"p99_{name}_ms": 9.0}
    with open(arguments.output_file, "a") as file:
        file.write(json.dumps(result) + "\n")

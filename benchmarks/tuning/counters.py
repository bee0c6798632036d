"""Read the GPU's counters during single calls of the fused kernel, with Nsight Compute, beside the bytes that count.

    python counters.py counters.json --tokens 8,512,8192

One GPU, EP1, the seed's shape unless options say otherwise, inputs quantised already. ncu replays a call for each pass
of its counters, restores memory before, flushes the caches, and leaves the clock alone; at EP1 the kernel talks to
nobody else. Counters of device memory are the whole device's: run it alone. Writes a JSON list, an entry per token
count: medians over calls, and the counted bytes of the same calls.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from megamoe.bench.commit import current_commit
from megamoe.bench.results import layer_flops
from megamoe.bench.roofline import expert_bytes
from megamoe.problem import MoEProblem

KERNEL = "sm90_mega_moe"
NUM_CALLS = 3  # of each token count, with other inputs each time
SECTOR_BYTES = 32
METRICS = {
    "us": "gpu__time_duration.sum",
    "sm_hz": "sm__cycles_elapsed.avg.per_second",
    "hbm_read_bytes": "dram__bytes_read.sum",
    "hbm_write_bytes": "dram__bytes_write.sum",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "l2_busy_percent": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "l2_sectors": "lts__t_sectors.sum",
    "l2_read_sectors": "lts__t_sectors_op_read.sum",
    "l2_read_hit_sectors": "lts__t_sectors_op_read_lookup_hit.sum",
    "tensor_pipe_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "nvlink_received_bytes": "nvlrx__bytes.sum",
    "nvlink_sent_bytes": "nvltx__bytes.sum",
}


def problem_of(arguments: argparse.Namespace, num_tokens: int) -> MoEProblem:
    return MoEProblem(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_experts=arguments.experts,
        top_k=arguments.top_k,
        num_max_tokens_per_rank=num_tokens,
        quant=arguments.quant,
        act_format="fp8_1x128" if arguments.quant == "a8w4" else None,
        transport=arguments.transport,
    )


def call_kernels(arguments: argparse.Namespace) -> None:
    """What ncu watches: for each token count a call to warm up, then NUM_CALLS that it profiles."""
    import torch

    from megamoe_cuda.backend import CudaBackend
    from megamoe_cuda.bench.inputs import make_experts, make_inputs

    weights = None
    for num_tokens in arguments.tokens:
        problem = problem_of(arguments, num_tokens)
        with CudaBackend().open(CudaBackend().plan(problem, config=arguments.config)) as session:
            if weights is None:
                weights = session.prepare(make_experts(problem, 0))
            touched = []
            for seed in range(NUM_CALLS + 1):
                inputs = make_inputs(problem, num_tokens=num_tokens, routing_name="uniform", rank=0, seed=seed)
                hidden = inputs.hidden_states if arguments.quant == "bf16" else (inputs.payload, inputs.scales)
                torch.cuda.synchronize()
                if seed > 0:
                    touched.append(inputs.topk_ids.unique().numel())
                    torch.cuda.profiler.start()
                session.forward(hidden, inputs.topk_ids, inputs.topk_weights, weights)
                torch.cuda.synchronize()
                if seed > 0:
                    torch.cuda.profiler.stop()
            session.check()
        print(json.dumps({"num_tokens": num_tokens, "touched_experts": touched}), flush=True)


def known_metrics() -> dict[str, str]:
    """Those of METRICS that this GPU has."""
    query = subprocess.run(["ncu", "--query-metrics"], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0] for line in query.splitlines() if line.strip()}
    return {key: metric for key, metric in METRICS.items() if metric.partition(".")[0] in names}


def profile(arguments: argparse.Namespace, metrics: dict[str, str]) -> str:
    """ncu's output: the lines of call_kernels() and a CSV table."""
    watched = [sys.executable, __file__, *sys.argv[1:], "--watched"]
    ncu = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--kernel-name", f"regex:{KERNEL}"]
    ncu += ["--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(metrics.values())]
    done = subprocess.run([*ncu, *watched], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"ncu failed:\n{done.stdout}")
    return done.stdout


def profiled_calls(output: str, metrics: dict[str, str]) -> Iterator[dict[str, float]]:
    """A call's counters by our names, in the order of the calls."""
    _, header, table = output.partition('"ID"')
    rows = csv.DictReader(io.StringIO(header + table))
    next(rows)  # units
    for row in rows:
        values = {key: float(row[metric].replace(",", "")) for key, metric in metrics.items() if row.get(metric)}
        if "us" in values:
            values["us"] /= 1e3  # base unit: nanoseconds
        yield values


def counted(problem: MoEProblem, num_tokens: int, touched: Sequence[int]) -> dict[str, float]:
    """Bytes that no implementation avoids, and those of rows on their way home, which may stay in the L2 cache."""
    row_in = problem.hidden_size * (2 if problem.quant == "bf16" else 1)
    scales = 0 if problem.quant == "bf16" else problem.hidden_size // 128 * 4
    row_out = 2 * problem.hidden_size
    row_home = row_out if problem.transport == "bf16" else problem.hidden_size + problem.hidden_size // 32
    return {
        "weight_bytes": median(touched) * expert_bytes(problem),
        "input_bytes": num_tokens * (row_in + scales),
        "output_bytes": num_tokens * row_out,
        "home_rows_bytes": num_tokens * problem.top_k * row_home,
        "flops": layer_flops(problem, num_tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokens", default="8,512,8192", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--quant", default="a8w8")
    parser.add_argument("--transport", default="bf16")
    parser.add_argument("--config")
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.watched:
        return call_kernels(arguments)
    if shutil.which("ncu") is None:
        parser.error("ncu of Nsight Compute is not on PATH")
    metrics = known_metrics()
    output = profile(arguments, metrics)
    facts = [json.loads(line) for line in output.splitlines() if line.startswith('{"num_tokens"')]
    calls = list(profiled_calls(output, metrics))
    entries = []
    for index, fact in enumerate(facts):
        of_count = calls[index * NUM_CALLS : (index + 1) * NUM_CALLS]
        problem = problem_of(arguments, fact["num_tokens"])
        entries.append(
            {
                "num_tokens": fact["num_tokens"],
                "quant": str(problem.quant),
                "transport": str(problem.transport),
                "commit": current_commit(),
                "counters": {key: median(call[key] for call in of_count) for key in of_count[0]},
                "counted": counted(problem, fact["num_tokens"], fact["touched_experts"]),
            }
        )
    arguments.output.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    for entry in entries:
        print(json.dumps(entry))


if __name__ == "__main__":
    main()

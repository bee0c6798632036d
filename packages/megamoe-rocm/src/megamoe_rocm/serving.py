"""A serving run: throughput, latencies and GSM8K of a served model, with the tools that engines' own developers use.

Which servers to compare is a file's (`ServingPlan`): a command line each, the unfused one and the fused one, say. For
each of them and each number of redundant experts this starts the server, waits until it answers, runs the workloads
against it, asks it GSM8K, and stops it.

    what            by
    workloads       SGLang's or vLLM's own benchmark client (`sglang.bench_serving`, `vllm bench serve`)
    GSM8K           lm-eval (`lm_eval --tasks gsm8k`), 5 examples, through the server's completions

The workloads are the seed's: 8192 tokens in, 1024 out, no variation, seed 0, 64 requests first that do not count, all
requests at once, 512 at a time (5120 of them) and 4096 at a time (8192).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from megamoe.errors import BackendUnavailableError, ConfigError, MegaMoEError

TAIL = 2000  # characters of a log that an error quotes
POLL_S = 1.0
HEALTH_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 30.0  # a server of eight ranks takes some seconds to end
NUM_FEWSHOT = 5
GSM8K_CONCURRENCY = 128
SEED = 0


class ServingError(MegaMoEError):
    """A server that does not start or ends, or a client that fails; the message has the end of its log."""


class Client(StrEnum):
    """Whose benchmark client is run; it talks to the server of its own engine."""

    SGLANG = "sglang"
    VLLM = "vllm"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is sent to a server.

    Args:
        name: in results.
        num_prompts: requests.
        concurrency: of them at a time.
        input_len, output_len: tokens of each; not used where there is a dataset.
        dataset: file of ShareGPT conversations to send instead of random tokens.
        warmup: requests that are sent first and do not count.
    """

    name: str
    num_prompts: int
    concurrency: int
    input_len: int = 8192
    output_len: int = 1024
    dataset: str | None = None
    warmup: int = 64


SEED_WORKLOADS = (
    Workload(name="c512", num_prompts=5120, concurrency=512),
    Workload(name="c4096", num_prompts=8192, concurrency=4096),
)
SEED_BALANCING = {"r0": 0, "r64": 64}


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """What to run.

    Args:
        model: path or name; its tokenizer is the client's, too.
        client: whose benchmark client.
        servers: name -> command line, in which {model}, {port} and {redundant} are filled in.
        port: of the servers, one after the other.
        balancing: name -> redundant experts.
        workloads: what is sent to each.
        gsm8k: whether GSM8K is asked; lm-eval downloads it.
        start_timeout_s: for a server to answer: it loads a model and captures graphs.
        run_timeout_s: for one workload, or GSM8K.
    """

    model: str
    client: Client
    servers: Mapping[str, str]
    port: int = 30000
    balancing: Mapping[str, int]
    workloads: tuple[Workload, ...]
    gsm8k: bool = True
    start_timeout_s: float = 3600.0
    run_timeout_s: float = 14400.0

    @property
    def url(self) -> str:
        """Where the server answers."""
        return f"http://127.0.0.1:{self.port}"

    @classmethod
    def read(cls, file: Path) -> ServingPlan:
        """From JSON with these names; what is left out is the seed's.

        Raises:
            ConfigError: no such file, no JSON, a name that is missing or none of these.
        """
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("the serving plan can't be read", got=f"{file}: {error}") from error
        required, known = {"model", "client", "servers"}, {each.name for each in fields(cls)}
        if not isinstance(values, dict) or not required <= values.keys() <= known:
            raise ConfigError(
                f"{file} is no serving plan",
                got=", ".join(values) if isinstance(values, dict) else type(values).__name__,
                expected=f"{', '.join(sorted(required))}, and any of {', '.join(sorted(known - required))}",
            )
        workloads = values.pop("workloads", None)
        try:
            return cls(
                client=Client(values.pop("client")),
                balancing=values.pop("balancing", SEED_BALANCING),
                workloads=SEED_WORKLOADS if workloads is None else tuple(Workload(**each) for each in workloads),
                **values,
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{file} is no serving plan", got=error) from error

    def command(self, server: str, redundant: int) -> list[str]:
        """The command line of a server.

        Raises:
            ConfigError: it has a placeholder that there is not.
        """
        try:
            filled = self.servers[server].format(model=self.model, port=self.port, redundant=redundant)
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"the command of server {server} can't be filled in",
                got=f"{type(error).__name__}: {error}",
                expected="{model}, {port} and {redundant} in it, other braces doubled",
            ) from error
        return shlex.split(filled)


@dataclass(frozen=True, kw_only=True)
class ServingRow:
    """One workload on one server; latencies in milliseconds, of the requests that were completed.

    Args:
        server, balancing, workload: what ran.
        command: of the client.
        completed: requests.
        total_throughput, output_throughput: tokens a second, in and out, and out alone.
        request_throughput: requests a second.
        ttft_ms, tpot_ms, itl_ms, e2e_ms: time to first token, per output token after it, between two tokens, and end to
            end: mean, median and 99th percentile.
    """

    server: str
    balancing: str
    workload: str
    command: str
    completed: int
    total_throughput: float
    output_throughput: float
    request_throughput: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2e_ms: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class AccuracyRow:
    """GSM8K of one server: fractions right, by how an answer is taken from the text."""

    server: str
    balancing: str
    command: str
    exact_match: dict[str, float]


def run(plan: ServingPlan, folder: Path, *, on_row: Callable[[ServingRow | AccuracyRow], None]) -> dict[str, Any]:
    """Everything of a plan, logs and the clients' own results in `folder`; `on_row` is told of each result.

    Returns:
        the rows as dictionaries: "serving" and "accuracy".

    Raises:
        BackendUnavailableError: a client is not installed; before any server is started.
        ServingError: a server or a client failed; rows of what ran before have been told.
    """
    require_tools(plan)
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"plan": asdict(plan), "serving": [], "accuracy": []}
    for balancing, redundant in plan.balancing.items():
        for server in plan.servers:
            name = f"{server}-{balancing}"
            with serve(plan, plan.command(server, redundant), folder / f"{name}.log"):
                for workload in plan.workloads:
                    row = _measure(plan, server, balancing, workload, folder)
                    results["serving"].append(asdict(row))
                    on_row(row)
                if plan.gsm8k:
                    accuracy = _ask_gsm8k(plan, server, balancing, folder)
                    results["accuracy"].append(asdict(accuracy))
                    on_row(accuracy)
    return results


def require_tools(plan: ServingPlan) -> None:
    """Raise where a client that `plan` needs is not there.

    Raises:
        BackendUnavailableError: see above.
    """
    tools = {str(plan.client): f"pip install {plan.client}"}
    if plan.gsm8k:
        tools["lm_eval"] = 'pip install "lm_eval[api]", or "gsm8k": false in the plan'
    for module, remedy in tools.items():
        if importlib.util.find_spec(module) is None:
            raise BackendUnavailableError(
                f"the serving run needs {module} in the Python that runs it", got=sys.executable, hint=remedy
            )


@contextmanager
def serve(plan: ServingPlan, command: Sequence[str], log: Path) -> Iterator[None]:
    """A server that answers, for as long as the context lasts.

    Raises:
        ServingError: it ends, or does not answer in time.
    """
    with log.open("w") as output:
        # A session of its own: its ranks are stopped with it.
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait_until_it_answers(plan, process, log)
        try:
            yield
        except ServingError as error:
            if process.poll() is None:
                raise
            raise ServingError("the server has ended by itself", got=_ending(process, log)) from error
    finally:
        _stop(process)


def _wait_until_it_answers(plan: ServingPlan, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + plan.start_timeout_s
    while True:
        if process.poll() is not None:
            raise ServingError("the server does not start", got=_ending(process, log))
        try:
            with urllib.request.urlopen(f"{plan.url}/health", timeout=HEALTH_TIMEOUT_S) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass  # not yet
        if time.monotonic() > deadline:
            raise ServingError(
                f"the server does not answer within {plan.start_timeout_s:g} s", got=log.read_text()[-TAIL:]
            )
        time.sleep(POLL_S)


def _ending(process: subprocess.Popen[bytes], log: Path) -> str:
    return f"status {process.returncode}, {log}: {log.read_text()[-TAIL:]}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and what it has started."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        if _has_ended(process):
            break
    process.wait()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether nothing of the server's process group is left within a while: ranks may outlast who started them."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while time.monotonic() < deadline:
        process.poll()
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(POLL_S / 10)
    return False


def _measure(plan: ServingPlan, server: str, balancing: str, workload: Workload, folder: Path) -> ServingRow:
    file = folder / f"{server}-{balancing}-{workload.name}.json"
    file.unlink(missing_ok=True)  # SGLang's client appends
    command = client_command(plan, workload, file)
    _run_client(command, file.with_suffix(".log"), plan.run_timeout_s)
    return read_result(plan.client, file, server=server, balancing=balancing, workload=workload, command=command)


def client_command(plan: ServingPlan, workload: Workload, file: Path) -> list[str]:
    """The benchmark client's command line; its result goes to `file`."""
    common = ["--base-url", plan.url, "--model", plan.model, "--seed", str(SEED), "--request-rate", "inf"]
    common += ["--num-prompts", str(workload.num_prompts), "--max-concurrency", str(workload.concurrency)]
    if plan.client is Client.SGLANG:
        command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", *common]
        command += ["--warmup-requests", str(workload.warmup), "--output-file", str(file)]
        dataset = ["--dataset-name", "random-ids"]  # "random" would cut its tokens out of a data set to be downloaded
        whole = "1.0"  # the least of a length that is drawn, as a fraction
    else:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "vllm", *common]
        command += ["--ignore-eos", "--num-warmups", str(workload.warmup), "--percentile-metrics", "ttft,tpot,itl,e2el"]
        command += ["--metric-percentiles", "99", "--save-result"]
        command += ["--result-dir", str(file.parent), "--result-filename", file.name]
        dataset = ["--dataset-name", "random"]
        whole = "0.0"  # how far a length that is drawn may be from the one given
    if workload.dataset is not None:
        return [*command, "--dataset-name", "sharegpt", "--dataset-path", workload.dataset]
    lengths = ["--random-input-len", str(workload.input_len), "--random-output-len", str(workload.output_len)]
    return [*command, *dataset, *lengths, "--random-range-ratio", whole]


NAMES: Mapping[Client, Mapping[str, str]] = {
    Client.SGLANG: {"total_throughput": "total_throughput", "e2e_ms": "e2e_latency"},
    Client.VLLM: {"total_throughput": "total_token_throughput", "e2e_ms": "e2el"},
}
"""What the clients call alike things differently."""


def read_result(
    client: Client, file: Path, *, server: str, balancing: str, workload: Workload, command: Sequence[str]
) -> ServingRow:
    """A client's result.

    Raises:
        ServingError: it has none, not all requests were completed, or it lacks something.
    """
    names = NAMES[client]

    def latency(name: str) -> dict[str, float]:
        return {kind: result[f"{kind}_{name}_ms"] for kind in ("mean", "median", "p99")}

    try:
        result = json.loads(file.read_text().splitlines()[-1] if client is Client.SGLANG else file.read_text())
        row = ServingRow(
            server=server,
            balancing=balancing,
            workload=workload.name,
            command=shlex.join(command),
            completed=result["completed"],
            total_throughput=result[names["total_throughput"]],
            output_throughput=result["output_throughput"],
            request_throughput=result["request_throughput"],
            ttft_ms=latency("ttft"),
            tpot_ms=latency("tpot"),
            itl_ms=latency("itl"),
            e2e_ms=latency(names["e2e_ms"]),
        )
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ServingError(
            f"the client's result can't be read: {type(error).__name__} {error}",
            got=str(file),
            hint="its release may write another form than those that this one was written for (docs/gfx950.md)",
        ) from error
    if row.completed != workload.num_prompts:
        raise ServingError(
            f"{server} has not completed workload {workload.name}",
            got=f"{row.completed} requests",
            expected=workload.num_prompts,
            hint=f"see {file.with_suffix('.log')}",
        )
    return row


def gsm8k_command(plan: ServingPlan, folder: Path) -> list[str]:
    """lm-eval's command line; its result goes into `folder`."""
    arguments = {
        "model": plan.model,
        "base_url": f"{plan.url}/v1/completions",
        "num_concurrent": GSM8K_CONCURRENCY,
        "max_retries": 3,
        "tokenized_requests": False,
    }
    model_args = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", model_args]
    return [*command, "--tasks", "gsm8k", "--num_fewshot", str(NUM_FEWSHOT), "--output_path", str(folder)]


def _ask_gsm8k(plan: ServingPlan, server: str, balancing: str, folder: Path) -> AccuracyRow:
    results = folder / f"{server}-{balancing}-gsm8k"
    command = gsm8k_command(plan, results)
    _run_client(command, folder / f"{server}-{balancing}-gsm8k.log", plan.run_timeout_s)
    files = sorted(results.rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    try:
        found = json.loads(files[-1].read_text())["results"]["gsm8k"]
    except (IndexError, ValueError, KeyError) as error:
        raise ServingError("lm-eval's result can't be read", got=f"{type(error).__name__} in {results}") from error
    marks = {name.partition(",")[2]: value for name, value in found.items() if name.startswith("exact_match,")}
    return AccuracyRow(server=server, balancing=balancing, command=shlex.join(command), exact_match=marks)


def _run_client(command: Sequence[str], log: Path, timeout_s: float) -> None:
    with log.open("w") as output:
        try:
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise ServingError(f"a client has not ended within {timeout_s:g} s", got=shlex.join(command)) from error
    if done.returncode:
        raise ServingError(
            f"a client failed with status {done.returncode}", got=f"{shlex.join(command)}: {log.read_text()[-TAIL:]}"
        )


def report(results: Mapping[str, Any]) -> list[str]:
    """Results of `run` as lines of Markdown."""
    lines = ["| server | experts | workload | tok/s | out tok/s | req/s | TTFT ms | TPOT ms | ITL ms | E2E ms |"]
    lines += ["|---" * 10 + "|"]
    for row in results["serving"]:
        cells = [row["server"], row["balancing"], row["workload"]]
        cells += [f"{row['total_throughput']:,.0f}", f"{row['output_throughput']:,.0f}"]
        cells += [f"{row['request_throughput']:.3f}"]
        cells += [_latency(row[name]) for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Latencies: mean / median / 99th percentile."]
    if results["accuracy"]:
        lines += ["", "| server | experts | GSM8K |", "|---|---|---|"]
        for row in results["accuracy"]:
            marks = ", ".join(f"{kind} {value:.4f}" for kind, value in row["exact_match"].items())
            lines.append(f"| {row['server']} | {row['balancing']} | {marks} |")
    return lines


def _latency(values: Mapping[str, float]) -> str:
    return " / ".join(f"{values[kind]:,.1f}" for kind in ("mean", "median", "p99"))

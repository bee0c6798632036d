"""The serving run: stand-ins for a server and for the clients, with the options and results of their releases."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megamoe.errors import BackendUnavailableError, ConfigError
from megamoe_rocm import serving
from megamoe_rocm.serving import (
    SEED_BALANCING,
    SEED_WORKLOADS,
    AccuracyRow,
    Client,
    ServingError,
    ServingPlan,
    ServingRow,
    Workload,
    client_command,
    gsm8k_command,
    report,
    run,
)

STAND_IN = Path(__file__).with_name("stand_in")
CLIENTS = {Client.SGLANG: "sglang/bench_serving.py", Client.VLLM: "vllm/entrypoints/cli/main.py"}
SMALL = Workload(name="small", num_prompts=3, concurrency=2, input_len=8, output_len=4, warmup=1)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """For this process, which looks for them, and for those that it starts."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(serving, "POLL_S", 0.1)
    monkeypatch.setattr(serving, "STOP_TIMEOUT_S", 0.3)


def plan(**changes: object) -> ServingPlan:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = f"{sys.executable} {STAND_IN / 'server.py'} {{port}} {{redundant}}"
    return replace(
        ServingPlan(
            model="a/model",
            client=Client.SGLANG,
            servers={"fused": server},
            port=port,
            balancing={"r0": 0, "r64": 64},
            workloads=(SMALL,),
            start_timeout_s=30.0,
            run_timeout_s=30.0,
        ),
        **changes,
    )


@pytest.mark.parametrize("client", Client)
def test_servers_are_measured_one_after_the_other_and_stopped(tmp_path: Path, client: Client) -> None:
    of = plan(client=client)
    told: list[ServingRow | AccuracyRow] = []
    results = run(of, tmp_path, on_row=told.append)
    assert [type(row) for row in told] == [ServingRow, AccuracyRow] * 2
    first = told[0]
    assert isinstance(first, ServingRow)
    assert (first.balancing, first.completed, first.total_throughput) == ("r0", 3, 45000.0)
    assert first.e2e_ms == first.ttft_ms == {"mean": 3.0, "median": 2.0, "p99": 9.0}
    accuracy = told[1]
    assert isinstance(accuracy, AccuracyRow)
    assert accuracy.exact_match == {"strict-match": 0.95, "flexible-extract": 0.96}
    assert (tmp_path / "fused-r64.log").read_text().startswith("redundant experts: 64\n")
    text = "\n".join(report(json.loads(json.dumps(results))))
    assert "| fused | r64 | small | 45,000 | 5,000 | 4.900 | 3.0 / 2.0 / 9.0 |" in text
    assert "| fused | r0 | strict-match 0.9500, flexible-extract 0.9600 |" in text


def test_what_a_server_has_started_ends_with_it(tmp_path: Path) -> None:
    of = plan(balancing={"r0": 0}, workloads=(), gsm8k=False)
    before = _sleepers()
    run(of, tmp_path, on_row=lambda row: None)
    deadline = time.monotonic() + 10
    while _sleepers() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _sleepers() - before


def _sleepers() -> set[str]:
    listed = subprocess.run(["ps", "-eo", "pid,stat,args"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if "SIG_IGN" in line and line.split()[1][0] != "Z"}


def test_a_server_that_does_not_start_is_an_error_with_its_log(tmp_path: Path) -> None:
    of = plan()
    with pytest.raises(ServingError, match="no such model"):
        run(replace(of, servers={"fused": f"{of.servers['fused']} dies"}), tmp_path, on_row=lambda row: None)


def test_a_server_that_ends_under_a_workload_is_named_as_the_cause(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"the server has ended by itself.*redundant experts: 0"):
        run(plan(model="that ends the server"), tmp_path, on_row=lambda row: None)


def test_a_server_that_does_not_answer_in_time(tmp_path: Path) -> None:
    of = plan(servers={"fused": f"{sys.executable} -c 'import time; time.sleep(60)'"}, start_timeout_s=0.5)
    with pytest.raises(ServingError, match="does not answer within"):
        run(of, tmp_path, on_row=lambda row: None)


def test_requests_that_were_not_completed_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="got 2 requests; expected 3"):
        run(plan(model="that loses a request"), tmp_path, on_row=lambda row: None)


def test_a_client_that_fails_is_an_error_with_its_log(tmp_path: Path) -> None:
    dataset = Workload(name="x", num_prompts=1, concurrency=1, dataset="talks.json")
    with pytest.raises(ServingError, match="AssertionError"):
        run(plan(client=Client.VLLM, workloads=(dataset,)), tmp_path, on_row=lambda row: None)


def test_clients_that_are_missing_are_named_before_a_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else object())
    with pytest.raises(BackendUnavailableError, match=r"lm_eval\[api\]"):
        run(plan(), tmp_path, on_row=lambda row: None)
    assert not list(tmp_path.iterdir())


def test_what_a_plan_leaves_out_is_the_seeds(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"model": "m", "client": "vllm", "servers": {"a": "serve {model} {{}} {redundant}"}}))
    read = ServingPlan.read(file)
    assert (read.workloads, dict(read.balancing), read.gsm8k) == (SEED_WORKLOADS, SEED_BALANCING, True)
    assert read.command("a", 64) == ["serve", "m", "{}", "64"]


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "can't be read"),
        ("[]", "got list"),
        ('{"model": "m", "client": "vllm"}', "expected client, model, servers"),
        ('{"model": "m", "client": "other", "servers": {}}', "other"),
        ('{"model": "m", "client": "vllm", "servers": {}, "workloads": [{"nam": 1}]}', "nam"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        ServingPlan.read(file)


def test_a_placeholder_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="rank"):
        replace(plan(), servers={"a": "serve {rank}"}).command("a", 0)


def options_of(command: list[str]) -> set[str]:
    return {word for word in command if word.startswith("--")}


@pytest.mark.parametrize("client", Client)
def test_the_stand_ins_take_every_option_that_is_passed(client: Client) -> None:
    names = runpy.run_path(str(STAND_IN / CLIENTS[client]))
    known = {*names["OPTIONS"], *names.get("SWITCHES", ())}
    of = plan(client=client)
    for workload in (SMALL, replace(SMALL, dataset="talks.json")):
        assert options_of(client_command(of, workload, Path("result.json"))) <= known
    lm_eval = runpy.run_path(str(STAND_IN / "lm_eval/__main__.py"))
    assert options_of(gsm8k_command(of, Path("folder"))) <= {*lm_eval["OPTIONS"]}

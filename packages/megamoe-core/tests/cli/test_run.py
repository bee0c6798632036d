"""`megamoe run`, the main job, on the reference backend: what it computes, what it prints, how it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megamoe.checkpoint import TensorFiles, find_layer
from megamoe.cli.job import check_devices
from megamoe.errors import ConfigError
from megamoe.problem import MoEProblem
from megamoe.reference.oracle import oracle
from megamoe.registry import select_backend
from megamoe.schedule.device_spec import H200

STAGES = ["quantize_input", "route", "dispatch", "gemm1", "swiglu_quant", "gemm2", "p2p", "combine"]
Call = Callable[..., object]
Paths = dict[str, Path]


def test_fp8_blocks_over_four_ranks_with_uneven_tokens(megamoe: Call, checkpoints: Paths) -> None:
    path = checkpoints["deepseek-v3"]
    args = ("--ep", 4, "--tokens", "33,0,1,64", "--transport", "fp8_blockwise_1x32", "--repeats", 2, "--json")
    report = megamoe("run", "--checkpoint", path, "--backend", "reference", *args).json
    assert report["passed"]
    assert report["rel_l2"] < 0.06
    assert report["calc_diff"] < 0.002
    assert report["weights"] == "as stored (fp8_128x128)"
    assert (report["problem"]["quant"], report["problem"]["ep_size"], report["problem"]["top_k"]) == ("a8w8", 4, 2)
    assert list(report["stages"]) == STAGES
    num_tokens = 33 + 0 + 1 + 64
    rows = {name: stage["rows"] for name, stage in report["stages"].items()}
    assert rows["quantize_input"] == rows["combine"] == num_tokens
    assert all(rows[name] == 2 * num_tokens for name in ("dispatch", "gemm1", "swiglu_quant", "gemm2", "p2p"))
    assert report["stages"]["quantize_input"]["num_bytes"] == num_tokens * (256 + 256 // 128 * 4)
    assert report["stages"]["p2p"]["num_bytes"] == 2 * num_tokens * (256 + 256 // 32)
    assert sum(rank["received_rows"] for rank in report["ranks"]) == 2 * num_tokens
    assert [rank["weight_bytes"] for rank in report["ranks"]] == [2 * 3 * (256 * 128 + 2 * 4)] * 4
    # Each rounding adds: A1 alone before GEMM1, A2 too after it, the transport at the end.
    error = report["stage_rel_l2"]
    assert 0.01 < error["gemm1"] < error["swiglu_quant"] <= 1.05 * error["gemm2"]
    assert error["gemm2"] < error["combine"] == report["rel_l2"]


def test_mxfp4_with_biases_by_the_checkpoints_own_router(megamoe: Call, checkpoints: Paths) -> None:
    args = ("--ep", 2, "--mode", "a4w4", "--routing", "router", "--tokens", 48, "--repeats", 1, "--json")
    report = megamoe("run", "--checkpoint", checkpoints["gpt-oss"], *args).json
    assert report["passed"]
    assert 0.1 < report["rel_l2"] < 0.25
    assert report["problem"]["activation"] == "swiglu_oai"
    assert report["problem"]["swiglu_limit"] == 7.0
    assert report["problem"]["expert_bias"]
    assert report["routing"] == "router"


def test_bf16_experts_become_mxfp4_and_one_process_plays_eight_ranks(megamoe: Call, checkpoints: Paths) -> None:
    args = ("--ep", 8, "--virtual-ranks", "--mode", "a8w4", "--routing", "zipf:1.2", "--tokens", 16, "--repeats", 1)
    result = megamoe("run", "--checkpoint", *sorted(checkpoints["mixtral"].glob("*.safetensors")), *args)
    assert "bf16 -> mxfp4" in result.stdout
    assert "PASS relL2" in result.stdout
    assert all(stage in result.stdout for stage in STAGES)
    assert "experts" in result.stdout


def test_stages_are_in_order_where_a_rank_has_no_rows_and_dropped_ids_are_said(
    megamoe: Call, checkpoints: Paths, tmp_path: Path
) -> None:
    ids = torch.tensor([[7, 6], [8, -1], [5, -2]])  # all on the second rank; 8 and -2 are no expert's
    tensors = {"hidden_states": torch.randn(3, 256).bfloat16(), "topk_ids": ids, "topk_weights": torch.ones(3, 2)}
    save_file(tensors, tmp_path / "input.safetensors")
    args = ("--checkpoint", checkpoints["mixtral"], "--ep", 2, "--virtual-ranks", "--repeats", 2)
    result = megamoe("run", *args, "--input", tmp_path / "input.safetensors")
    where = [result.stdout.index(f"│ {stage} ") for stage in STAGES]
    assert where == sorted(where)
    assert "dropped in each call: 2 ids" in result.stdout
    assert "dropped" not in megamoe("run", *args, "--tokens", 4).stdout


def test_a_stage_that_was_not_counted_has_no_zeros(megamoe: Call, checkpoints: Paths) -> None:
    result = megamoe("run", "--checkpoint", checkpoints["mixtral"], "--tokens", 0, "--repeats", 1)
    (combine,) = [line for line in result.stdout.splitlines() if line.startswith("│ combine ")]
    assert combine.split("│")[2:5] == [" " * len(cell) for cell in combine.split("│")[2:5]]
    assert "counts no rows" not in result.stdout


def test_a_backend_that_counts_nothing_of_its_stages_is_named(
    megamoe: Call, checkpoints: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["megamoe.cli.run"], "stage_totals", lambda result: {})
    result = megamoe("run", "--checkpoint", checkpoints["mixtral"], "--tokens", 4, "--repeats", 1)
    assert "backend reference counts no rows, bytes or times of its stages" in result.stdout


@pytest.mark.parametrize("with_routing", [True, False])
def test_tokens_from_a_file_come_back_in_order(
    megamoe: Call, checkpoints: Paths, tmp_path: Path, with_routing: bool
) -> None:
    path, num_tokens = checkpoints["mixtral"], 11
    rng = torch.Generator().manual_seed(1)
    tensors = {"hidden_states": torch.randn(num_tokens, 256, generator=rng).bfloat16()}
    if with_routing:
        tensors["topk_ids"] = torch.randint(-1, 8, (num_tokens, 3), generator=rng).int()
        tensors["topk_weights"] = torch.randn(num_tokens, 3, generator=rng)
    save_file(tensors, tmp_path / "input.safetensors")
    args = ("--checkpoint", path, "--input", tmp_path / "input.safetensors", "--repeats", 1, "--json")
    outputs = []
    for ep_size in (1, 2):
        output = tmp_path / f"output-{ep_size}.safetensors"
        report = megamoe("run", *args, "--ep", ep_size, "--output", output, "--routing", "router").json
        assert report["num_tokens"] == ([11] if ep_size == 1 else [5, 6])
        assert report["routing"] == ("file" if with_routing else "router")
        outputs.append(load_file(output))
    assert torch.equal(outputs[0]["output"], outputs[1]["output"])  # the same bits at any EP size
    if with_routing:
        assert torch.equal(outputs[0]["topk_ids"], tensors["topk_ids"].long())
    layer = find_layer(TensorFiles.find([path]), 0)
    problem = MoEProblem(
        hidden_size=256,
        intermediate_size=128,
        num_experts=8,
        top_k=outputs[0]["topk_ids"].shape[1],
        num_max_tokens_per_rank=num_tokens,
        quant="bf16",
    )
    expected = oracle(
        problem,
        tensors["hidden_states"],
        outputs[0]["topk_ids"],
        outputs[0]["topk_weights"],
        [layer.load_experts(range(8))],
    )
    assert (outputs[0]["output"].float() - expected).norm() < 0.01 * expected.norm()


def test_input_of_higher_precision_is_rounded_and_a_line_says_so(
    megamoe: Call, checkpoints: Paths, tmp_path: Path
) -> None:
    exact = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
    outputs = []
    for hidden, says in ((exact, "are FP32: rounded to BF16"), (exact.half(), "are FP16"), (exact.bfloat16(), "")):
        file, output = tmp_path / "input.safetensors", tmp_path / "output.safetensors"
        save_file({"hidden_states": hidden}, file)
        args = ("--checkpoint", checkpoints["mixtral"], "--input", file, "--output", output, "--repeats", 1)
        stderr = megamoe("run", *args, "--no-check").stderr
        assert says in stderr
        assert bool(stderr) == bool(says)
        outputs.append(load_file(output)["output"])
    assert torch.equal(outputs[0], outputs[2])


def test_a_result_above_the_gate_fails(megamoe: Call, checkpoints: Paths, tmp_path: Path) -> None:
    hidden = torch.randn(4, 256)
    hidden[2, 5] = torch.nan
    save_file({"hidden_states": hidden.bfloat16()}, tmp_path / "input.safetensors")
    args = ("--checkpoint", checkpoints["mixtral"], "--input", tmp_path / "input.safetensors", "--repeats", 1)
    result = megamoe("run", *args, exit_code=1)
    assert "FAIL relL2 inf is not below 0.01" in result.stdout
    assert "PASS" not in result.stdout
    report = megamoe("run", *args, "--json", exit_code=1).json
    assert (report["passed"], report["rel_l2"], len(report["failures"])) == (False, None, 1)
    assert "PASS" not in megamoe("run", *args, "--no-check").stdout


BAD_INPUT = [
    pytest.param(["--layer", 3], "layer 3 holds no experts", id="layer"),
    pytest.param(["--ep", 3], "ep_size does not divide num_experts", id="ep"),
    pytest.param(["--mode", "a9w9"], "unknown quant", id="mode"),
    pytest.param(["--transport", "pigeon"], "unknown transport", id="transport"),
    pytest.param(["--tokens", "many"], "--tokens", id="tokens"),
    pytest.param(["--tokens", "1,2,3"], "--tokens", id="tokens per rank"),
    pytest.param(
        ["--tokens", 10**15], "num_max_tokens_per_rank * top_k is above", id="more tokens than can be counted"
    ),
    pytest.param(["--tokens", 10**9 // 2], "these tokens do not fit in memory", id="more tokens than fit in memory"),
    pytest.param(["--routing", "nowhere"], "or ep8-equivalent or router", id="routing"),
    pytest.param(["--routing", "zipf:x"], "Zipf", id="zipf"),
    pytest.param(["--routing", "ep8-equivalent", "--tokens", "1"], "ep8-equivalent", id="ep8-equivalent"),
    pytest.param(["--top-k", 17], "more picks than experts; got top_k 17", id="top_k"),
    pytest.param(["--backend", "abacus"], "backend abacus can't be used (not_installed)", id="backend"),
    pytest.param(["--config", "fastest"], "no such configuration", id="config"),
    pytest.param(["--act-format", "mxfp8"], "act_format is a choice of a8w4 only", id="act_format"),
    pytest.param(["--output", "/does/not/exist"], "--output can't be written", id="output"),
    pytest.param(["--output", "/tmp"], "--output can't be written", id="output is a directory"),
    pytest.param(["--seed", 2**41], "--seed", id="seed"),
    pytest.param(["--input", "/does/not/exist"], "input file /does/not/exist can't be read", id="input"),
]


def test_a_plan_for_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = MoEProblem(
        hidden_size=128, intermediate_size=128, num_experts=4, top_k=2, num_max_tokens_per_rank=8, ep_size=4
    )
    plan = replace(select_backend("reference").plan(problem), device=H200)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="fewer GPUs than ranks; got 2 GPUs; expected 4; .*--virtual-ranks"):
        check_devices(plan, virtual_ranks=False)
    check_devices(plan, virtual_ranks=True)
    monkeypatch.setenv("MEGAMOE_RANKS_PER_GPU", "2")
    check_devices(plan, virtual_ranks=False)


def test_the_output_never_replaces_the_checkpoint(megamoe: Call, checkpoints: Paths) -> None:
    (file, *_) = sorted(checkpoints["mixtral"].rglob("*.safetensors"))
    before = file.read_bytes()
    result = megamoe("run", "--checkpoint", checkpoints["mixtral"], "--output", file, exit_code=2)
    assert "would replace a file of the checkpoint" in result.stderr
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "args, message",
    [
        pytest.param(
            ["--backend", "reference", "--device", "isa"], "--device says where backend rocm runs", id="other"
        ),
        pytest.param(["--device", "isa", "--mode", "a8w8"], "backend rocm can't be used", id="mode"),
        pytest.param(["--device", "mi355x"], "--device is no device of megamoe-rocm", id="unknown"),
    ],
)
def test_a_device_that_would_be_passed_over_is_refused(
    megamoe: Call, checkpoints: Paths, monkeypatch: pytest.MonkeyPatch, args: list[object], message: str
) -> None:
    monkeypatch.setenv("MEGAMOE_ROCM_DEVICE", "gfx950")  # what --device sets is put back
    result = megamoe("run", "--checkpoint", checkpoints["mixtral"], *args, exit_code=2)
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("args, message", BAD_INPUT)
def test_bad_input_is_one_message_and_exit_code_2(
    megamoe: Call, checkpoints: Paths, args: list[object], message: str
) -> None:
    result = megamoe("run", "--checkpoint", checkpoints["mixtral"], *args, exit_code=2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    assert result.stdout == ""


def test_an_input_file_that_does_not_fit(megamoe: Call, checkpoints: Paths, tmp_path: Path) -> None:
    path = tmp_path / "input.safetensors"

    def message(*args: object, **tensors: torch.Tensor) -> str:
        save_file(tensors, path)
        command = ("run", "--checkpoint", checkpoints["mixtral"], "--input", path, *args)
        text: str = megamoe(*command, exit_code=2).stderr
        assert "Traceback" not in text
        return text

    hidden, ids, weights = torch.zeros(3, 256).bfloat16(), torch.zeros(3, 2).int(), torch.zeros(3, 2)
    assert "hidden size 128" in message(hidden_states=torch.zeros(3, 128).bfloat16())
    assert "holds no tokens" in message(tokens=hidden)
    assert "holds no tokens" in message(hidden_states=torch.zeros(3, 256).int())
    assert "don't fit together" in message(hidden_states=hidden, topk_ids=ids)
    assert "don't fit together" in message(hidden_states=hidden, topk_ids=ids[:2], topk_weights=weights[:2])
    assert "wrong dtype" in message(hidden_states=hidden, topk_ids=ids.float(), topk_weights=weights)
    assert "wrong dtype" in message(hidden_states=hidden, topk_ids=ids, topk_weights=weights.int())
    assert "exclude each other" in message("--tokens", 8, hidden_states=hidden)
    assert "--top-k contradicts" in message("--top-k", 3, hidden_states=hidden, topk_ids=ids, topk_weights=weights)


def test_an_error_of_a_rank_is_told_as_its_own(megamoe: Call, checkpoints: Paths, tmp_path: Path) -> None:
    """A shard that lost a tensor is noticed by the rank that owns the expert, in its own process."""
    name = "model.layers.0.block_sparse_moe.experts.7.w2.weight"
    for file in checkpoints["mixtral"].glob("*.safetensors"):
        tensors = load_file(file)
        tensors.pop(name, None)
        save_file(tensors, tmp_path / file.name)
    result = megamoe("run", "--checkpoint", tmp_path, "--ep", 2, "--top-k", 2, exit_code=2)
    assert f"CheckpointError: tensor {name} is not in the checkpoint" in result.stderr
    assert "Traceback" not in result.stderr


def _ranks_with_shared_memory(parent: int) -> list[int]:
    """Processes of ranks that have mapped the group's memory."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in children if "memfd:" in Path(f"/proc/{pid}/maps").read_text()]


def test_a_run_out_of_time_names_the_option(checkpoints: Paths) -> None:
    command = [sys.executable, "-m", "megamoe", "run", "--checkpoint", checkpoints["mixtral"], "--ep", "2"]
    command += ["--backend", "reference", "--repeats", "10000000", "--time-limit", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert "not finished after 1 s" in ended.stderr
    assert "--time-limit" in ended.stderr


def test_a_killed_rank_ends_the_run_with_its_name(checkpoints: Paths) -> None:
    command = [sys.executable, "-m", "megamoe", "run", "--checkpoint", checkpoints["mixtral"], "--ep", "2"]
    command += ["--backend", "reference", "--repeats", "10000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while len(ranks := _ranks_with_shared_memory(process.pid)) < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        os.kill(ranks[1], signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "RankProcessError" in stderr
    assert "was killed by SIGKILL" in stderr
    assert "Traceback" not in stderr
    assert stdout == ""
    for pid in ranks:
        assert not Path(f"/proc/{pid}").exists()


def test_debug_shows_the_traceback(checkpoints: Paths) -> None:
    from typer.testing import CliRunner

    from megamoe.cli import app

    result = CliRunner().invoke(app, ["--debug", "run", "--checkpoint", str(checkpoints["mixtral"]), "--layer", "9"])
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback")
    assert "\nmegamoe.errors.CheckpointError: " in result.stderr


def test_top_k_comes_from_config_json_or_must_be_given(megamoe: Call, checkpoints: Paths, tmp_path: Path) -> None:
    for file in checkpoints["mixtral"].glob("*.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    result = megamoe("run", "--checkpoint", tmp_path, exit_code=2)
    assert "--top-k" in result.stderr
    (tmp_path / "config.json").write_text(json.dumps({"num_experts_per_tok": 5}))
    report = megamoe("plan", "--checkpoint", tmp_path, "--ep", 1, "--backend", "reference", "--json").json
    assert report["plans"][0]["problem"]["top_k"] == 5

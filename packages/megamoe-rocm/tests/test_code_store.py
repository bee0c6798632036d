"""Code objects ahead of time: what a folder holds is found, checked, and byte for byte what the interpreter runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.usefixtures("toolchain")


@pytest.fixture(scope="module")
def problem():
    from megamoe.problem import MoEProblem

    return MoEProblem(
        hidden_size=512,
        intermediate_size=256,
        num_experts=4,
        top_k=2,
        num_max_tokens_per_rank=8,
        ep_size=2,
        quant="a4w4",
        transport="fp8_blockwise_1x32",
    )


@pytest.fixture(scope="module")
def launches(problem, toolchain: None):
    from megamoe_rocm.standard import Collector, collect

    collector = Collector()
    collect(problem, collector, config="m32")
    return list(collector.found.values())


@pytest.fixture(scope="module")
def store(launches, tmp_path_factory: pytest.TempPathFactory):
    from megamoe_rocm.code_store import build

    return build(tmp_path_factory.mktemp("code"), launches)


def zero_weights(problem):
    """A rank's experts."""
    from megamoe.tensors import make_weights

    experts, hidden, inter = problem.num_local_experts, problem.hidden_size, problem.intermediate_size

    def zeros(rows: int, columns: int):
        payload, scales = (torch.zeros(experts, rows, columns // part, dtype=torch.uint8) for part in (2, 32))
        return payload, scales + 127

    return make_weights(problem, zeros(2 * inter, hidden), zeros(hidden, inter), layout="packed")


def test_a_call_executes_what_the_folder_holds_and_compiling_again_gives_the_same_bytes(
    problem, store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter loads from the folder; so does a GPU. Nothing else is compiled."""
    from megamoe_rocm.code_store import CodeStore, code_key, compile_launch
    from megamoe_rocm.isa.device import Programs
    from megamoe_rocm.isa.session import EMULATED, open_emulated
    from megamoe_rocm.planning import make_plan

    found = {}

    def find(launch):
        found[code_key(launch)] = launch
        return CodeStore.open(store.folder).find(launch)

    tokens = torch.ones(4, problem.hidden_size, dtype=torch.bfloat16)
    ids, factors = torch.tensor([[0, 3]] * 4, dtype=torch.int32), torch.ones(4, 2)
    with open_emulated(make_plan(problem, EMULATED, config="m32"), programs=Programs(find)) as session:
        weights = [session.prepare(zero_weights(problem)) for _ in range(2)]
        session.forward([tokens] * 2, [ids] * 2, [factors] * 2, weights)
        executed = {code.name: code.sha256 for code in session.executed()}
    assert set(executed.values()) <= set(store.hashes.values())
    assert set(executed) >= {"dispatch_gemm1", "gemm2_p2p", "combine_rows"}
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")  # not from Triton's cache
    for key, launch in found.items():
        assert compile_launch(launch).sha256 == store.hashes[key]


def test_an_altered_file_is_refused(launches, store, tmp_path: Path) -> None:
    from megamoe_rocm.aot import CodeObjectError
    from megamoe_rocm.code_store import CodeStore, code_key

    launch = launches[0]
    for file in store.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    CodeStore.open(tmp_path).find(launch)
    file = (tmp_path / code_key(launch)).with_suffix(".hsaco")
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(CodeObjectError, match="is not the"):
        CodeStore.open(tmp_path).find(launch)


def test_another_launch_a_missing_folder_and_other_versions_are_named(launches, store, tmp_path: Path) -> None:
    from megamoe_rocm.aot import CodeObjectError
    from megamoe_rocm.code_store import MANIFEST, CodeStore

    launch = launches[0]
    with pytest.raises(CodeObjectError, match="megamoe-rocm compile"):
        store.find(replace(launch, num_warps=2))
    with pytest.raises(CodeObjectError, match="megamoe-rocm compile"):
        CodeStore.open(tmp_path)
    manifest = (store.folder / MANIFEST).read_text()
    (tmp_path / MANIFEST).write_text(manifest.replace('"triton": "', '"triton": "0'))
    with pytest.raises(CodeObjectError, match="other versions"):
        CodeStore.open(tmp_path)


def test_with_another_triton_what_is_packaged_is_found_and_the_rest_says_what_is_missing(
    launches, store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside a PyTorch that brings its own Triton."""
    import triton

    from megamoe_rocm import code_store
    from megamoe_rocm.aot import ToolchainError

    open_folder = code_store.CodeStore.open
    monkeypatch.setattr(code_store.CodeStore, "open", lambda: open_folder(store.folder))
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    found = code_store.find_or_compile(launches[0])
    assert found.sha256 == store.hashes[code_store.code_key(launches[0])]
    with pytest.raises(
        ToolchainError, match=r"no code object for this .* nor can it be .*got 3.6.0.*system-site-packages"
    ):
        code_store.find_or_compile(replace(launches[0], num_warps=2))


def test_what_a_kernel_is_compiled_for_is_in_its_key(launches) -> None:
    from megamoe_rocm.code_store import code_key

    launch = next(item for item in launches if item.kernel.__name__ == "gemm2_p2p")
    others = [
        replace(launch, constants={**launch.constants, "MAIN_LOOP": "portable"}),
        replace(launch, constants={**launch.constants, "BLOCK_N": 128}),
        replace(launch, arguments={**launch.arguments, "home_rows": torch.zeros(1, dtype=torch.int32)}),
        replace(launch, num_warps=8),
    ]
    assert len({code_key(item) for item in (launch, *others)}) == 5

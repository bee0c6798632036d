"""Documentation that names code: tests in docs/reliability.md, errors in docs/errors.md, pages in the navigation."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from megamoe import MoEProblem, env, errors
from megamoe.errors import MegaMoEError
from megamoe.reference.backend import ReferenceBackend
from megamoe.symm import InprocGroup
from megamoe.testing.cases import cases
from megamoe.testing.data import make_weights, shard
from megamoe.testing.threads import on_ranks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGES = ("megamoe-core", "megamoe-cuda", "megamoe-rocm")


def known_tests() -> dict[str, set[str]]:
    """Names of test functions by the name of their file, over all packages."""
    found: dict[str, set[str]] = {}
    for folder in (*(ROOT / "packages" / package for package in PACKAGES), ROOT / "tests"):
        for path in folder.rglob("test_*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            found.setdefault(path.stem, set()).update(name for name in names if name.startswith("test_"))
    return found


def test_every_fault_names_tests_that_exist() -> None:
    text = (DOCS / "reliability.md").read_text(encoding="utf-8")
    known = known_tests()
    named = re.findall(r"`(test_\w+)::(test_\w+)`", text)
    assert len(named) > 50
    assert [f"{module}::{name}" for module, name in named if name not in known.get(module, ())] == []
    ids = {case.id for device in ("cpu", "gpu") for case in cases(device)}  # type: ignore[arg-type]
    assert [case for case in re.findall(r"`test_matrix\[([\w.-]+)\]`", text) if case not in ids] == []


def test_every_fault_has_a_test() -> None:
    rows = [line for line in (DOCS / "reliability.md").read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    faults = [row for row in rows if not row.startswith(("|---", "| what happens"))]
    assert len(faults) > 40
    assert [row for row in faults if not re.search(r"`test_\w+(::test_\w+|\[[\w.-]+\])`", row.split("|")[3])] == []


def test_every_environment_variable_is_on_its_page() -> None:
    """With the meaning and the default that `megamoe.env` gives it, and no other."""
    assert env.__doc__ is not None
    page = (DOCS / "command-line.md").read_text(encoding="utf-8").partition("## Environment variables")[2]
    rows = [line for line in env.__doc__.splitlines() if line.startswith("|")]
    assert [match[1] for row in rows if (match := re.match(r"\| `(\w+)` ", row))] == list(env.VARIABLES)
    assert [line for line in page.splitlines() if line.startswith("|")] == rows


def error_classes() -> dict[str, ast.ClassDef]:
    """Every class below `MegaMoEError` in any package, by name; read, not imported: vendor packages need libraries."""
    classes = {
        node.name: node
        for package in PACKAGES
        for path in (ROOT / "packages" / package / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }

    def is_error(name: str) -> bool:
        return name == MegaMoEError.__name__ or (name in classes and any(map(is_error, bases(classes[name]))))

    return {name: node for name, node in classes.items() if is_error(name)}


def bases(node: ast.ClassDef) -> list[str]:
    return [base.id for base in node.bases if isinstance(base, ast.Name)]


ERRORS = error_classes()


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_in_the_catalogue(name: str) -> None:
    """With what its docstring says, its base, and something to do."""
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    entry = re.search(rf"^### {name}\n\n(.+?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert entry is not None, f"docs/errors.md has no entry for {name}"
    said = " ".join(entry[1].split())
    docstring = ast.get_docstring(ERRORS[name])
    assert docstring is not None
    assert " ".join(docstring.split("\n\n")[0].split()) in said
    if name != MegaMoEError.__name__:
        (base,) = bases(ERRORS[name])
        assert f"Is {'an' if base[0] in 'AEIOU' else 'a'} `{base}`." in said
    assert "**Do:**" in said


def test_what_the_catalogue_does_about_an_error_mends_a_session_of_two_ranks() -> None:
    """Rank 0 brings a token too many: each rank comes to the handler with another error, and the next call is right."""
    snippet = re.search(r"```python\n(.*?)```", (DOCS / "errors.md").read_text(encoding="utf-8"), re.DOTALL)
    assert snippet is not None
    code = compile(snippet[1], "errors.md", "exec")
    problem = MoEProblem(
        hidden_size=128,
        intermediate_size=128,
        num_experts=4,
        top_k=1,
        num_max_tokens_per_rank=4,
        ep_size=2,
        quant="bf16",
    )
    shares = shard(make_weights(problem, torch.device("cpu")), 2)
    backend = ReferenceBackend()

    def body(group: InprocGroup) -> tuple[list[bool], bool]:
        with backend.open(backend.plan(problem), group, timeout_s=20) as session:
            weights, failed, outputs = session.prepare(shares[group.rank]), [], []
            for num_tokens in (3, 5 if group.rank == 0 else 3, 3):
                x = torch.ones(num_tokens, 128, dtype=torch.bfloat16)
                ids, topk_weights = torch.zeros(num_tokens, 1, dtype=torch.int64), torch.ones(num_tokens, 1)
                names = {"session": session, "x": x, "topk_ids": ids, "topk_weights": topk_weights, "weights": weights}
                exec(code, names)  # noqa: S102  # of our own page
                outputs.append(names.get("y"))
                failed.append("y" not in names)
            return failed, torch.equal(outputs[0], outputs[-1])  # type: ignore[arg-type]

    assert on_ranks(2, body) == [([False, True, False], True)] * 2


def test_every_public_error_is_found() -> None:
    """By reading, as many as by importing."""
    imported = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, MegaMoEError)
    }
    assert imported < ERRORS.keys()


def test_the_catalogue_holds_no_other_errors() -> None:
    headings = re.findall(r"^### (\w+)$", (DOCS / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted(ERRORS)

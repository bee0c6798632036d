"""Which commit the installed packages were built from, so that a measurement can name it."""

from __future__ import annotations

import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("megamoe", "megamoe_cuda", "megamoe_rocm")
UNKNOWN = "unknown"


def current_commit() -> str:
    """Short commit of what is installed, with "-dirty" where files were changed, "unknown" where nothing says it.

    A wheel says what it was built from; of an editable installation git is asked. Packages of different commits are
    named, each with its own.
    """
    commits = {name: _commit_of(name) for name in PACKAGES if find_spec(name) is not None}
    if len(set(commits.values())) == 1:
        return commits[PACKAGES[0]]
    return ", ".join(f"{name} {commit}" for name, commit in commits.items())


def _commit_of(package: str) -> str:
    if find_spec(f"{package}._commit") is not None:  # written when a wheel is built; a checkout has none
        commit: str = import_module(f"{package}._commit").commit
        return commit
    file = str(import_module(package).__file__)
    git = ("git", "-C", str(Path(file).parent))
    try:
        # A checkout of something else may be around it, as around a virtual environment.
        _output(*git, "ls-files", "--error-unmatch", file)
        return _output(*git, "describe", "--always", "--dirty", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()

"""Build hook: a wheel or sdist says which commit it was built from, in a module `_commit` that no checkout has.

`megamoe.bench.commit` reads it. An editable installation gets none, since its commit changes: there git is asked. The
three packages have the same file; ci/check_lockstep.py compares them.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface[Any]):
    """Adds `_commit.py`, by which a source distribution that has one hands it on to its wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before each build; `version` is "standard" or "editable"."""
        self._folder = TemporaryDirectory()
        (package,) = (path.parent for path in Path(self.root, "src").glob("*/_version.py"))
        commit = None if version == "editable" or (package / "_commit.py").exists() else commit_of(self.root)
        if commit is not None:
            file = Path(self._folder.name, "_commit.py")
            file.write_text(f'commit = "{commit}"  # written by hatch_build.py\n', encoding="utf-8")
            place = package.relative_to(Path(self.root, "src") if self.target_name == "wheel" else self.root)
            build_data["force_include"][str(file)] = str(place / file.name)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called after each build."""
        self._folder.cleanup()


def commit_of(root: str) -> str | None:
    """Short commit, "-dirty" where files were changed; None where git is missing or does not have this file."""
    try:
        for command in (("ls-files", "--error-unmatch", __file__), ("describe", "--always", "--dirty", "--exclude=*")):
            ran = subprocess.run(["git", "-C", root, *command], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.strip()

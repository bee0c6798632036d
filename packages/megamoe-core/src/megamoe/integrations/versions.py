"""Engines change what adapters enter through, so an adapter runs with the releases that it was tested with only."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from megamoe.errors import ConfigError


def require_version(distribution: str, supported: str) -> None:
    """Refuse an engine outside of the range that its adapter was written for.

    Args:
        distribution: name on the package index, and of the extra of megamoe-core.
        supported: version specifiers, as in "transformers>=5.24,<5.25".

    Raises:
        ConfigError: it is not installed, or another release of it is.
    """
    hint = f'pip install "megamoe-core[{distribution}]"'
    try:
        found = version(distribution)
    except PackageNotFoundError:
        raise ConfigError(
            f"{distribution} is not installed", expected=f"{distribution}{supported}", hint=hint
        ) from None
    from packaging.specifiers import SpecifierSet  # every engine depends on it

    if not SpecifierSet(supported).contains(found, prereleases=True):
        raise ConfigError(
            f"MegaMoE's adapter was not written for this release of {distribution}",
            got=f"{distribution} {found}",
            expected=f"{distribution}{supported}",
            hint=hint,
        )

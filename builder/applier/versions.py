"""Names and versions of distributions."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from builder.applier.failures import EXIT_MISSING, EXIT_USAGE, ApplyError

if TYPE_CHECKING:
    from collections.abc import Mapping


def normalize(name: str) -> str:
    """A distribution name in its PEP 503 form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def version_matches(version: str, specifier: str) -> bool:
    """Whether a PEP 440 version is in a range; pre-releases and local versions are included.

    Raises:
        ApplyError: the version or the range is malformed, or neither ``packaging`` nor pip's copy
            of it can be imported.
    """
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        try:
            from pip._vendor.packaging.specifiers import SpecifierSet  # type: ignore[assignment]
        except ImportError:
            raise ApplyError(
                "this Python has neither 'packaging' nor pip, so versions cannot be compared",
                EXIT_MISSING,
                f"{sys.executable} -m ensurepip",
            ) from None
    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except ValueError as error:  # packaging's InvalidSpecifier and InvalidVersion
        raise ApplyError(
            f"version {version!r:.100} and range {specifier!r:.100}: {error!s:.200}",
            EXIT_USAGE,
        ) from None


def all_match(when: Mapping[str, str], packages: Mapping[str, str]) -> bool:
    """Whether every given package has a version in its range."""
    for name, specifier in when.items():
        version = packages.get(normalize(name))
        if version is None or not version_matches(version, specifier):
            return False
    return True

"""Where our data and the user's cache are."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_dir(name: str) -> Path:
    """``patches``, ``dockerfiles`` or ``mods``: inside an installed wheel, or in the checkout."""
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def in_checkout() -> bool:
    """Whether this is a checkout, where generated files belong, or an installed package."""
    return not (_PACKAGE / "_data").is_dir()


def package_file(*parts: str) -> Path:
    """A file that ships inside the ``builder`` package."""
    return _PACKAGE.joinpath(*parts)


def cache_dir() -> Path:
    """``SPARK_BUILD_CACHE``, or the platform's user cache directory."""
    named = os.environ.get("SPARK_BUILD_CACHE")
    if named:
        return Path(named).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("spark-build"))

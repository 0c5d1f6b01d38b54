"""Removes folders that became empty."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def prune(directory: Path, root: Path) -> None:
    """Remove a directory and its parents up to ``root`` while they are empty.

    An empty package directory would still be importable, as a namespace package.
    """
    while directory != root:
        try:
            directory.rmdir()
        except OSError:
            return
        directory = directory.parent


def drop_empty(directory: Path, root: Path) -> None:
    """Remove a directory and its parents up to ``root`` while they have only caches."""
    while directory != root:
        cache = directory / "__pycache__"
        if cache.is_dir() and not any(directory.glob("*.py")):
            shutil.rmtree(cache)
        try:
            directory.rmdir()
        except OSError:
            return
        directory = directory.parent

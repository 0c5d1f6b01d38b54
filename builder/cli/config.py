"""``spark-build config show``: every setting in use, and its source."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from builder import settings
from builder.common.console import print_json
from builder.common.document import Document, Part, Text, always
from builder.common.paths import cache_dir, data_dir
from builder.common.pypi import pip_index_url
from builder.layers.lock.file import lock_path


class Setting(Part, frozen=True):
    """One setting, as printed."""

    name: Text
    value: str
    source: Text
    meaning: Text


class Settings(Document, frozen=True, kw_only=True):
    """Every effective setting."""

    schema: Literal[2] = always(2)  # type: ignore[assignment]
    settings: tuple[Setting, ...]


def show_command(json: bool) -> None:
    """Print settings as name, value, source and meaning."""
    index = pip_index_url()
    lock = lock_path(Path.cwd())
    cache = settings.CACHE.name if settings.CACHE.value else "the platform's default"
    rows = (
        Setting("cache", str(cache_dir()), cache, settings.CACHE.meaning),
        Setting("patches", str(data_dir("patches")), "spark-build itself", "the built-in layers"),
        Setting(
            "index",
            "configured" if index else "default",
            "pip" if index else "pypi-simple",
            "the package index",
        ),
        Setting("lock", str(lock), "found" if lock.is_file() else "not found", "the lock file"),
        *map(_row, settings.VARIABLES),
    )
    if json:
        print_json(Settings(settings=rows))
        return
    for row in rows:
        print(f"{row.name:<29} {row.value:<40}  {row.source}: {row.meaning}")


def _row(variable: settings.Variable) -> Setting:
    value = "***" if variable.secret and variable.value else variable.value
    source = "environment" if variable.is_set else "not set"
    return Setting(variable.name, value, source, variable.meaning)

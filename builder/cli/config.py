"""``spark-build config show``: every effective setting, and where it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from builder import settings
from builder.lock.file import lock_path
from builder.pypi.index import pip_index_url
from builder.util.console import print_json
from builder.util.paths import cache_dir, data_dir


class Row(NamedTuple):
    """One setting, as it is printed."""

    name: str
    value: str
    source: str
    meaning: str


def show_command(json: bool) -> None:
    """Print settings as name, value, source and meaning."""
    index = pip_index_url()
    lock = lock_path(Path.cwd())
    cache = settings.CACHE.name if settings.CACHE.value else "the platform's default"
    rows = [
        Row("cache", str(cache_dir()), cache, settings.CACHE.meaning),
        Row("patches", str(data_dir("patches")), "spark-build itself", "the built-in layers"),
        Row(
            "index",
            "configured" if index else "default",
            "pip" if index else "pypi-simple",
            "the package index",
        ),
        Row("lock", str(lock), "found" if lock.is_file() else "not there", "the lock file"),
        *map(_row, settings.VARIABLES),
    ]
    if json:
        print_json({"schema": 2, "settings": [row._asdict() for row in rows]})
        return
    for row in rows:
        print(f"{row.name:<29} {row.value:<40}  {row.source}: {row.meaning}")


def _row(variable: settings.Variable) -> Row:
    value = "***" if variable.secret and variable.value else variable.value
    source = "environment" if variable.is_set else "not set"
    return Row(variable.name, value, source, variable.meaning)

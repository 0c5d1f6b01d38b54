"""Writes files whole or not at all, and cache files with their own digest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.applier.values import sha256_hex
from builder.common.hints import CACHE, ELSEWHERE, os_hint
from builder.common.leftovers import making
from builder.common.paths import cache_dir
from builder.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Write a cache file atomically; a full disk is reported."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with making(path) as partial:
            partial.write_bytes(data)
            partial.replace(path)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}",
            hint=os_hint(error, CACHE if path.is_relative_to(cache_dir()) else ELSEWHERE),
        ) from error


def write_entry(path: Path, data: bytes) -> None:
    """Write a cache file below a line with its own digest; a full disk is reported."""
    write_atomically(path, sha256_hex(data).encode() + b"\n" + data)


def read_entry(path: Path) -> bytes:
    """What :func:`write_entry` wrote.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: the file is damaged.
    """
    digest, _, data = path.read_bytes().partition(b"\n")
    if digest.decode() != sha256_hex(data):
        raise ValueError(f"{path} is damaged")
    return data

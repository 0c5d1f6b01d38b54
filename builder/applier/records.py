"""RECORD: which files a distribution owns (PyPA specification "Recording installed projects")."""

from __future__ import annotations

import base64
import csv
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.applier.failures import ApplyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.applier.trees import Distribution, Tree

INSTALLER = b"spark-build\n"


@dataclass(frozen=True)
class RecordRow:
    """One row of a RECORD file; ``sha256`` is hex, or None if the row has no hash."""

    path: str
    sha256: str | None
    size: int | None


def parse_record(data: bytes) -> list[RecordRow]:
    """Read a RECORD file (Python packaging's "Recording installed projects")."""
    rows = []
    for row in csv.reader(io.StringIO(data.decode("utf-8"))):
        if not row:
            continue
        path, digest, size = [*row, "", ""][:3]
        sha = None
        if digest.startswith("sha256="):
            raw = digest.removeprefix("sha256=")
            sha = base64.urlsafe_b64decode(raw + "=" * (-len(raw) % 4)).hex()
        rows.append(RecordRow(path, sha, int(size) if size else None))
    return rows


def recorded_paths(data: bytes) -> Iterator[str]:
    """Only the paths of a RECORD file, which is much faster."""
    return (row[0] for row in csv.reader(io.StringIO(data.decode("utf-8"))) if row)


def record_of(tree: Tree, dist: Distribution) -> list[RecordRow]:
    """The RECORD of an installed distribution.

    Raises:
        ApplyError: there is none, so the distribution's files are unknown.
    """
    data = tree.read(f"{dist.info_dir}/RECORD")
    if data is None:
        raise ApplyError(f"{dist.name} {dist.version} has no RECORD, so its files are unknown")
    return parse_record(data)

"""``spark-build.lock``: the pinned inputs of a project's builds.

One JSON file beside the project, sorted and one value a line.  For each request (layers, pull
requests, base, platform) it holds the base's digest, package versions and wheels, the digest of
each layer and of its files, and every input; pull requests are pinned once for the whole file.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from builder import settings
from builder.common.document import plain, read
from builder.common.hints import reason
from builder.common.paths import read_regular
from builder.common.pypi import write_atomically
from builder.errors import Exit, RemoteError, SparkBuildError
from builder.layers.lock.document import LockFile

if TYPE_CHECKING:
    from builder.common.documents.pulls import Pin
    from builder.layers.lock.document import LockEntry, Request


NAME = "spark-build.lock"
SCHEMA: Literal[1] = 1
#: Bytes of a lock that is read; one with ten requests has 60 kB.
_MOST_BYTES = 16 << 20


class _AnySchema(msgspec.Struct):
    schema: object = None


@dataclass
class Lock:
    """A lock file in memory."""

    path: Path
    pulls: dict[str, Pin] = field(default_factory=dict)
    entries: dict[str, LockEntry] = field(default_factory=dict)

    def data(self) -> bytes:
        """The bytes of the file: unused entries and pins are dropped.

        Raises:
            RemoteError: what an index or forge said cannot be locked.
        """
        used = {name for entry in self.entries.values() for name in entry.request.with_pr}
        pulls = {name: pin for name, pin in self.pulls.items() if name in used}
        value = plain(LockFile(schema=SCHEMA, pulls=pulls, locked=self.entries))
        try:  # what a forge or an index said is in it: never write what cannot be read again
            read(value, LockFile)
        except ValueError as error:
            raise RemoteError(
                f"{self.path} is not written: what was found is malformed: {error}"
            ) from None
        return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"

    def write(self) -> bool:
        """Write the file, whole or not at all; says whether it changed."""
        data = self.data()
        with contextlib.suppress(OSError, ValueError):
            if read_regular(self.path, _MOST_BYTES) == data:
                return False
        write_atomically(self.path, data)
        return True

    def of_layers(self, request: Request) -> list[LockEntry]:
        """Entries with the layers and pull requests of a request, whatever the base."""
        return [
            entry
            for entry in self.entries.values()
            if (entry.request.layers, entry.request.with_pr) == (request.layers, request.with_pr)
        ]


def project_root(start: Path) -> Path:
    """The nearest directory upwards that is a git checkout, else ``start`` itself."""
    start = start.resolve()
    return next((at for at in (start, *start.parents) if (at / ".git").exists()), start)


def lock_path(start: Path) -> Path:
    """Where the lock is, or would be written.

    ``SPARK_BUILD_LOCK``, else the nearest lock from here up to the project's root, else the root.
    """
    named = settings.LOCK.value
    if named:
        return Path(named).expanduser()
    root = project_root(start)
    here = start.resolve()
    places = [here, *here.parents]
    places = places[: places.index(root) + 1]
    return next((p for p in (at / NAME for at in places) if p.is_file()), root / NAME)


def read_lock(path: Path) -> Lock | None:
    """Read a lock, or None where there is none.

    Raises:
        SparkBuildError: it is damaged, or of a newer spark-build (exit 9).
    """
    try:
        data = read_regular(path, _MOST_BYTES)
        schema = msgspec.json.decode(data, type=_AnySchema).schema
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, reason(error)) from None
    if isinstance(schema, int) and schema != SCHEMA:
        raise SparkBuildError(
            f"{path} has schema {schema}, this spark-build knows {SCHEMA}",
            Exit.STALE,
            hint="install a newer spark-build",
        )
    try:
        found = msgspec.json.decode(data, type=LockFile)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    for key, entry in found.locked.items():
        if entry.request.key != key:
            raise _damaged(path, f"the entry {key!r} is for {entry.request.key!r}")
    return Lock(path, found.pulls, found.locked)


def _damaged(path: Path, why: str) -> SparkBuildError:
    hint = "restore it, or remove it and lock again: spark-build lock --layers L --base BASE"
    return SparkBuildError(f"{path} cannot be used: {why}", Exit.STALE, hint=hint)

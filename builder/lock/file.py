"""``spark-build.lock``: what a project's builds are made of, so that the next is made of it too.

One JSON file beside the project, sorted and one value a line.  For each request (layers, pull
requests, base, platform) it holds the base's digest, package versions and wheels, the digest of
each layer and of its files, and every input; pull requests are pinned once for the whole file.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder import settings
from builder.errors import Exit, SparkBuildError, UsageError
from builder.forge.pin import read_pins
from builder.pypi.index import write_atomically
from builder.util.documents import plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from builder.documents.pulls import Pin

NAME = "spark-build.lock"
SCHEMA = 1
#: What the files of facts beside the lock are called (``lockfacts.py``).
FACTS_NAME = re.compile(r"base-[0-9a-f]{12}\.json\.gz")

Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for: the words of ``--layers`` and ``--with-pr``, and what they are for."""

    layers: tuple[str, ...]
    with_pr: tuple[str, ...]
    base: str
    platform: str
    python: str

    @property
    def key(self) -> str:
        """The request in one line; no two requests share it."""
        what = " + ".join([*filter(None, [",".join(self.layers)]), *self.with_pr])
        return f"{what} on {self.base} for {self.platform}, Python {self.python}"

    def as_json(self) -> dict[str, Any]:
        """The request as it stands in the lock."""
        return {
            "layers": list(self.layers),
            "with-pr": list(self.with_pr),
            "base": self.base,
            "platform": self.platform,
            "python": self.python,
        }

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Request:
        """The request of an entry."""
        asked = entry["request"]
        return cls(
            layers=tuple(asked["layers"]),
            with_pr=tuple(asked["with-pr"]),
            base=asked["base"],
            platform=asked["platform"],
            python=asked["python"],
        )


@dataclass
class Lock:
    """A lock file in memory."""

    path: Path
    pulls: dict[str, Pin] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)

    def data(self) -> bytes:
        """The bytes of the file: entries and pins that nothing asks for any more are gone."""
        used = {name for entry in self.entries.values() for name in entry["request"]["with-pr"]}
        value = {
            "schema": SCHEMA,
            "pulls": {name: plain(pin) for name, pin in self.pulls.items() if name in used},
            "locked": self.entries,
        }
        return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"

    def write(self) -> bool:
        """Write the file, whole or not at all; says whether it changed."""
        data = self.data()
        if self.path.is_file() and self.path.read_bytes() == data:
            return False
        write_atomically(self.path, data)
        return True

    def of_layers(self, request: Request) -> list[Entry]:
        """Entries with the layers and pull requests of a request, whatever the base."""
        return [
            entry
            for entry in self.entries.values()
            if (Request.of(entry).layers, Request.of(entry).with_pr)
            == (request.layers, request.with_pr)
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
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    try:
        if raw["schema"] != SCHEMA:
            raise SparkBuildError(
                f"{path} has schema {raw['schema']}, this spark-build knows {SCHEMA}",
                Exit.STALE,
                hint="install a newer spark-build",
            )
        entries = dict(raw["locked"])
        for key, entry in entries.items():
            if Request.of(entry).key != key:
                raise _damaged(path, f"the entry {key!r} is for {Request.of(entry).key!r}")
            for wheel in (*entry["base"].get("wheels", ()), *entry["inputs"]):
                wheel["sha256"]
            _ = entry["base"]["kind"], entry["base"]["digest"]
            dict(entry["base"]["packages"])
            _check_facts(entry["base"].get("facts"))
            [(layer["name"], layer["digest"], dict(layer["files"])) for layer in entry["layers"]]
        return Lock(path, read_pins(raw["pulls"], "pulls"), entries)
    except UsageError as error:
        raise _damaged(path, str(error)) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None


def _check_facts(pin: Mapping[str, Any] | None) -> None:
    """Refuse a pin of facts of another form, such as one that names a file elsewhere."""
    if pin is None:
        return
    if not FACTS_NAME.fullmatch(pin["file"]):
        raise ValueError(f"{pin['file']!r} is no file of facts")
    for key in ("sha256", "layers"):
        if not re.fullmatch("[0-9a-f]{64}", pin[key]):
            raise ValueError(f"{key} {pin[key]!r}")
    if not isinstance(pin["depth"], int) or pin["depth"] < 1:
        raise ValueError(f"depth {pin['depth']!r}")


def _damaged(path: Path, why: str) -> SparkBuildError:
    hint = "restore it, or remove it and lock again: spark-build lock --layers L --base BASE"
    return SparkBuildError(f"{path} cannot be used: {why}", Exit.STALE, hint=hint)

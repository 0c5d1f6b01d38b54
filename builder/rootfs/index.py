"""What one layer holds, in a file of the cache: entries, whiteouts, and the bytes of small files.

A layer never changes, so its index is made once and named by the layer's digest.  It is an SQLite
database: written in one pass in constant memory, read by single look-ups.
"""

from __future__ import annotations

import sqlite3
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from builder.rootfs import limits
from builder.rootfs.tar import DIR, HARDLINK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

#: Changes when the code makes something else of the same layer.
VERSION = 1
#: A directory that the layer writes into without an entry of its own.
IMPLICIT = "implicit"
WHITEOUT, OPAQUE = "whiteout", "opaque"

_SCHEMA = """
CREATE TABLE entry (path BLOB PRIMARY KEY, parent BLOB, kind TEXT, size INTEGER, mode INTEGER,
                    uid INTEGER, gid INTEGER, link BLOB, sha256 TEXT) WITHOUT ROWID;
CREATE TABLE hidden (path BLOB, parent BLOB, kind TEXT, PRIMARY KEY (path, kind)) WITHOUT ROWID;
CREATE TABLE content (sha256 TEXT PRIMARY KEY, packed BLOB) WITHOUT ROWID;
CREATE TABLE unpacked (diff_id TEXT);
"""


_SELECT = "SELECT path, kind, size, mode, uid, gid, link, sha256 FROM entry"


def _key(path: str) -> bytes:
    """Names need not be UTF-8, which SQLite's text must be."""
    return path.encode("utf-8", "surrogateescape")


def _text(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def _range(directory: str) -> tuple[bytes, bytes]:
    """Where the names of what lies below a directory begin and end."""
    if not directory:
        return b"\x01", b"\xff" * limits.PATH_BYTES
    return _key(directory) + b"/", _key(directory) + b"0"  # "0" follows "/"


def parent_of(path: str) -> str:
    """The directory of a relative path; '' is the root."""
    return path.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Row:
    """One entry of a layer.  ``sha256`` is hex; empty where the bytes were not read."""

    path: str
    kind: str
    size: int = 0
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    link: str = ""
    sha256: str = ""


class LayerWriter:
    """Fills the index of one layer in the order of its tar; later entries win, as on a disk."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute("BEGIN")
        for statement in _SCHEMA.split(";"):
            self._db.execute(statement)
        # not part of the index: what earlier hard links of this layer lead to
        self._db.execute("CREATE TEMP TABLE shared (path BLOB PRIMARY KEY) WITHOUT ROWID")
        self._any_shared = False
        self._parent = ""

    def kind(self, path: str) -> str | None:
        """What is at a path so far."""
        row = self._db.execute("SELECT kind FROM entry WHERE path = ?", (_key(path),)).fetchone()
        return None if row is None else str(row[0])

    def add(self, row: Row) -> None:
        """Add an entry.

        Raises:
            NotADirectoryError: the layer itself put something else where its directory would be.
            FileExistsError: a hard link of the layer leads to what this would replace: it would
                keep bytes that no name leads to any more.
        """
        self._add_parents(parent_of(row.path))
        if self._any_shared:
            self._keep_shared(row)
        if row.kind == HARDLINK:
            words = (_key(row.link),)
            self._db.execute("INSERT OR IGNORE INTO temp.shared VALUES (?)", words)
            self._any_shared = True
        if row.kind != DIR and self.kind(row.path) in (DIR, IMPLICIT):
            low, high = _range(row.path)
            self._db.execute("DELETE FROM entry WHERE path >= ? AND path < ?", (low, high))
            self._parent = ""
        self._insert(row)

    def _keep_shared(self, row: Row) -> None:
        low, high = _range(row.path)
        words = (_key(row.path), low, high if row.kind != DIR else low)
        found = self._db.execute(
            "SELECT path FROM temp.shared WHERE path = ? OR (path >= ? AND path < ?)", words
        ).fetchone()
        if found is not None:
            raise FileExistsError(_text(found[0]))

    def _add_parents(self, directory: str) -> None:
        if not directory or directory == self._parent:
            return
        missing = directory
        while missing and (kind := self.kind(missing)) in (None, DIR, IMPLICIT):
            if kind is not None:
                break
            self._insert(Row(missing, IMPLICIT))
            missing = parent_of(missing)
        else:
            if missing:
                raise NotADirectoryError(missing)
        self._parent = directory

    def _insert(self, row: Row) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                _key(row.path), _key(parent_of(row.path)), row.kind, row.size, row.mode,
                row.uid, row.gid, _key(row.link), row.sha256,
            ),
        )  # fmt: skip

    def hide(self, path: str, kind: str) -> None:
        """Hide what lower layers have at a path (``WHITEOUT``) or below it (``OPAQUE``)."""
        row = (_key(path), _key(parent_of(path)), kind)
        self._db.execute("INSERT OR IGNORE INTO hidden VALUES (?, ?, ?)", row)

    def keep(self, sha256: str, data: bytes) -> None:
        """Keep a file's bytes."""
        self._db.execute(
            "INSERT OR IGNORE INTO content VALUES (?, ?)", (sha256, zlib.compress(data, 1))
        )

    def finish(self, diff_id: str) -> None:
        """Make it whole; ``diff_id`` is the digest of the layer's tar."""
        self._db.execute("INSERT INTO unpacked VALUES (?)", (diff_id,))
        self._db.execute("CREATE INDEX by_parent ON entry (parent)")
        self._db.execute("CREATE INDEX hidden_by_parent ON hidden (parent)")
        self._db.execute(f"PRAGMA user_version = {VERSION}")
        self._db.execute("COMMIT")
        self.close()

    def close(self) -> None:
        """Let go of the file, finished or not."""
        self._db.close()


class LayerIndex:
    """A finished index."""

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            sqlite3.DatabaseError: the file is not there, damaged, or of another version.
        """
        name = f"file:{quote(str(path))}?mode=rw"  # never a new, empty file
        self._db = sqlite3.connect(name, uri=True, isolation_level=None)
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            self._db.close()
            raise sqlite3.DatabaseError(f"version {version}")
        self._sealed: dict[str, bool] = {"": self._has(OPAQUE, "")}

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def diff_id(self) -> str:
        """The digest of the layer's tar; ``""`` in an index of before it was kept."""
        try:
            row = self._db.execute("SELECT diff_id FROM unpacked").fetchone()
        except sqlite3.OperationalError:
            return ""
        return "" if row is None else str(row[0])

    def row(self, path: str) -> Row | None:
        """The entry at a path."""
        return next(self._rows(f"{_SELECT} WHERE path = ?", _key(path)), None)

    def below(self, directory: str) -> Iterator[Row]:
        """Every entry below a directory, sorted by name."""
        low, high = _range(directory)
        return self._rows(f"{_SELECT} WHERE path >= ? AND path < ? ORDER BY path", low, high)

    def children(self, directory: str) -> Iterable[str]:
        """Names directly in a directory."""
        query = "SELECT path FROM entry WHERE parent = ? AND path != ''"
        return [_name(row[0]) for row in self._db.execute(query, (_key(directory),))]

    def whiteouts(self, directory: str) -> Iterable[str]:
        """Names that are hidden in a directory of the layers below."""
        query = "SELECT path FROM hidden WHERE parent = ? AND kind = ?"
        return [_name(row[0]) for row in self._db.execute(query, (_key(directory), WHITEOUT))]

    def hidden_below(self, directory: str) -> list[tuple[str, str]]:
        """Path and kind (``WHITEOUT`` or ``OPAQUE``) of what is hidden below a directory."""
        low, high = _range(directory)
        query = "SELECT path, kind FROM hidden WHERE path >= ? AND path < ?"
        return [(_text(path), kind) for path, kind in self._db.execute(query, (low, high))]

    def hides(self, path: str) -> bool:
        """Whether nothing of the layers below shows at this path, or through it."""
        return self.seals(parent_of(path)) or self._has(WHITEOUT, path)

    def seals(self, directory: str) -> bool:
        """Whether nothing of the layers below shows below this directory."""
        known = self._sealed.get(directory)
        if known is None:
            row = self.row(directory)
            known = (
                self.seals(parent_of(directory))
                or self._has(WHITEOUT, directory)
                or self._has(OPAQUE, directory)
                or (row is not None and row.kind not in (DIR, IMPLICIT))
            )
            self._sealed[directory] = known
        return known

    def content(self, sha256: str) -> bytes | None:
        """The bytes of a file that was kept."""
        query = "SELECT packed FROM content WHERE sha256 = ?"
        row = self._db.execute(query, (sha256,)).fetchone()
        return None if row is None else zlib.decompress(row[0])

    def keep(self, sha256: str, data: bytes) -> None:
        """Keep a file's bytes that were read later."""
        row = (sha256, zlib.compress(data, 1))
        self._db.execute("INSERT OR IGNORE INTO content VALUES (?, ?)", row)

    def _has(self, kind: str, path: str) -> bool:
        query = "SELECT 1 FROM hidden WHERE path = ? AND kind = ?"
        return self._db.execute(query, (_key(path), kind)).fetchone() is not None

    def _rows(self, query: str, *values: bytes) -> Iterator[Row]:
        for path, kind, size, mode, uid, gid, link, sha256 in self._db.execute(query, values):
            yield Row(_text(path), kind, size, mode, uid, gid, _text(link), sha256)


def _name(key: bytes) -> str:
    return _text(key).rpartition("/")[2]

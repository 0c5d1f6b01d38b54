"""The index of one layer in the cache: entries, whiteouts, and the bytes of small files.

A layer never changes, so it is read once, and its index is named by the layer's digest.  It is an
SQLite database: written in one pass in constant memory, read by single look-ups.
"""

from __future__ import annotations

import hashlib
import sqlite3
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import quote

from builder.applier.receipts import STATE_DIR
from builder.common.deflate import pack, unpack
from builder.errors import RemoteError
from builder.images.rootfs import limits
from builder.images.rootfs.tar import (
    DIR,
    FILE,
    HARDLINK,
    SYMLINK,
    WHITEOUT_PREFIX,
    LayerTar,
    Member,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from builder.images.rootfs.tar import Unpacked

#: Version; increased when the code indexes the same layer differently.
VERSION = 3
#: A directory that the layer writes into without an entry for it.
IMPLICIT = "implicit"
WHITEOUT, OPAQUE = "whiteout", "opaque"

#: ``content`` has row ids: without them SQLite reads a whole file at each step of a look-up.
_SCHEMA = """
CREATE TABLE entry (path BLOB PRIMARY KEY, parent BLOB, kind TEXT, size INTEGER, mode INTEGER,
                    uid INTEGER, gid INTEGER, link BLOB, sha256 TEXT) WITHOUT ROWID;
CREATE TABLE hidden (path BLOB, parent BLOB, kind TEXT, PRIMARY KEY (path, kind)) WITHOUT ROWID;
CREATE TABLE implied (path BLOB PRIMARY KEY, kind TEXT) WITHOUT ROWID;
CREATE TABLE content (sha256 TEXT PRIMARY KEY, packed BLOB);
CREATE TABLE unpacked (diff_id TEXT);
"""


#: Number of entries or whiteouts up to which they are held in memory.
_SMALL = 1000
_SELECT = "SELECT path, kind, size, mode, uid, gid, link, sha256 FROM entry"


def _key(path: str) -> bytes:
    """Names need not be UTF-8, which SQLite's text must be."""
    return path.encode("utf-8", "surrogateescape")


def _text(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def _range(directory: str) -> tuple[bytes, bytes]:
    """The range of names below a directory."""
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


class Contradiction(Exception):
    """Container runtimes refuse a layer, or unpack it differently; the message says where."""


class LayerWriter:
    """Fills the index of one layer in the order of its tar; later entries win, as on a disk.

    A runtime either unpacks a layer into its own folder for an overlay file system,
    or onto the files of the layers below.  A layer for which the two give different
    results is refused.
    """

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute("BEGIN")
        for statement in _SCHEMA.split(";"):
            self._db.execute(statement)
        # not part of the index: targets of earlier hard links in this layer
        self._db.execute("CREATE TEMP TABLE shared (path BLOB PRIMARY KEY) WITHOUT ROWID")
        self._any_shared = False
        self._parent = ("", "")

    def kind(self, path: str) -> str | None:
        """The kind of entry at a path so far."""
        row = self._db.execute("SELECT kind FROM entry WHERE path = ?", (_key(path),)).fetchone()
        return None if row is None else str(row[0])

    def add(self, row: Row) -> None:
        """Add an entry.

        Raises:
            Contradiction: the layer has another entry in place of the parent directory, or
                the entry replaces or links to something invalid.
        """
        before = self.kind(row.path)
        if before is not None and (before in (DIR, IMPLICIT)) != (row.kind == DIR):
            # containerd restores folders' metadata at the end; an overlay shows the old one below a
            # new folder
            raise Contradiction(f"it has /{row.path} as {before} and as {row.kind}")
        self._add_parents(parent_of(row.path), FILE)
        if row.kind == DIR:
            self._check_folder(row.path)
        if self._any_shared:
            self._keep_shared(row.path)
        if row.kind == HARDLINK:
            row = self._shared(row)
        self._insert(row)

    def _check_folder(self, path: str) -> None:
        if self._has_hidden(WHITEOUT, path):
            raise Contradiction(f"it has a whiteout of /{path}, and a folder there")

    def _shared(self, row: Row) -> Row:
        """Resolve a hard link to the entry with the bytes, within the layer."""
        target = None if row.link == row.path else self._target(row.link)
        if target is None:
            raise Contradiction(
                f"/{row.path} is a hard link to /{row.link}, which is not an earlier file of the "
                f"layer"
            )
        self._db.execute("INSERT OR IGNORE INTO temp.shared VALUES (?)", (_key(target),))
        self._any_shared = True
        return replace(row, link=target)

    def _target(self, path: str) -> str | None:
        query = "SELECT kind, link FROM entry WHERE path = ?"
        kind, link = self._db.execute(query, (_key(path),)).fetchone() or ("", b"")
        if kind == HARDLINK:
            return _text(link)
        return path if kind in (FILE, SYMLINK) else None

    def _keep_shared(self, path: str) -> None:
        query = "SELECT 1 FROM temp.shared WHERE path = ?"
        if self._db.execute(query, (_key(path),)).fetchone() is not None:
            raise Contradiction(f"it replaces /{path}, which already has a hard link")

    def _add_parents(self, directory: str, kind: str) -> None:
        """Record parent folders without an entry, of an entry (``FILE``) or a whiteout."""
        if not directory or (directory, kind) == self._parent:
            return
        above = directory
        while above and (there := self.kind(above)) != DIR:
            if there not in (None, IMPLICIT):
                raise Contradiction(
                    f"it puts files below /{above}, which is not a directory in this layer"
                )
            if there is None:
                self._check_folder(above)
                self._insert(Row(above, IMPLICIT))
            elif self._implied(above) in (kind, FILE):
                break
            self._db.execute("INSERT OR REPLACE INTO implied VALUES (?, ?)", (_key(above), kind))
            above = parent_of(above)
        self._parent = (directory, kind)

    def _implied(self, path: str) -> str | None:
        query = "SELECT kind FROM implied WHERE path = ?"
        row = self._db.execute(query, (_key(path),)).fetchone()
        return None if row is None else str(row[0])

    def _insert(self, row: Row) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                _key(row.path), _key(parent_of(row.path)), row.kind, row.size, row.mode,
                row.uid, row.gid, _key(row.link), row.sha256,
            ),
        )  # fmt: skip

    def hide(self, path: str, kind: str) -> None:
        """Hide what lower layers have at a path (``WHITEOUT``) or below it (``OPAQUE``).

        Raises:
            Contradiction: runtimes disagree on what it hides.
        """
        self._add_parents(path if kind == OPAQUE else parent_of(path), WHITEOUT)
        if kind == OPAQUE and not path:
            raise Contradiction("it hides everything below it, which overlayfs does not support")
        if kind == OPAQUE and self._any_implicit(path):
            raise Contradiction(f"it hides the contents of /{path} after it added folders there")
        if kind == WHITEOUT and (self.kind(path) is not None or self._has_hidden(kind, path)):
            raise Contradiction(f"it has a whiteout of its own /{path}")
        row = (_key(path), _key(parent_of(path)), kind)
        self._db.execute("INSERT OR IGNORE INTO hidden VALUES (?, ?, ?)", row)

    def _any_implicit(self, directory: str) -> bool:
        low, high = _range(directory)
        query = "SELECT 1 FROM entry WHERE path >= ? AND path < ? AND kind = ?"
        return self._db.execute(query, (low, high, IMPLICIT)).fetchone() is not None

    def _has_hidden(self, kind: str, path: str) -> bool:
        query = "SELECT 1 FROM hidden WHERE path = ? AND kind = ?"
        return self._db.execute(query, (_key(path), kind)).fetchone() is not None

    def keep(self, sha256: str, data: bytes) -> None:
        """Store a file's bytes."""
        self._db.execute("INSERT OR IGNORE INTO content VALUES (?, ?)", (sha256, pack(data)))

    def finish(self, diff_id: str, form: str = "") -> None:
        """Complete the index with the digest of the layer's tar, and how its blob is packed."""
        self._db.executemany("INSERT INTO unpacked VALUES (?)", [(diff_id,), (form,)])
        self._db.execute("CREATE INDEX by_parent ON entry (parent)")
        self._db.execute("CREATE INDEX hidden_by_parent ON hidden (parent)")
        self._db.execute(f"PRAGMA user_version = {VERSION}")
        self._db.execute("COMMIT")
        self.close()

    def close(self) -> None:
        """Close the file, finished or not."""
        self._db.close()


class LayerIndex:
    """The index of one layer."""

    def __init__(self, path: Path) -> None:
        """Open an index.

        Raises:
            sqlite3.DatabaseError: the file is missing, damaged, or has another version.
        """
        name = f"file:{quote(str(path))}?mode=rw"  # never a new, empty file
        self._db = sqlite3.connect(name, uri=True, isolation_level=None)
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            self._db.close()
            raise sqlite3.DatabaseError(f"version {version}")
        hidden = self._db.execute("SELECT kind, path FROM hidden LIMIT ?", (_SMALL,)).fetchall()
        self._hidden = set(hidden) if len(hidden) < _SMALL else None
        self._is_small = self._count() < _SMALL
        self._by_path: dict[str, Row] = {}
        self._sealed: dict[str, bool] = {"": self._has(OPAQUE, "")}

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def unpacked(self) -> tuple[str, str]:
        """The digest of the layer's tar, and how its blob is packed."""
        rows = self._db.execute("SELECT diff_id FROM unpacked ORDER BY rowid").fetchall()
        diff_id, form = (str(row[0]) for row in rows)
        return diff_id, form

    def row(self, path: str) -> Row | None:
        """The entry at a path."""
        if self._is_small:
            self._by_path = self._by_path or {row.path: row for row in self._rows(_SELECT)}
            return self._by_path.get(path)
        return next(self._rows(f"{_SELECT} WHERE path = ?", _key(path)), None)

    def implied(self) -> list[tuple[str, str]]:
        """Parent folders without an entry, of entries (``FILE``) or whiteouts, sorted."""
        query = "SELECT path, kind FROM implied ORDER BY path"
        return [(_text(path), kind) for path, kind in self._db.execute(query)]

    def below(self, directory: str) -> Iterator[Row]:
        """Every entry below a directory, sorted by name."""
        low, high = _range(directory)
        return self._rows(f"{_SELECT} WHERE path >= ? AND path < ? ORDER BY path", low, high)

    def children(self, directory: str) -> Iterable[str]:
        """Names directly in a directory."""
        query = "SELECT path FROM entry WHERE parent = ? AND path != x''"
        return [_name(row[0]) for row in self._db.execute(query, (_key(directory),))]

    def whiteouts(self, directory: str) -> Iterable[str]:
        """Names in a directory that whiteouts hide in lower layers."""
        query = "SELECT path FROM hidden WHERE parent = ? AND kind = ?"
        return [_name(row[0]) for row in self._db.execute(query, (_key(directory), WHITEOUT))]

    def hidden_below(self, directory: str) -> list[tuple[str, str]]:
        """Path and kind (``WHITEOUT`` or ``OPAQUE``) of whiteouts below a directory."""
        low, high = _range(directory)
        query = "SELECT path, kind FROM hidden WHERE path >= ? AND path < ?"
        return [(_text(path), kind) for path, kind in self._db.execute(query, (low, high))]

    def hides(self, path: str) -> bool:
        """Whether this path hides all lower layers at it and below it."""
        return self.seals(parent_of(path)) or self._has(WHITEOUT, path)

    def seals(self, directory: str) -> bool:
        """Whether this directory hides all lower layers below it."""
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

    def cuts(self, path: str) -> bool:
        """Whether it removes or replaces a parent directory of a path."""
        while path := parent_of(path):
            row = self.row(path)
            if self._has(WHITEOUT, path) or (row is not None and row.kind not in (DIR, IMPLICIT)):
                return True
        return False

    def content(self, sha256: str) -> bytes | None:
        """The stored bytes of a file."""
        query = "SELECT packed FROM content WHERE sha256 = ?"
        row = self._db.execute(query, (sha256,)).fetchone()
        return None if row is None else unpack(row[0])

    def has_content(self, sha256: str) -> bool:
        """Whether the bytes of a file are stored; unpacks nothing."""
        query = "SELECT 1 FROM content WHERE sha256 = ?"
        return self._db.execute(query, (sha256,)).fetchone() is not None

    def keep(self, sha256: str, data: bytes) -> None:
        """Store a file's bytes after the index was completed."""
        row = (sha256, pack(data))
        self._db.execute("INSERT OR IGNORE INTO content VALUES (?, ?)", row)

    def _count(self) -> int:
        """The number of entries, at most ``_SMALL``."""
        query = "SELECT count(*) FROM (SELECT 1 FROM entry LIMIT ?)"
        return int(self._db.execute(query, (_SMALL,)).fetchone()[0])

    def _has(self, kind: str, path: str) -> bool:
        if self._hidden is not None:
            return (kind, _key(path)) in self._hidden
        query = "SELECT 1 FROM hidden WHERE path = ? AND kind = ?"
        return self._db.execute(query, (_key(path), kind)).fetchone() is not None

    def _rows(self, query: str, *values: bytes) -> Iterator[Row]:
        for path, kind, size, mode, uid, gid, link, sha256 in self._db.execute(query, values):
            yield Row(_text(path), kind, size, mode, uid, gid, _text(link), sha256)


def _name(key: bytes) -> str:
    return _text(key).rpartition("/")[2]


# ------------------------------------------------------------------- reading a layer into its index


_OPAQUE_NAME = f"{WHITEOUT_PREFIX}{WHITEOUT_PREFIX}.opq"
#: Files of a ``.dist-info`` or ``.egg-info`` that list a distribution's files and entry points.
_INFO = ("METADATA", "RECORD", "WHEEL", "INSTALLER", "entry_points.txt", ".json")
#: Packages whose text files layers patch and verification reads; others are fetched
#: on request.
_PATCHED = ("vllm", "flashinfer", "nvidia_cutlass_dsl", "b12x")
_TEXT = (".py", ".pth", ".json", ".toml")
#: Settings of an environment, and commands, that verification reads in any folder.
_NAMED = ("pyvenv.cfg", "spark-verify", "vllm", "ld.so.preload", "pybuilddir.txt")
#: Users, and where libraries are.
_SYSTEM = ("etc/passwd", "etc/ld.so.conf", "etc/ld.so.cache")
_SMALL_FILE = 4 << 20


def scan(stream: Unpacked, writer: LayerWriter, where: str) -> None:
    """Add every member of a layer to its index.

    Raises:
        RemoteError: the layer is damaged, contradictory, or exceeds a limit.
    """
    tar = LayerTar(stream, where)
    try:
        for member in tar:
            _note(tar, member, writer, where)
    except Contradiction as error:
        raise RemoteError(
            f"{where}: {error}; image builders do not write such layers, and runtimes handle "
            f"them differently"
        ) from None


def worth_keeping(path: str, size: int) -> bool:
    """Whether a file's bytes are stored in the index, for identification, plans and ``static``.

    This depends on the end of the path: packages may be in any folder, and installed files
    may be hard links to earlier files, for example in the cache of ``uv``.
    """
    folder, _, name = path.rpartition("/")
    folders = folder.split("/")
    if folders[-1].endswith("-packages"):
        wanted = name.endswith((".pth", ".py"))
    elif any(part.endswith((".dist-info", ".egg-info")) for part in folders):
        wanted = name.endswith(_INFO)
    elif any(part.startswith(_PATCHED) for part in folders):
        wanted = name.endswith(_TEXT)
    else:
        wanted = (
            name in _NAMED
            or name.endswith((".pth", "._pth"))
            or path in _SYSTEM
            or folder == "etc/ld.so.conf.d"
            or STATE_DIR in folders
            or folder == "usr/share/spark-build"
            or (name == "site.py" and folders[-1].startswith("python3"))
        )
    return wanted and size <= _SMALL_FILE


def is_text(path: str, size: int) -> bool:
    """Whether a file is a text file of a package that layers may patch."""
    return path.endswith(_TEXT) and size <= _SMALL_FILE


def _note(tar: LayerTar, member: Member, writer: LayerWriter, where: str) -> None:
    """Add one member to the index."""
    folder, name = parent_of(member.path), member.path.rpartition("/")[2]
    if name == _OPAQUE_NAME:
        writer.hide(folder, OPAQUE)
    elif name.startswith(WHITEOUT_PREFIX):
        target = name.removeprefix(WHITEOUT_PREFIX)
        if target in ("", ".", ".."):
            raise RemoteError(f"{where}: a whiteout without a name: {member.path!r}")
        writer.hide(f"{folder}/{target}" if folder else target, WHITEOUT)
    elif not member.path and member.kind != DIR:
        raise RemoteError(f"{where}: its root is not a directory")
    else:
        digest = _digest(tar, member, writer) if member.kind == FILE else ""
        writer.add(
            Row(
                path=member.path,
                kind=member.kind,
                size=member.size,
                mode=member.mode,
                uid=member.uid,
                gid=member.gid,
                link=member.link,
                sha256=digest,
            )
        )


def _digest(tar: LayerTar, member: Member, writer: LayerWriter) -> str:
    """The sha256 of a file; its bytes are stored if plans need them."""
    hasher = hashlib.sha256()
    chunks: list[bytes] | None = [] if worth_keeping(member.path, member.size) else None
    for chunk in tar.chunks():
        hasher.update(chunk)
        if chunks is not None:
            chunks.append(chunk)
    digest = hasher.hexdigest()
    if chunks is not None:
        writer.keep(digest, b"".join(chunks))
    return digest

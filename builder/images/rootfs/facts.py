"""Recorded facts about an image's layers, so that they need not be read again.

Layers never change, so facts hold for every image that has the same layers at the bottom.
Paths without a recorded fact are unknown, not absent.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Any

from builder.applier.receipts import parse_record
from builder.images.rootfs.index import Row, parent_of
from builder.images.rootfs.tar import DIR, FILE, OTHER, SYMLINK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

SCHEMA = 1
#: Limit of recorded content in bytes: RECORD files of vLLM images have up to 3 MB.
CONTENT_BYTES = 4 << 20
#: Stands for the sha256 in RECORD.
_AS_RECORDED = "="
_KINDS = (FILE, DIR, SYMLINK, OTHER)


class NotRecorded(Exception):
    """There is no recorded fact for a path; the text is the path."""


class RecordedFiles:
    """Entries, folders and contents by path relative to the root, with the interface of a layer.

    ``layers`` are the digests of the described layers, bottom first.
    """

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = tuple(layers)
        #: None if nothing exists there
        self.rows: dict[str, Row | None] = {}
        #: names in folders
        self.names: dict[str, list[str]] = {}
        #: folders whose entries are all in ``rows``
        self.whole: set[str] = set()
        #: bytes by sha256
        self.contents: dict[str, bytes] = {}

    # -- recording

    def note(self, path: str, row: Row | None) -> None:
        """Record an entry, or its absence."""
        if row is not None:
            row = Row(path, row.kind, row.size, row.mode, row.uid, row.gid, row.link, row.sha256)
        self.rows[path] = row

    def note_below(self, directory: str, rows: Mapping[str, Row]) -> None:
        """Record everything below a folder, by relative path."""
        self.whole.add(directory)
        for path, row in rows.items():
            self.note(f"{directory}/{path}" if directory else path, row)

    def note_content(self, data: bytes) -> None:
        """Record the bytes of a file, unless it is too large."""
        if len(data) <= CONTENT_BYTES:
            self.contents[hashlib.sha256(data).hexdigest()] = data

    def add(self, other: RecordedFiles) -> None:
        """Add facts of the same layers."""
        self.rows.update(other.rows)
        self.names.update(other.names)
        self.whole |= other.whole
        self.contents.update(other.contents)

    def lacks(self, other: RecordedFiles) -> int:
        """The number of facts of the other that are missing or different here."""
        differences = sum(self._differs(path, row) for path, row in other.rows.items())
        for directory, names in other.names.items():
            try:
                differences += sorted(self.children(directory)) != names
            except NotRecorded:
                differences += 1
        differences += sum(not self._is_whole(directory) for directory in other.whole)
        return differences + len(other.contents.keys() - self.contents.keys())

    def _differs(self, path: str, row: Row | None) -> bool:
        try:
            return self.row(path) != row
        except NotRecorded:
            return True

    # -- the interface of a lowest layer's index

    def row(self, path: str) -> Row | None:
        """The entry at a path.

        Raises:
            NotRecorded: the facts say nothing about the path.
        """
        if path not in self.rows and not (path and self._absent(path)):
            raise NotRecorded(path)
        return self.rows.get(path)

    def below(self, directory: str) -> Iterator[Row]:
        """Every entry below a folder.

        Raises:
            NotRecorded: the facts do not have the whole folder.
        """
        if self._is_whole(directory):
            start = f"{directory}/" if directory else ""
            rows = (self.rows[path] for path in sorted(self.rows) if path.startswith(start))
            yield from (row for row in rows if row is not None)
        elif self._is_folder(directory):
            raise NotRecorded(directory)

    def children(self, directory: str) -> Iterable[str]:
        """Names in a folder.

        Raises:
            NotRecorded: the facts do not have the whole folder.
        """
        if directory in self.names:
            return self.names[directory]
        if self._is_whole(directory):
            return self._children.get(directory, ())
        if self._is_folder(directory):
            raise NotRecorded(directory)
        return ()

    def whiteouts(self, _directory: str) -> Iterable[str]:
        """None: hidden entries are not recorded."""
        return ()

    def hidden_below(self, _directory: str) -> Iterable[tuple[str, str]]:
        """None, as for :meth:`whiteouts`."""
        return ()

    def hides(self, _path: str) -> bool:
        """Always True: there is no layer below."""
        return True

    def seals(self, _directory: str) -> bool:
        """As for :meth:`hides`."""
        return True

    def content(self, sha256: str) -> bytes | None:
        """The bytes of a file."""
        return self.contents.get(sha256)

    @cached_property
    def _children(self) -> dict[str, list[str]]:
        children: dict[str, list[str]] = {}
        for path, row in self.rows.items():
            if row is not None:
                children.setdefault(parent_of(path), []).append(path.rpartition("/")[2])
        return children

    def _is_folder(self, path: str) -> bool:
        row = self.row(path) if path else None
        return not path or (row is not None and row.kind == DIR)

    def _is_whole(self, directory: str) -> bool:
        while directory not in self.whole:
            if not directory:
                return False
            directory = parent_of(directory)
        return True

    def _absent(self, path: str) -> bool:
        """Whether a path is known to have no entry."""
        while path:
            if path in self.rows:
                row = self.rows[path]
                return row is None or row.kind != DIR
            above, _, name = path.rpartition("/")
            if self._is_whole(above) or name not in self.names.get(above, (name,)):
                return True
            path = above
        return False

    def closed(self) -> RecordedFiles:
        """The same facts, where what they do not have counts as absent."""
        facts = _Closed(self.layers)
        facts.rows, facts.names, facts.whole = self.rows, self.names, self.whole
        facts.contents = self.contents
        return facts

    # -- as JSON

    def as_json(self) -> dict[str, Any]:
        """The facts as JSON values, without redundant ones."""
        recorded = self._recorded()
        return {
            "schema": SCHEMA,
            "layers": list(self.layers),
            "whole": sorted(self.whole),
            "names": {path: self.names[path] for path in sorted(self.names)},
            "rows": {
                path: None if row is None else _value(row, recorded)
                for path, row in sorted(self.rows.items())
                if row is not None or not self._follows(path)
            },
            "contents": {name: _text(data) for name, data in sorted(self.contents.items())},
        }

    def _follows(self, path: str) -> bool:
        """Whether the absence of a path follows from facts about its parent folders."""
        above, _, name = path.rpartition("/")
        return (
            self._is_whole(above)
            or name not in self.names.get(above, (name,))
            or (above in self.rows and self.rows[above] is None)
        )

    @classmethod
    def parse(cls, value: Any) -> RecordedFiles:
        """Parse facts from a document.

        Raises:
            ValueError: it is malformed, or content does not match its sha256.
        """
        try:
            if value["schema"] != SCHEMA:
                raise ValueError(f"schema {value['schema']}")
            facts = cls(value["layers"])
            facts.whole = {str(path) for path in value["whole"]}
            facts.names = {path: [str(n) for n in names] for path, names in value["names"].items()}
            for name, text in value["contents"].items():
                facts.note_content(_bytes(text))
                if name not in facts.contents:
                    raise ValueError(f"the sha256 of {name} does not match")
            rows = value["rows"]
            later = [path for path, row in rows.items() if row and row[-1] == _AS_RECORDED]
            for path, row in rows.items():
                if row is None or row[-1] != _AS_RECORDED:
                    facts.rows[path] = None if row is None else _row(path, row)
            recorded = facts._recorded()
            for path in later:
                facts.rows[path] = _row(path, [*rows[path][:-1], recorded[path]])
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        return facts

    def _recorded(self) -> dict[str, str]:
        """The sha256 by path from RECORD files."""
        digests: dict[str, str] = {}
        for path, row in sorted(self.rows.items()):
            data = self.contents.get(row.sha256) if row is not None else None
            if data is None or not path.endswith(".dist-info/RECORD"):
                continue
            site = parent_of(parent_of(path))
            with contextlib.suppress(ValueError, csv.Error):  # one that is damaged says nothing
                rows = parse_record(data)
                digests.update({f"{site}/{row.path}": row.sha256 for row in rows if row.sha256})
        return digests


class _Closed(RecordedFiles):
    def row(self, path: str) -> Row | None:
        try:
            return super().row(path)
        except NotRecorded:
            # identification does not ask for it, and every standard library has it
            return Row(path, DIR) if path.endswith("/lib-dynload") else None

    def below(self, directory: str) -> Iterator[Row]:
        try:
            yield from super().below(directory)
        except NotRecorded:
            return

    def children(self, directory: str) -> Iterable[str]:
        try:
            return super().children(directory)
        except NotRecorded:
            return ()


def _value(row: Row, recorded: Mapping[str, str]) -> list[Any]:
    is_recorded = row.sha256 and recorded.get(row.path) == row.sha256
    sha256 = _AS_RECORDED if is_recorded and not row.path.endswith("/RECORD") else row.sha256
    return [row.kind, row.size, row.mode, row.uid, row.gid, row.link, sha256]


def _row(path: str, value: Sequence[Any]) -> Row:
    kind, size, mode, uid, gid, link, sha256 = value
    if kind not in _KINDS:
        raise ValueError(f"{path} is a {kind!r}")
    return Row(path, kind, int(size), int(mode), int(uid), int(gid), str(link), str(sha256))


def _text(data: bytes) -> Any:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else base64.b64decode(value["base64"])

"""RECORD: which files a distribution owns, and keeping it correct when layers change them.

The format is PyPA's specification "Recording installed projects".
"""

from __future__ import annotations

import base64
import csv
import io
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from builder.applier.failures import ApplyError
from builder.applier.text import lines_of
from builder.applier.trees import Changes, Content, DirTree, OverlayTree, Tree
from builder.applier.versions import normalize

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from builder.applier.layers import Layer
    from builder.applier.trees import Distribution

INSTALLER = b"spark-build\n"
#: The path of a distribution's own RECORD in a wheel or in site-packages.
OWN_RECORD = re.compile(r"[^/]+\.dist-info/RECORD")


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


def record_row(path: str, sha256: str, size: int) -> str:
    """A row of RECORD, without line end."""
    raw = base64.urlsafe_b64encode(bytes.fromhex(sha256)).rstrip(b"=").decode()
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow([path, f"sha256={raw}", size])
    return out.getvalue()


def row_path(line: str) -> str:
    """The path in a line of RECORD; '' if it is malformed."""
    if not line.startswith('"'):
        return line.partition(",")[0].rstrip("\r\n")
    try:
        return next(csv.reader([line], strict=True), [""])[0]
    except csv.Error:
        return ""


def true_records(tree: Tree, changes: Changes, package: str) -> Changes:
    """The updated RECORD files for some changes to a tree.

    A row keeps its position and line end; one without a hash is unchanged.  A new
    file is listed last, in the distribution that has files in the nearest parent folder;
    ``package`` decides if several have, or none.
    """
    after = OverlayTree(tree)
    after.update(changes)
    dists = after.distributions().values()
    names = {f"{d.info_dir}/RECORD": d.name for d in dists}
    names = {path: name for path, name in names.items() if after.read(path) is not None}
    lists = {path: _listed(after.read(path) or b"") for path in names}
    listed = {path for path in changes if any(path in rows for _, rows in lists.values())}
    own = {path for path, name in names.items() if name == normalize(package)}
    added: dict[str, list[str]] = {}
    for path in sorted(path for path, content in changes.items() if content is not None):
        owner = "" if path in listed or path in names else _owner(path, lists, own)
        added.setdefault(owner, []).append(path)
    made: Changes = {}
    for path, (lines, rows) in lists.items():
        new = added.get(path, ())
        if new or any(name in rows for name in changes):
            text = _rewritten(lines, changes, new).encode("utf-8", "surrogateescape")
            if text != after.read(path):
                made[path] = Content.of(text, after.mode(path))
    return made


def settled_records(layer: Layer, changes: Changes, tree: Tree) -> Changes:
    """The updated RECORD files for a layer's changes, including those among the changes."""
    made = true_records(tree, changes, layer.package)
    changes.update({path: content for path, content in made.items() if path in changes})
    return {path: content for path, content in made.items() if path not in changes}


def present(root: Path, paths: Iterable[str]) -> Changes:
    """Facts about files of a real directory, without their bytes and RECORD files."""
    tree = DirTree(root)
    found: Changes = {}
    for path in paths:
        digest = tree.digest(path)
        if OWN_RECORD.fullmatch(path):
            continue
        size = (root / path).stat().st_size if digest is not None else 0
        found[path] = None if digest is None else Content(sha256=digest, size=size)
    return found


def untouched_rows(data: bytes, touched: Collection[str]) -> list[str]:
    """The lines of a RECORD for other files than these."""
    lines = lines_of(data.decode("utf-8", "surrogateescape"))
    return [line for line in lines if row_path(line) not in touched]


@lru_cache(maxsize=64)
def _listed(data: bytes) -> tuple[list[tuple[str, str]], frozenset[str]]:
    """The lines of a RECORD with their paths, and the set of paths."""
    text = data.decode("utf-8", "surrogateescape")
    quoted = '"' in text
    rows = [
        (row_path(line) if quoted else line.partition(",")[0].rstrip("\r\n"), line)
        for line in lines_of(text)
    ]
    return rows, frozenset(path for path, _ in rows)


def _owner(
    path: str, lists: Mapping[str, tuple[object, frozenset[str]]], own: Collection[str]
) -> str:
    """The RECORD for a new file; '' if there is none."""
    folder = path.rpartition("/")[0]
    found: list[str] = []
    while folder and not found:
        prefix = f"{folder}/"
        found = [r for r, (_, rows) in lists.items() if any(n.startswith(prefix) for n in rows)]
        folder = folder.rpartition("/")[0]
    return min([r for r in found or own if r in own] or found, default="")


def _rewritten(lines: list[tuple[str, str]], changes: Changes, added: Iterable[str]) -> str:
    out = []
    end = "\r\n" if lines and lines[0][1].endswith("\r\n") else "\n"
    for name, line in lines:
        content = changes.get(name)
        if content is not None and "sha256=" in line:
            body = line.rstrip("\r\n")
            out.append(record_row(name, content.sha256, content.size) + line[len(body) :])
        elif content is not None or name not in changes:
            out.append(line)
    for name in added:
        if out and not out[-1].endswith("\n"):
            out[-1] += end
        content = changes[name]
        assert content is not None
        out.append(record_row(name, content.sha256, content.size) + end)
    return "".join(out)

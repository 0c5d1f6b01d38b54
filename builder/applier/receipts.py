"""Receipts: the files that each layer wrote, with sha256 before and after; and RECORD.

The format of RECORD is PyPA's specification "Recording installed projects".
"""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from builder.applier.diff import lines_of
from builder.applier.trees import Changes, Content, DirTree, OverlayTree, Tree
from builder.applier.values import ApplyError, is_sha256, normalize

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import TypeGuard

    from builder.applier.layers import Layer
    from builder.applier.states import Outcome
    from builder.applier.trees import Distribution, Tree

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
    updated: Changes = {}
    for path, (lines, rows) in lists.items():
        new = added.get(path, ())
        if new or any(name in rows for name in changes):
            text = _rewritten(lines, changes, new).encode("utf-8", "surrogateescape")
            if text != after.read(path):
                updated[path] = Content.of(text, after.mode(path))
    return updated


def settled_records(layer: Layer, changes: Changes, tree: Tree) -> Changes:
    """The updated RECORD files for a layer's changes, including those among the changes."""
    updated = true_records(tree, changes, layer.package)
    changes.update({path: content for path, content in updated.items() if path in changes})
    return {path: content for path, content in updated.items() if path not in changes}


def present(root: Path, paths: Iterable[str]) -> Changes:
    """Facts about files of a real directory, without their bytes and RECORD files."""
    tree = DirTree(root)
    contents: Changes = {}
    for path in paths:
        digest = tree.digest(path)
        if OWN_RECORD.fullmatch(path):
            continue
        size = (root / path).stat().st_size if digest is not None else 0
        contents[path] = None if digest is None else Content(sha256=digest, size=size)
    return contents


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
    owners: list[str] = []
    while folder and not owners:
        prefix = f"{folder}/"
        owners = [r for r, (_, rows) in lists.items() if any(n.startswith(prefix) for n in rows)]
        folder = folder.rpartition("/")[0]
    return min([r for r in owners or own if r in own] or owners, default="")


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


# ----------------------------------------------------------------------------------------- receipts


SCHEMA = 1
STATE_DIR = ".spark-build"
RECEIPTS = f"{STATE_DIR}/receipts"
#: Bytes of a receipt; that of a layer with a whole wheel of 20,000 files has 5 MB.
_RECEIPT_BYTES = 64 << 20


@dataclass(frozen=True)
class Original:
    """A file before a layer: its sha256, and what restores it besides its bytes.

    None is what is not known.  Images have no originals of RECORD files, because they depend on
    earlier layers.
    """

    before: str | None = None
    mode: int | None = None
    mtime_ns: int | None = None
    link: str | None = None


@dataclass(frozen=True)
class FileEntry(Original):
    """A file that a layer changed; ``before`` and ``after`` are None if it does not exist."""

    after: str | None = None
    ops: Sequence[str] = ()
    #: the topmost folder created for it
    made: str | None = None


@dataclass(frozen=True)
class Receipt:
    """What a layer wrote into a tree."""

    layer: str
    layer_digest: str
    variant: str | None
    sequence: int
    env: Mapping[str, str]
    serve_flags: Sequence[str]
    moe_serve_flags: Sequence[str]
    files: Mapping[str, FileEntry]
    package: str = ""
    #: updated RECORD files; None if a spark-build wrote it that left RECORD as it was
    records: Mapping[str, Original] | None = None
    #: the layer whose extension wheel has this layer's compiled changes
    compiled_with: str | None = None


_TEXT = (str, type(None))
#: The required keys of a receipt, with their types.
_REQUIRED: dict[str, type | tuple[type, ...]] = {
    "layer": str, "layer_digest": str, "variant": _TEXT, "sequence": int, "env": dict,
    "serve_flags": list, "moe_serve_flags": list, "files": dict,
}  # fmt: skip
#: The optional keys.
_OPTIONAL = {"package": str, "records": dict, "compiled_with": str}
#: The keys of a file in it.
_FILE: dict[str, type | tuple[type, ...]] = {
    "before": _TEXT, "mode": int, "mtime_ns": int, "link": str,
    "after": _TEXT, "ops": list, "made": _TEXT,
}  # fmt: skip


def receipts_of(tree: Tree) -> list[Receipt]:
    """Receipts in the tree, in order of application.

    Raises:
        ApplyError: a receipt is not valid.
    """
    receipts: list[Receipt] = []
    for name in tree.children(RECEIPTS):
        data = tree.read(f"{RECEIPTS}/{name}")
        if not name.endswith(".json") or data is None:
            continue
        try:
            if len(data) > _RECEIPT_BYTES:
                raise ValueError(f"it has more than {_RECEIPT_BYTES >> 20} MiB")
            receipts.append(_read(data, name))
        except (ValueError, RecursionError) as error:
            raise ApplyError(
                f"receipt {RECEIPTS}/{name} is damaged: {error}",
                hint="reinstall the affected packages",
            ) from None
    return sorted(receipts, key=lambda receipt: (receipt.sequence, receipt.layer))


@lru_cache(maxsize=64)
def _read(data: bytes, name: str) -> Receipt:
    """Read a receipt, and check it, because a revert uses its paths to remove files."""
    raw = json.loads(data)
    keys = raw if isinstance(raw, dict) else {}
    known = {key: keys[key] for key in (*_REQUIRED, *_OPTIONAL) if key in keys}
    for key, kind in {**_REQUIRED, **_OPTIONAL}.items():
        if not isinstance(known.get(key, ...), kind) and (key in keys or key in _REQUIRED):
            raise ValueError(f"{key!r} is missing or has the wrong type")
    if f"{known['layer']}.json" != name:
        raise ValueError(f"it belongs to layer {known['layer']!r}")
    texts = [*known["env"].values(), *known["serve_flags"], *known["moe_serve_flags"]]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a variable or a flag is not a string")
    if known.get("records") and "package" not in known:
        raise ValueError("'package' is missing or has the wrong type")
    known["files"] = {path: _entry(path, entry) for path, entry in known["files"].items()}
    if "records" in known:
        known["records"] = {path: _record(path, one) for path, one in known["records"].items()}
    return Receipt(**known)


def _entry(path: str, raw: object) -> FileEntry:
    known = _known(path, raw)
    if not is_inside(path) or not {"before", "after"} <= known.keys():
        raise _invalid(path)
    return FileEntry(**known)


def _record(path: str, raw: object) -> Original:
    known = _known(path, raw)
    if not OWN_RECORD.fullmatch(path):
        raise _invalid(path)
    return Original(*(known.get(key) for key in ("before", "mode", "mtime_ns", "link")))


def _known(path: str, raw: object) -> dict[str, Any]:
    """The known keys of a file in a receipt, checked."""
    if not isinstance(raw, dict):
        raise _invalid(path)
    known = {key: raw[key] for key in _FILE if key in raw}
    made, ops = known.get("made"), known.get("ops", ())
    good = all(isinstance(value, _FILE[key]) for key, value in known.items())
    digests = (known.get("before"), known.get("after"))
    good = good and all(digest is None or is_sha256(digest) for digest in digests)
    good = good and (made is None or is_inside(made)) and all(isinstance(op, str) for op in ops)
    if not good:
        raise _invalid(path)
    return known


def _invalid(path: str) -> ValueError:
    return ValueError(f"its entry for {path!r} is invalid")


def is_inside(path: object) -> TypeGuard[str]:
    """Whether it is a path below the tree's root."""
    if not isinstance(path, str) or not path or "\0" in path:
        return False
    return not path.startswith("/") and not {"", ".", ".."} & set(path.split("/"))


def explained(
    path: str, start: str | None, current: str | None, receipts: Iterable[Receipt]
) -> bool:
    """Whether receipts explain, step by step, how a file got its current digest."""
    digest = start
    for receipt in receipts:
        entry = receipt.files.get(path)
        if entry is not None and entry.before == digest:
            digest = entry.after
    return digest == current


def kept_true(receipts: Iterable[Receipt]) -> set[str]:
    """The RECORD files that layers updated: their rows are checked, not their digest.

    The digest changes with every applied or reverted layer.
    """
    return {path for receipt in receipts for path in receipt.records or ()}


def originals(tree: Tree) -> dict[str, str]:
    """The sha256 of RECORD files before the layers in a tree, which updated them."""
    digests: dict[str, str] = {}
    for receipt in receipts_of(tree):
        for path, original in (receipt.records or {}).items():
            if original.before is not None:  # it was applied to a directory
                digests.setdefault(path, original.before)
    return digests


def unexplained(receipt: Receipt, receipts: Iterable[Receipt], tree: Tree) -> list[str]:
    """Files of a receipt that match neither it nor later receipts."""
    known = list(receipts)
    later = [r for r in known if r.sequence > receipt.sequence]
    records = kept_true(known)
    return [
        path
        for path, entry in receipt.files.items()
        if not explained(path, entry.after, tree.digest(path), later)
        and not (path in records and tree.digest(path) is not None)
    ]


def half_undone(tree: Tree) -> list[str]:
    """Applied layers of which some files are as before them, and others as they left them."""
    receipts = receipts_of(tree)
    half = []
    for receipt in receipts:
        odd = unexplained(receipt, receipts, tree)
        back = [path for path in odd if tree.digest(path) == receipt.files[path].before]
        if back and len(back) < len(receipt.files):
            half.append(receipt.layer)
    return half


def final_digests(receipts: Iterable[Receipt]) -> dict[str, str | None]:
    """The sha256 of every file after the last of some receipts; None for a removed file.

    Updated RECORD files are not included, because their content depends on the image.
    """
    known = list(receipts)
    final: dict[str, str | None] = {}
    for receipt in known:
        final.update({path: entry.after for path, entry in receipt.files.items()})
    records = kept_true(known)
    return {path: digest for path, digest in final.items() if digest is None or path not in records}


def env_of(tree: Tree) -> dict[str, str]:
    """Environment variables set by receipts in the tree."""
    merged: dict[str, str] = {}
    for receipt in receipts_of(tree):
        merged.update(receipt.env)
    return merged


def make_receipt(
    layer: Layer, outcome: Outcome, tree: Tree, sequence: int, records: Iterable[str]
) -> Receipt:
    """The receipt of a needed layer: sha256 of every file before and after, per path.

    ``records`` are the RECORD files that it updated; their digests are not included, because
    they depend on earlier layers, and so would this receipt.
    """
    files = {
        path: FileEntry(
            before=tree.digest(path),
            after=None if content is None else content.sha256,
            ops=outcome.ops.get(path, ()),
        )
        for path, content in sorted(outcome.changes.items())
    }
    carrier = outcome.compiled.carrier if outcome.compiled else None
    return Receipt(
        layer=layer.name,
        layer_digest=layer.digest,
        variant=outcome.variant,
        sequence=sequence,
        env=outcome.env,
        serve_flags=outcome.serve_flags,
        moe_serve_flags=outcome.moe_serve_flags,
        files=files,
        package=layer.package,
        records={path: Original() for path in sorted(records)},
        compiled_with=None if carrier == layer.name else carrier,
    )


def receipt_bytes(receipt: Receipt) -> bytes:
    """The bytes of a receipt: readable, sorted, with a final newline."""
    value = {**given(receipt), "schema": SCHEMA, "variant": receipt.variant}
    value["files"] = {
        path: {**given(entry), "before": entry.before, "after": entry.after}
        for path, entry in receipt.files.items()
    }
    if receipt.records is not None:
        value["records"] = {path: given(one) for path, one in receipt.records.items()}
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def given(value: Receipt | Original) -> dict[str, Any]:
    """The fields of a value that are not None."""
    return {key: item for key, item in vars(value).items() if item is not None}


def receipt_path(layer: str) -> str:
    """The path of a layer's receipt below site-packages."""
    return f"{RECEIPTS}/{layer}.json"

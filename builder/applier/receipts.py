"""Receipts: the files that each layer wrote, with sha256 before and after."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from builder.applier.digests import is_sha256
from builder.applier.failures import ApplyError
from builder.applier.records import OWN_RECORD

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import TypeGuard

    from builder.applier.layers import Layer
    from builder.applier.outcomes import Outcome
    from builder.applier.trees import Tree

SCHEMA = 1
STATE_DIR = ".spark-build"
RECEIPTS = f"{STATE_DIR}/receipts"


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
    found: list[Receipt] = []
    for name in tree.children(RECEIPTS):
        data = tree.read(f"{RECEIPTS}/{name}")
        if not name.endswith(".json") or data is None:
            continue
        try:
            found.append(_read(data, name))
        except (ValueError, RecursionError) as error:
            raise ApplyError(
                f"receipt {RECEIPTS}/{name} is damaged: {error}",
                hint="reinstall the affected packages",
            ) from None
    return sorted(found, key=lambda receipt: (receipt.sequence, receipt.layer))


@lru_cache(maxsize=64)
def _read(data: bytes, name: str) -> Receipt:
    """Read a receipt, and check it, because a revert uses its paths to remove files."""
    raw = json.loads(data)
    held = raw if isinstance(raw, dict) else {}
    known = {key: held[key] for key in (*_REQUIRED, *_OPTIONAL) if key in held}
    for key, kind in {**_REQUIRED, **_OPTIONAL}.items():
        if not isinstance(known.get(key, ...), kind) and (key in held or key in _REQUIRED):
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
    found: dict[str, str] = {}
    for receipt in receipts_of(tree):
        for path, original in (receipt.records or {}).items():
            if original.before is not None:  # it was applied to a directory
                found.setdefault(path, original.before)
    return found


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

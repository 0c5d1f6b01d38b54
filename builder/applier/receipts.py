"""Receipts: the files that each layer wrote, with sha256 before and after."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, TypedDict, cast

from builder.applier.failures import ApplyError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import NotRequired

    from builder.applier.layers import Layer
    from builder.applier.outcomes import Outcome
    from builder.applier.trees import Tree

SCHEMA = 1
STATE_DIR = ".spark-build"
RECEIPTS = f"{STATE_DIR}/receipts"


class FileFacts(TypedDict, total=False):
    """Facts about a file besides its bytes."""

    mode: int
    mtime_ns: int
    link: str


class Original(FileFacts, total=False):
    """The original of a RECORD file; receipts in images do not have it."""

    before: str


class FileEntry(TypedDict):
    """A file that a layer changed: sha256 before and after, None if it does not exist."""

    before: str | None
    after: str | None
    ops: NotRequired[list[str]]
    #: the topmost folder created for it
    made: NotRequired[str | None]
    mode: NotRequired[int]
    mtime_ns: NotRequired[int]
    link: NotRequired[str]


class Receipt(TypedDict):
    """What a layer wrote into a tree, as JSON; optional keys may be absent."""

    schema: NotRequired[int]
    layer: str
    layer_digest: str
    #: the layer whose extension wheel has this layer's compiled changes
    compiled_with: NotRequired[str]
    variant: str | None
    sequence: int
    env: dict[str, str]
    serve_flags: list[str]
    moe_serve_flags: list[str]
    files: dict[str, FileEntry]
    package: NotRequired[str]
    #: updated RECORD files
    records: NotRequired[dict[str, Original]]


_DIGEST = re.compile(r"[0-9a-f]{64}")
_RECORD = re.compile(r"[^/]+\.dist-info/RECORD")
_TEXT = (str, type(None))
#: The required keys of a receipt, with their types.
_FIELDS: dict[str, Any] = {
    "layer": str, "layer_digest": str, "variant": _TEXT, "sequence": int, "env": dict,
    "files": dict, "serve_flags": list, "moe_serve_flags": list,
}  # fmt: skip
#: The optional keys of a file in it.
_FILE_FIELDS: dict[str, Any] = {
    "ops": list,
    "made": _TEXT,
    "mode": int,
    "mtime_ns": int,
    "link": str,
}


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
            found.append(_checked(json.loads(data), name))
        except (ValueError, RecursionError) as error:
            raise ApplyError(
                f"receipt {RECEIPTS}/{name} is damaged: {error}",
                hint="reinstall the affected packages",
            ) from None
    return sorted(found, key=lambda receipt: (receipt["sequence"], receipt["layer"]))


def _checked(receipt: Any, name: str) -> Receipt:
    """Check a receipt, because a revert uses its paths to remove files."""
    held = receipt if isinstance(receipt, dict) else {}
    wrong = [key for key, kind in _FIELDS.items() if not isinstance(held.get(key, ...), kind)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is missing or has the wrong type")
    if f"{held['layer']}.json" != name:
        raise ValueError(f"it belongs to layer {held['layer']!r}")
    texts = [*held["env"].values(), *held["serve_flags"], *held["moe_serve_flags"]]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a variable or a flag is not a string")
    for path, entry in held["files"].items():
        if not is_inside(path) or not _is_entry(entry):
            raise ValueError(f"its entry for {path!r} is invalid")
    records = held.get("records", {})
    said = records.items() if isinstance(records, dict) else [("", records)]
    for path, entry in said:
        if not _RECORD.fullmatch(path) or not _is_record_entry(entry):
            raise ValueError(f"its entry for {path!r} is invalid")
    if records and not isinstance(held.get("package"), str):
        raise ValueError("'package' is missing or has the wrong type")
    return cast("Receipt", held)


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not {"before", "after"} <= entry.keys():
        return False
    digests = (entry["before"], entry["after"])
    made = entry.get("made")
    return (
        all(digest is None or is_digest(digest) for digest in digests)
        and all(isinstance(entry[k], kind) for k, kind in _FILE_FIELDS.items() if k in entry)
        and (made is None or is_inside(made))
    )


def _is_record_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not is_digest(entry.get("before", "0" * 64)):
        return False
    return all(isinstance(entry[k], kind) for k, kind in _FILE_FIELDS.items() if k in entry)


def is_digest(value: object) -> bool:
    """Whether it is a hexadecimal sha256."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def is_inside(path: object) -> bool:
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
        entry = receipt["files"].get(path)
        if entry is not None and entry["before"] == digest:
            digest = entry["after"]
    return digest == current


def kept_true(receipts: Iterable[Receipt]) -> set[str]:
    """The RECORD files that layers updated: their rows are checked, not their digest.

    The digest changes with every applied or reverted layer.
    """
    return {path for receipt in receipts for path in receipt.get("records", ())}


def originals(tree: Tree) -> dict[str, str]:
    """The sha256 of RECORD files before the layers in a tree, which updated them."""
    found: dict[str, str] = {}
    for receipt in receipts_of(tree):
        for path, entry in receipt.get("records", {}).items():
            if "before" in entry:  # it was applied to a directory
                found.setdefault(path, entry["before"])
    return found


def unexplained(receipt: Receipt, receipts: Iterable[Receipt], tree: Tree) -> list[str]:
    """Files of a receipt that match neither it nor later receipts."""
    known = list(receipts)
    later = [r for r in known if r["sequence"] > receipt["sequence"]]
    records = kept_true(known)
    return [
        path
        for path, entry in receipt["files"].items()
        if not explained(path, entry["after"], tree.digest(path), later)
        and not (path in records and tree.digest(path) is not None)
    ]


def final_digests(receipts: Iterable[Receipt]) -> dict[str, str | None]:
    """The sha256 of every file after the last of some receipts; None for a removed file.

    Updated RECORD files are not included, because their content depends on the image.
    """
    known = list(receipts)
    final: dict[str, str | None] = {}
    for receipt in known:
        final.update({path: entry["after"] for path, entry in receipt["files"].items()})
    records = kept_true(known)
    return {path: digest for path, digest in final.items() if digest is None or path not in records}


def env_of(tree: Tree) -> dict[str, str]:
    """Environment variables set by receipts in the tree."""
    merged: dict[str, str] = {}
    for receipt in receipts_of(tree):
        merged.update(receipt["env"])
    return merged


def make_receipt(
    layer: Layer, outcome: Outcome, tree: Tree, sequence: int, records: Iterable[str]
) -> Receipt:
    """The receipt of a needed layer: sha256 of every file before and after, per path.

    ``records`` are the RECORD files that it updated; their digests are not included, because
    they depend on earlier layers, and so would this receipt.
    """
    files: dict[str, FileEntry] = {}
    for path in sorted(outcome.changes):
        content = outcome.changes[path]
        files[path] = {
            "before": tree.digest(path),
            "after": None if content is None else content.sha256,
            "ops": outcome.ops.get(path, []),
        }
    receipt: Receipt = {
        "schema": SCHEMA,
        "layer": layer.name,
        "layer_digest": layer.digest,
        "variant": outcome.variant,
        "sequence": sequence,
        "env": outcome.env,
        "serve_flags": outcome.serve_flags,
        "moe_serve_flags": outcome.moe_serve_flags,
        "files": files,
        "package": layer.package,
        "records": {path: {} for path in sorted(records)},
    }
    carrier = outcome.compiled.carrier if outcome.compiled else None
    if carrier not in (None, layer.name):
        receipt["compiled_with"] = carrier
    return receipt


def receipt_bytes(receipt: Receipt) -> bytes:
    """The bytes of a receipt: readable, sorted, with a final newline."""
    return json.dumps(receipt, indent=1, sort_keys=True).encode() + b"\n"


def receipt_path(layer: str) -> str:
    """The path of a layer's receipt below site-packages."""
    return f"{RECEIPTS}/{layer}.json"

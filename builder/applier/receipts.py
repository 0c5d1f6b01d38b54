"""Receipts: what was written into a tree, by layer and file, with sha256 before and after."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from builder.applier.failures import ApplyError
from builder.applier.outcomes import Layer, Outcome, layer_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from builder.applier.trees import Tree

SCHEMA = 1
STATE_DIR = ".spark-build"
RECEIPTS = f"{STATE_DIR}/receipts"


def receipts_of(tree: Tree) -> list[dict[str, Any]]:
    """Receipts in the tree, in order of application.

    Raises:
        ApplyError: a receipt is not readable JSON.
    """
    found = []
    for name in tree.children(RECEIPTS):
        data = tree.read(f"{RECEIPTS}/{name}")
        if not name.endswith(".json") or data is None:
            continue
        try:
            found.append(json.loads(data))
        except ValueError as error:
            raise ApplyError(f"receipt {RECEIPTS}/{name} is damaged: {error}") from None
    return sorted(found, key=lambda receipt: (receipt["sequence"], receipt["layer"]))


def explained(path: str, start: str | None, current: str | None, receipts: Iterable[Any]) -> bool:
    """Whether receipts lead from one digest of a file to its current one, step by step."""
    digest = start
    for receipt in receipts:
        entry = receipt["files"].get(path)
        if entry is not None and entry["before"] == digest:
            digest = entry["after"]
    return digest == current


def unexplained(
    receipt: Mapping[str, Any], receipts: Iterable[Mapping[str, Any]], tree: Tree
) -> list[str]:
    """Files of a receipt that are not what it, and the receipts after it, say they are."""
    later = [r for r in receipts if r["sequence"] > receipt["sequence"]]
    return [
        path
        for path, entry in receipt["files"].items()
        if not explained(path, entry["after"], tree.digest(path), later)
    ]


def final_digests(receipts: Iterable[Mapping[str, Any]]) -> dict[str, str | None]:
    """What every file of some receipts is after the last of them; None for one that is gone."""
    final: dict[str, str | None] = {}
    for receipt in receipts:
        final.update({path: entry["after"] for path, entry in receipt["files"].items()})
    return final


def env_of(tree: Tree) -> dict[str, str]:
    """Variables that receipts in the tree say are set."""
    merged: dict[str, str] = {}
    for receipt in receipts_of(tree):
        merged.update(receipt["env"])
    return merged


def make_receipt(layer: Layer, outcome: Outcome, tree: Tree, sequence: int) -> dict[str, Any]:
    """The receipt of a needed layer: sha256 of every file before and after, per path."""
    files = {}
    for path in sorted(outcome.changes):
        content = outcome.changes[path]
        files[path] = {
            "before": tree.digest(path),
            "after": None if content is None else content.sha256,
            "ops": outcome.ops.get(path, []),
        }
    carrier = outcome.compiled.get("with")
    return {
        "schema": SCHEMA,
        "layer": layer["name"],
        **({"compiled_with": carrier} if carrier not in (None, layer["name"]) else {}),
        "layer_digest": layer_digest(layer),
        "variant": outcome.variant,
        "sequence": sequence,
        "env": outcome.env,
        "serve_flags": outcome.serve_flags,
        "moe_serve_flags": outcome.moe_serve_flags,
        "files": files,
    }


def receipt_bytes(receipt: Mapping[str, Any]) -> bytes:
    """A receipt as it is written: readable, sorted, with a final newline."""
    return json.dumps(receipt, indent=1, sort_keys=True).encode() + b"\n"


def receipt_path(layer: str) -> str:
    """Where a layer's receipt lies below site-packages."""
    return f"{RECEIPTS}/{layer}.json"

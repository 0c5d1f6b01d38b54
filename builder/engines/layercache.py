"""Cached layers: a layer with the same inputs is reused.

``blobs/KEY/`` holds a compressed layer and a record of it.  The key is a digest of
everything that decides the layer's bytes: its part of the plan, every tar entry, the timestamp, and
the compression.  It does not depend on other layers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import zlib
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from builder.applier.digests import canonical_json, sha256_hex
from builder.engines.layertar import LEVEL, PIECE, Owners, entries
from builder.util.console import console, megabytes
from builder.util.documents import plain
from builder.util.leftovers import making
from builder.util.paths import cache_dir

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from builder.applier.trees import Content
    from builder.model.plan import BuildPlan, LayerDecision

#: Increased when the same entries would give different bytes.
RECIPE = 1
#: Size limit of all cached layers; the least recently used are removed first.
MOST_BYTES = 2 << 30
#: A layer is cached only if this many times its size is free, because the build needs space too.
_ROOM = 4
_CHUNK = 1 << 20
_PLANNED = ("digest", "variant", "inputs", "files")


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of an image layer: patch layers of a plan, or baked-in files."""

    platform: str
    names: tuple[str, ...]
    planned: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, plan: BuildPlan, names: Sequence[str]) -> LayerInputs:
        """The part of a plan for some of its layers.

        Only what the bytes depend on is included: the layer's digest, its variant
        and pinned inputs, and the hash of each file before and after.
        """
        planned = tuple(_planned(d) for d in plan.needed if d.name in names)
        return cls(plan.base.platform.oci, tuple(names), planned)


def _planned(decision: LayerDecision) -> dict[str, Any]:
    fields = plain(decision.document)
    return {name: fields[name] for name in _PLANNED if name in fields}


@dataclass(frozen=True)
class CachedLayer:
    """A finished layer: digest and size of the compressed tar, and its diff_id."""

    digest: str
    diff_id: str
    size: int


def layer_key(
    made_of: LayerInputs, files: Mapping[str, Content | None], epoch: int, owners: Owners
) -> str:
    """The key of a layer, from its entries and its part of the plan; reads no content."""
    rows: list[list[Any]] = []
    for name, path, content in entries(files):
        if content == "dir":
            rows.append([name, "dir", *owners.folder(path)])
        else:
            held = None if content is None else content.sha256
            rows.append([name, held, *owners.of(path, content)])
    value = {
        "recipe": RECIPE,
        "compression": ["gzip", LEVEL, PIECE, zlib.ZLIB_RUNTIME_VERSION],
        "platform": made_of.platform,
        "planned": [dict(part) for part in made_of.planned],
        "epoch": epoch,
        "entries": rows,
    }
    return sha256_hex(canonical_json(value))


def _folder(key: str) -> Path:
    return cache_dir() / "blobs" / key


def take_cached_layer(key: str, target: Path) -> CachedLayer | None:
    """Copy a cached layer to ``target``, checked against its digest; None if there is none.

    A damaged one is reported and removed.
    """
    folder = _folder(key)
    try:
        record = json.loads((folder / "record.json").read_bytes())
        kept = CachedLayer(**{name: record[name] for name in CachedLayer.__dataclass_fields__})
        if record["check"] != _check(key, kept):
            raise ValueError("its record is damaged")
        with (folder / "layer").open("rb") as source, target.open("wb") as out:
            found, size = _copied(source, out)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        _damaged(folder, str(error))
        return None
    if (found, size) != (kept.digest, kept.size):
        target.unlink()
        _damaged(folder, f"its digest is {found}, expected {kept.digest}")
        return None
    with contextlib.suppress(OSError):
        os.utime(folder)
    return kept


def _damaged(folder: Path, how: str) -> None:
    console.warn(f"a cached layer is damaged and will be rebuilt: {folder}: {how}")
    shutil.rmtree(folder, ignore_errors=True)


def _check(key: str, kept: CachedLayer) -> str:
    return sha256_hex(canonical_json([key, kept.digest, kept.diff_id, kept.size]))


def _copied(source: IO[bytes], out: IO[bytes]) -> tuple[str, int]:
    sha, size = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK):
        sha.update(chunk)
        out.write(chunk)
        size += len(chunk)
    return f"sha256:{sha.hexdigest()}", size


def cache_layer(key: str, kept: CachedLayer, source: Path) -> None:
    """Cache a new layer; a full disk is not an error."""
    folder = _folder(key)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if kept.size > MOST_BYTES or free < _ROOM * kept.size:
            console.detail(f"not cached: {megabytes(kept.size)}")
            return
        _make_room(folder.parent, kept.size)
        with making(folder) as work:
            work.mkdir()
            shutil.copyfile(source, work / "layer")
            record = {**vars(kept), "check": _check(key, kept)}
            (work / "record.json").write_text(json.dumps(record))
            shutil.rmtree(folder, ignore_errors=True)
            work.rename(folder)
    except OSError as error:
        console.detail(f"not cached: {error}")


def _make_room(parent: Path, size: int) -> None:
    """Remove the least recently used layers until one more fits."""
    found = sorted(
        (p for p in parent.iterdir() if (p / "layer").is_file()), key=lambda p: p.stat().st_mtime
    )
    total = size + sum((p / "layer").stat().st_size for p in found)
    for oldest in found:
        if total <= MOST_BYTES:
            return
        total -= (oldest / "layer").stat().st_size
        shutil.rmtree(oldest, ignore_errors=True)

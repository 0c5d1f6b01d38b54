"""The documents of ``cache show``, ``cache prune`` and ``cache clean``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from builder.common.document import Count, Document, Moment, Part, Text, moment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from builder.common.cache.kinds import CacheKind
    from builder.common.cache.prune import Pruned
    from builder.common.cache.scan import CacheEntry


class KindRow(Part, frozen=True, kw_only=True):
    """All entries of one kind."""

    kind: Text
    meaning: Text
    paths: tuple[Text, ...]
    entries: Count
    bytes: Count
    oldest_use: Annotated[
        Moment | None, Meta(description="last use of the least recently used entry")
    ]
    last_use: Moment | None
    prunable: bool

    @classmethod
    def of(cls, kind: CacheKind, found: Sequence[CacheEntry], cache: Path) -> KindRow:
        """The row for a kind of entries."""
        used = sorted(entry.used for entry in found)
        folders = kind.folders or sorted(str(entry.path.relative_to(cache)) for entry in found)
        return cls(
            kind=kind.name,
            meaning=kind.meaning,
            paths=tuple(str(cache / folder) for folder in folders),
            entries=len(found),
            bytes=sum(entry.bytes for entry in found),
            oldest_use=moment(used[0]) if used else None,
            last_use=moment(used[-1]) if used else None,
            prunable=kind.prunable,
        )


class CacheContents(Document, frozen=True, kw_only=True):
    """The contents of the cache."""

    cache: Text
    bytes: Count
    kinds: tuple[KindRow, ...]


class RemovedEntry(Part, frozen=True, kw_only=True):
    """An entry that was or would be removed."""

    kind: Text
    path: Text
    bytes: Count
    last_use: Moment


class Removal(Document, frozen=True, kw_only=True):
    """The entries removed from the cache."""

    cache: Text
    dry_run: bool
    removed: Annotated[tuple[RemovedEntry, ...], Meta(min_length=1)]
    freed_bytes: Count
    kept_bytes: Annotated[Count, Meta(description="bytes of the same kinds that are kept")]
    in_use: Annotated[
        Count, Meta(description="entries that were kept because other runs may be using them")
    ]

    @classmethod
    def of(cls, done: Pruned, cache: Path, *, dry_run: bool) -> Removal:
        """The document for a run of ``prune``."""
        rows = (
            RemovedEntry(
                kind=entry.kind.name, path=str(entry.path), bytes=entry.bytes,
                last_use=moment(entry.used),
            )
            for entry in done.removed
        )  # fmt: skip
        return cls(
            cache=str(cache),
            dry_run=dry_run,
            removed=tuple(rows),
            freed_bytes=done.freed,
            kept_bytes=done.kept_bytes,
            in_use=done.in_use,
        )

"""``spark-build cache show``, ``cache prune`` and ``cache clean``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.cli.confirm import confirm
from builder.cli.options import bytes_of, seconds_of
from builder.common.cache.documents import CacheContents, KindRow, Removal
from builder.common.cache.kinds import KINDS, OTHER, kinds_named
from builder.common.cache.prune import IN_USE, Pruned, PruneRequest, prune
from builder.common.cache.scan import CacheEntry, entries, unknown
from builder.common.console import console, megabytes, print_json
from builder.common.paths import cache_dir
from builder.errors import Exit, SparkBuildError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The age below which ``cache prune`` keeps entries if no age and no size is given.
_PRUNE_AGE = "30d"


def show_command(json: bool) -> None:
    """Print one row for each kind that has entries."""
    cache = cache_dir()
    of_kind: dict[str, list[CacheEntry]] = {}
    for entry in (*entries(cache), *unknown(cache)):
        of_kind.setdefault(entry.kind.name, []).append(entry)
    rows = tuple(
        KindRow.of(k, of_kind[k.name], cache) for k in (*KINDS, OTHER) if k.name in of_kind
    )
    total = sum(row.bytes for row in rows)
    if json:
        print_json(CacheContents(cache=str(cache), bytes=total, kinds=rows))
        return
    print(f"{'kind':<14}{'entries':>7}{'size':>11}  {'oldest use':<12}{'last use':<12}what it is")
    for row in rows:
        age = "  ".join((moment or "")[:10] for moment in (row.oldest_use, row.last_use))
        size = megabytes(row.bytes)
        print(f"{row.kind:<14}{row.entries:>6}{size:>12}  {age:<22}  {row.meaning}")
    print(f"{'all':<14}{'':>6}{megabytes(total):>12}  {cache}")


def prune_command(
    older_than: str | None,
    keep_bytes: str | None,
    kinds: Sequence[str],
    *,
    dry_run: bool,
    json: bool,
) -> None:
    """Remove entries that were not used for long, and print them; exit 3 if there are none.

    Raises:
        UsageError: an option is malformed, or the directory is not a cache of spark-build.
        SparkBuildError: there is nothing to do.
    """
    if older_than is None and keep_bytes is None:
        older_than = _PRUNE_AGE
    request = PruneRequest(
        kinds=kinds_named(kinds),
        older_than=None if older_than is None else seconds_of(older_than),
        keep_bytes=None if keep_bytes is None else bytes_of(keep_bytes),
    )
    done = prune(cache_dir(), request, dry_run=dry_run)
    kept = f"; the other {megabytes(done.kept_bytes)} are kept" if done.kept_bytes else ""
    if older_than is not None:
        nothing = f"every entry was used within the last {older_than}{kept}"
    else:
        nothing = f"its removable entries already take less than {keep_bytes}"
    _tell(done, nothing, "spark-build cache clean", dry_run=dry_run, json=json)


def clean_command(kinds: Sequence[str], *, yes: bool, dry_run: bool, json: bool) -> None:
    """After confirmation, remove everything that no other run uses; exit 3 if there is nothing.

    Raises:
        UsageError: there is no terminal, or the directory is not a cache of spark-build.
        SparkBuildError: there is nothing to do, or the user declined.
    """
    request = PruneRequest(kinds=kinds_named(kinds))
    cache = cache_dir()
    done = prune(cache, request, dry_run=True)
    if done.removed and not dry_run:
        if not yes:
            action = f"remove {megabytes(done.freed)} of {cache}"
            confirm(
                action, "; needed entries will be fetched or built again", "nothing was removed"
            )
        done = prune(cache, request)
    _tell(done, "it is empty", "spark-build cache show", dry_run=dry_run, json=json)


def _tell(done: Pruned, nothing: str, hint: str, *, dry_run: bool, json: bool) -> None:
    """Print what was removed.

    Raises:
        SparkBuildError: nothing was removed.
    """
    cache = cache_dir()
    busy = f"{done.in_use} were kept because other runs may be using them" if done.in_use else ""
    if not done.removed:
        raise SparkBuildError(
            f"nothing to remove in {cache}: {busy or nothing}", Exit.NOTHING_TO_DO, hint=hint
        )
    if json:
        print_json(Removal.of(done, cache, dry_run=dry_run))
        return
    for name in dict.fromkeys(entry.kind.name for entry in done.removed):
        of_kind = [entry for entry in done.removed if entry.kind.name == name]
        size = megabytes(sum(entry.bytes for entry in of_kind))
        console.say(f"  {name:<14}{len(of_kind):>6}{size:>12}")
    if busy:
        console.warn(f"{busy}: used in the last {IN_USE / 3600:.0f} hours")
    verb = "would free" if dry_run else "freed"
    print(f"{verb} {megabytes(done.freed)}; {megabytes(done.kept_bytes)} stay")

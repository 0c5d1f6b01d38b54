"""``spark-build cache show`` and ``cache prune``."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from builder.cache.kinds import KINDS, OTHER, Kind, kinds_named
from builder.cache.prune import IN_USE, Wish, prune
from builder.cache.scan import Entry, entries, unknown
from builder.cli.show import print_json
from builder.cli.units import bytes_of, seconds_of
from builder.console import console, megabytes
from builder.errors import Exit, SparkBuildError
from builder.paths import cache_dir

if TYPE_CHECKING:
    from collections.abc import Sequence


def _moment(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _row(kind: Kind, found: Sequence[Entry]) -> dict[str, Any]:
    cache = cache_dir()
    used = sorted(entry.used for entry in found)
    folders = kind.folders or sorted(str(entry.path.relative_to(cache)) for entry in found)
    return {
        "kind": kind.name,
        "meaning": kind.meaning,
        "paths": [str(cache / folder) for folder in folders],
        "entries": len(found),
        "bytes": sum(entry.bytes for entry in found),
        "oldest_use": _moment(used[0]) if used else None,
        "last_use": _moment(used[-1]) if used else None,
        "prunable": kind.prunable,
    }


def show_command(json: bool) -> None:
    """One row for each kind of which there is something."""
    cache = cache_dir()
    of_kind: dict[str, list[Entry]] = {}
    for entry in (*entries(cache), *unknown(cache)):
        of_kind.setdefault(entry.kind.name, []).append(entry)
    rows = [_row(k, of_kind[k.name]) for k in (*KINDS, OTHER) if k.name in of_kind]
    total = sum(row["bytes"] for row in rows)
    if json:
        print_json({"schema": 1, "cache": str(cache), "bytes": total, "kinds": rows})
        return
    for row in rows:
        age = "  ".join((row[name] or "")[:10] for name in ("oldest_use", "last_use"))
        size = megabytes(row["bytes"])
        print(f"{row['kind']:<14}{row['entries']:>6}{size:>12}  {age:<22}  {row['meaning']}")
    print(f"{'all':<14}{'':>6}{megabytes(total):>12}  {cache}")


def prune_command(
    older_than: str | None,
    keep_bytes: str | None,
    kinds: Sequence[str],
    *,
    dry_run: bool,
    json: bool,
) -> None:
    """Remove, and say what; nothing to remove ends with exit 3.

    Raises:
        UsageError: an option is malformed, or the directory is not a cache of ours.
        SparkBuildError: there is nothing to do.
    """
    wish = Wish(
        kinds=kinds_named(kinds),
        older_than=None if older_than is None else seconds_of(older_than),
        keep_bytes=None if keep_bytes is None else bytes_of(keep_bytes),
    )
    cache = cache_dir()
    done = prune(cache, wish, dry_run=dry_run)
    busy = f"{done.in_use} stay because other runs may be using them" if done.in_use else ""
    if not done.removed:
        reason = busy or "nothing in the cache is what this is about"
        raise SparkBuildError(
            f"nothing to prune in {cache}: {reason}",
            Exit.NOTHING_TO_DO,
            hint="spark-build cache show",
        )
    if json:
        rows = [
            {
                "kind": entry.kind.name,
                "path": str(entry.path),
                "bytes": entry.bytes,
                "last_use": _moment(entry.used),
            }
            for entry in done.removed
        ]
        value = {"schema": 1, "cache": str(cache), "dry_run": dry_run, "removed": rows}
        counts = {"freed_bytes": done.freed, "kept_bytes": done.kept_bytes, "in_use": done.in_use}
        print_json({**value, **counts})
        return
    for name in dict.fromkeys(entry.kind.name for entry in done.removed):
        of_kind = [entry for entry in done.removed if entry.kind.name == name]
        size = megabytes(sum(entry.bytes for entry in of_kind))
        console.say(f"  {name:<14}{len(of_kind):>6}{size:>12}")
    if busy:
        console.warn(f"{busy}: used in the last {IN_USE / 3600:.0f} hours")
    verb = "would free" if dry_run else "freed"
    print(f"{verb} {megabytes(done.freed)}; {megabytes(done.kept_bytes)} stay")

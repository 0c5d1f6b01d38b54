"""``spark-build cache show``, ``cache servers``, ``cache prune`` and ``cache clean``."""

from typing import TYPE_CHECKING, Annotated

from builder.cli.command import Group, bytes_of, seconds_of
from builder.common.console import confirm, console, megabytes, print_json, tell
from builder.common.options import Json, Option
from builder.common.paths import cache_dir
from builder.errors import Exit, SparkBuildError

if TYPE_CHECKING:
    from builder.common.cache import Pruned

#: The age below which ``cache prune`` keeps entries if no age and no size is given.
_PRUNE_AGE = "30d"

_cache = Group(
    "cache", "spark-build cache show", "spark-build cache prune --dry-run", default="show"
)


@_cache.sub("show", "spark-build cache show", "spark-build cache show --json")
def show(*, json: Json = False) -> None:
    """Show the cache by kind: entries, bytes and last use."""
    from builder.common.cache import (
        KINDS,
        OTHER,
        CacheContents,
        CacheEntry,
        KindRow,
        entries,
        unknown,
    )

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
    tell(f"{'kind':<14}{'entries':>7}{'size':>11}  {'oldest use':<12}{'last use':<12}what it is")
    for row in rows:
        age = "  ".join((moment or "")[:10] for moment in (row.oldest_use, row.last_use))
        size = megabytes(row.bytes)
        tell(f"{row.kind:<14}{row.entries:>6}{size:>12}  {age:<22}  {row.meaning}")
    tell(f"{'all':<14}{'':>6}{megabytes(total):>12}  {cache}")


@_cache.sub("servers", "spark-build cache servers", "spark-build cache servers --end")
def servers(*, end: Annotated[bool, Option("End them now.")] = False, json: Json = False) -> None:
    """Show the vLLM processes that wait for questions of preflight.

    Each ends by itself: ten minutes after the last question, or earlier if memory is short.
    """
    from builder.proof import modelserver

    found = modelserver.running()
    ended = modelserver.end() if end else 0
    if json:
        print_json(modelserver.Processes(processes=tuple(found), ended=ended))
        return
    for one in found:
        state = "answers" if one.busy else f"unused for {one.idle:.0f} s"
        limit = f"ends after {one.ends_after / 60:.0f} min"
        tell(f"vLLM {one.vllm:<14}{megabytes(one.bytes):>10}  {state}, {limit}")
    if end:
        tell(f"{ended} ended")
    elif not found:
        tell("no process waits for questions")


Kinds = Annotated[
    tuple[str, ...],
    Option("Only this kind of entry; may be repeated.", "KIND", complete="kinds"),
]
DryRun = Annotated[bool, Option("Show what would be removed.", names="-n")]


@_cache.sub(
    "prune",
    "spark-build cache prune --older-than 7d",
    "spark-build cache prune --keep-bytes 5GB --dry-run",
    "spark-build cache prune --kind sandboxes",
)
def prune(
    older_than: Annotated[
        str | None,
        Option(
            "Entries unused for this long: 90m, 12h, 2w (default without --keep-bytes: 30d).",
            "AGE",
        ),
    ] = None,
    keep_bytes: Annotated[
        str | None,
        Option(
            "Shrink the cache to this size, least recently used first: 500MB, 5GB, 2GiB.", "SIZE"
        ),
    ] = None,
    kind: Kinds = (),
    *,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Remove entries unused for 30 days, or another time.

    Safe during other runs: entries used since a day before they began are then kept.
    """
    from builder.common.cache import PruneRequest, kinds_named
    from builder.common.cache import prune as pruned

    if older_than is None and keep_bytes is None:
        older_than = _PRUNE_AGE
    request = PruneRequest(
        kinds=kinds_named(kind),
        older_than=None if older_than is None else seconds_of(older_than),
        keep_bytes=None if keep_bytes is None else bytes_of(keep_bytes),
    )
    done = pruned(cache_dir(), request, dry_run=dry_run)
    remaining = f"; the other {megabytes(done.kept_bytes)} are kept" if done.kept_bytes else ""
    if older_than is not None:
        nothing = f"every entry was used within the last {older_than}{remaining}"
    else:
        nothing = f"its removable entries already take less than {keep_bytes}"
    _tell(done, nothing, "spark-build cache clean", dry_run=dry_run, json=json)


@_cache.sub(
    "clean",
    "spark-build cache clean --dry-run",
    "spark-build cache clean --kind sandboxes --yes",
)
def clean(
    kind: Kinds = (),
    *,
    yes: Annotated[bool, Option("Skip the confirmation.", names="-y")] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Remove the whole cache, after confirmation.

    Safe during other runs: entries used since a day before they began are then kept.
    """
    from builder.common.cache import PruneRequest, kinds_named, prune

    request = PruneRequest(kinds=kinds_named(kind))
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


def _tell(done: "Pruned", nothing: str, hint: str, *, dry_run: bool, json: bool) -> None:
    """Print what was removed.

    Raises:
        SparkBuildError: nothing was removed.
    """
    from builder.common.cache import IN_USE, Removal

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
        console.warn(f"{busy}: used since {IN_USE / 3600:.0f} hours before they began")
    verb = "would free" if dry_run else "freed"
    tell(f"{verb} {megabytes(done.freed)}; {megabytes(done.kept_bytes)} stay")

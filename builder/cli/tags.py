"""``spark-build tags``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.common.console import console, megabytes, print_json
from builder.errors import UsageError
from builder.images.registry.copy import Locations
from builder.publishing.repository import TaggedManifests, parse_target
from builder.publishing.tags import (
    HeldRow,
    Listing,
    Pruned,
    Retention,
    StoredManifest,
    judge,
    prune,
    removals,
    take_inventory,
)

if TYPE_CHECKING:
    from builder.publishing.tags import Inventory, Removal, RetentionDecision

_PROOF = {True: "verified", False: "UNVERIFIED", None: "-"}


def tags_command(
    *, repository: str, prune_old: bool, keep: int | None, dry_run: bool, json: bool
) -> None:
    """List a repository; with ``prune_old``, delete what the retention rules do not keep."""
    reference = parse_target(repository)
    if prune_old != (keep is not None):
        raise UsageError(
            "--prune and --keep must be set together",
            hint=f"spark-build tags {reference.name} --prune --keep 5 --dry-run",
        )
    with Locations() as places:
        opened = places.registry(reference.host).repository(reference.repository)
        inventory = take_inventory(opened)
        if keep is None:
            _show(inventory, json=json)
            return
        names = TaggedManifests(opened)
        named = names.look()
        verdicts = judge(inventory, keep, named)
        wanted, done = removals(opened, inventory, verdicts, named), Pruned()
        try:
            if not dry_run:
                prune(opened, wanted, names, done)
        finally:
            if json:
                name = inventory.repository
                print_json(Retention.of(name, keep, verdicts, wanted, done, dry_run=dry_run))
            else:
                _show_verdicts(verdicts)
                _show_removals(wanted, None if dry_run else done)


def _show(inventory: Inventory, *, json: bool) -> None:
    if json:
        rows = tuple(map(HeldRow.of, inventory.held))
        print_json(Listing(repository=inventory.repository, images=rows))
        return
    if not inventory.held:
        console.say(f"  {inventory.repository} has no image")
    for held in inventory.held:
        _show_held(held)


def _show_held(held: StoredManifest) -> None:
    """Print one block for each image: names first, then its details."""
    names = [f"{tag} ({held.kind(tag)})" for tag in held.tags]
    print(f"{', '.join(names)}")
    print(f"  digest     {held.digest}")
    if not held.images:
        return
    row = HeldRow.of(held)
    proof = _PROOF[held.verified] + (f" ({', '.join(held.levels)})" if held.levels else "")
    added = "-" if held.added is None else megabytes(held.added)
    plans = [f"{image.plan_digest}  {image.platform}" for image in held.images]
    if held.overlay:
        print(f"  is         an overlay: it runs on vllm/vllm-openai:v{row.version}, not alone")
    for key, value in (
        ("plan", "\n             ".join(plans)),
        ("base", row.base),
        ("layers", ", ".join(row.layers)),
        ("published", held.published or f"- (made {row.created})"),
        ("proof", proof + (", signed" if held.signed else "")),
        ("adds", added),
    ):
        print(f"  {key:<10} {value}")


def _show_verdicts(verdicts: list[RetentionDecision]) -> None:
    for verdict in verdicts:
        word = "keep" if verdict.keep else "old"
        print(f"{word:<13}{', '.join(verdict.held.tags)}  ({verdict.reason})")


def _show_removals(wanted: list[Removal], done: Pruned | None) -> None:
    """Print what a dry run would delete, or what was deleted, even if the run ended early."""
    if done is None:
        for removal in wanted:
            print(f"{'would delete':<13}{removal}")
        return
    spared = {row.digest: f"  ({row.reason})" for row in done.spared}
    for removal in wanted:
        word = "deleted" if removal.digest in done.deleted else "left"
        print(f"{word:<13}{removal}{spared.get(removal.digest, '')}")
    if done.deleted:
        console.say("  the registry frees the space when its garbage collection runs")

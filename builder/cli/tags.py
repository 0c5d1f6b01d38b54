"""``spark-build tags``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from builder.cli.show import print_json
from builder.console import console, megabytes
from builder.errors import UsageError
from builder.publish.inventory import Held, take_inventory
from builder.publish.prune import judge, prune
from builder.publish.repository import PublishRepository, parse_target
from builder.registry.locations import Locations

if TYPE_CHECKING:
    from builder.publish.inventory import Inventory
    from builder.publish.prune import Verdict

_PROOF = {True: "verified", False: "UNVERIFIED", None: "-"}


def tags_command(
    *, repository: str, prune_old: bool, keep: int | None, dry_run: bool, json: bool
) -> None:
    """List a repository; with ``prune_old`` delete what retention does not keep."""
    reference = parse_target(repository)
    if prune_old != (keep is not None):
        raise UsageError(
            "--prune and --keep belong together",
            hint=f"spark-build tags {reference.name} --prune --keep 5 --dry-run",
        )
    with Locations() as places:
        opened = PublishRepository(places.registry(reference.host), reference.repository)
        inventory = take_inventory(opened)
        if keep is None:
            _show(inventory, json=json)
            return
        verdicts = judge(inventory, keep)
        document: dict[str, Any] = {
            "schema": 1,
            "repository": inventory.repository,
            "keep": keep,
            "dry_run": dry_run,
            "images": [verdict.as_json() for verdict in verdicts],
        }
        if json:
            print_json(document)
        document["deleted"] = [] if dry_run else prune(opened, inventory, verdicts)
        if not json:
            _show_verdicts(verdicts, dry_run=dry_run)


def _show(inventory: Inventory, *, json: bool) -> None:
    if json:
        images = [held.as_json() for held in inventory.held]
        print_json({"schema": 1, "repository": inventory.repository, "images": images})
        return
    if not inventory.held:
        console.say(f"  {inventory.repository} holds no image")
    for held in inventory.held:
        _show_held(held)


def _show_held(held: Held) -> None:
    """One block an image: names first, then what is known of it."""
    names = [f"{tag} ({held.kind(tag)})" for tag in held.tags]
    print(f"{', '.join(names)}")
    print(f"  digest     {held.digest}")
    if not held.images:
        return
    row = held.as_json()
    proof = _PROOF[held.verified] + (f" ({', '.join(held.levels)})" if held.levels else "")
    added = "-" if held.added is None else megabytes(held.added)
    plans = [f"{image.plan_digest}  {image.platform}" for image in held.images]
    for key, value in (
        ("plan", "\n             ".join(plans)),
        ("base", row["base"]),
        ("layers", ", ".join(row["layers"])),
        ("published", held.published or f"- (made {row['created']})"),
        ("proof", proof + (", signed" if held.signed else "")),
        ("adds", added),
    ):
        print(f"  {key:<10} {value}")


def _show_verdicts(verdicts: list[Verdict], *, dry_run: bool) -> None:
    for verdict in verdicts:
        word = "keep" if verdict.keep else "would delete" if dry_run else "deleted"
        print(f"{word:<13}{', '.join(verdict.held.tags)}  ({verdict.reason})")
    if not dry_run and not all(verdict.keep for verdict in verdicts):
        console.say("  the registry frees the space when its garbage collection runs")

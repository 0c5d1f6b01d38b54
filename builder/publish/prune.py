"""Retention: the newest images of each profile stay, and so does everything that a tag names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.console import console
from builder.errors import RemoteError, UsageError
from builder.publish.referrers import subject_of_tag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.publish.inventory import Held, Inventory
    from builder.publish.ports import PublishTarget


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What becomes of one image, and why."""

    held: Held
    keep: bool
    reason: str

    def as_json(self) -> dict[str, Any]:
        """The verdict in the document of the command."""
        return {
            "digest": self.held.digest,
            "tags": list(self.held.tags),
            "keep": self.keep,
            "reason": self.reason,
        }


def judge(inventory: Inventory, keep: int) -> list[Verdict]:
    """A verdict on every image, the newest first.

    Raises:
        UsageError: ``keep`` would leave nothing.
    """
    if keep < 1:
        raise UsageError("--keep must be 1 or more: retention never empties a repository")
    needed = _named_otherwise(inventory)
    counts: dict[str, int] = {}
    verdicts = []
    for held in inventory.held:
        other = [tag for tag in held.tags if held.kind(tag) != "immutable"]
        if other:
            verdicts.append(Verdict(held=held, keep=True, reason=f"named by {', '.join(other)}"))
            continue
        profile = held.subject.name.profile if held.subject is not None else ""
        counts[profile] = counts.get(profile, 0) + 1
        if counts[profile] <= keep:
            reason = f"among the newest {keep} of {profile}"
            verdicts.append(Verdict(held=held, keep=True, reason=reason))
        elif held.digest in needed:
            verdicts.append(Verdict(held=held, keep=True, reason=f"part of {needed[held.digest]}"))
        else:
            reason = f"older than the newest {keep} of {profile}"
            verdicts.append(Verdict(held=held, keep=False, reason=reason))
    return verdicts


def _named_otherwise(inventory: Inventory) -> dict[str, str]:
    """Images that an index of this repository lists: they go with it or not at all."""
    return {
        image.digest: held.tags[0]
        for held in inventory.held
        if held.subject is not None
        for image in held.subject.images
        if image.digest != held.digest
    }


def prune(
    repository: PublishTarget, inventory: Inventory, verdicts: Sequence[Verdict]
) -> list[str]:
    """Delete what is not kept, each image before its proofs; gives the digests that went.

    Raises:
        RemoteError: the registry refuses deletes.
    """
    kept = {digest for verdict in verdicts if verdict.keep for digest in _digests(verdict.held)}
    gone: list[str] = []
    for verdict in verdicts:
        if verdict.keep:
            continue
        console.say(f"  deleting {', '.join(verdict.held.tags)}: {verdict.reason}")
        _remove(repository, verdict.held.digest, verdicts)
        gone.append(verdict.held.digest)
        for digest in [*_digests(verdict.held), *(r.digest for r in verdict.held.referrers)]:
            if digest not in kept and digest not in gone:
                _remove(repository, digest, verdicts)
                gone.append(digest)
    for tag in inventory.attachments:
        gone += _drop_orphan(repository, tag, kept, verdicts)
    return gone


def _digests(held: Held) -> list[str]:
    """The manifest and, of an index, what it lists."""
    images = held.subject.images if held.subject is not None else ()
    return list(dict.fromkeys([held.digest, *(image.digest for image in images)]))


def _drop_orphan(
    repository: PublishTarget, tag: str, kept: set[str], verdicts: Sequence[Verdict]
) -> list[str]:
    """Proofs and signatures of an image that is gone, by this run or one that was interrupted."""
    subject = subject_of_tag(tag)
    if subject in kept or repository.digest_of(subject) is not None:
        return []
    digest = repository.digest_of(tag)
    if digest is None:
        return []
    _remove(repository, digest, verdicts)
    return [digest]


def _remove(repository: PublishTarget, digest: str, verdicts: Sequence[Verdict]) -> None:
    if repository.remove(digest):
        return
    names = [tag for verdict in verdicts if not verdict.keep for tag in verdict.held.tags]
    raise RemoteError(
        f"{repository.name}: this registry refuses deletes, so nothing was deleted; by the rule "
        f"these would go: {', '.join(names)}",
        hint="delete them in the registry's own interface",
    )

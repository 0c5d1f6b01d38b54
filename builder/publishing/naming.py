"""Tags: those that move, those that do not, and their names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from builder.errors import UsageError
from builder.images.registry.reference import check_tag
from builder.publishing.repository import (
    is_fallback_tag,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


PREVIOUS = "-previous"
#: The end of immutable tags: twelve digits of a plan's or base's digest.
IMMUTABLE = re.compile(r".*-[0-9a-f]{12}(-unverified)?")


def check_moving(tags: Sequence[str]) -> tuple[str, ...]:
    """Check moving tags.

    Raises:
        UsageError: one is not a valid tag, or has the form of an immutable tag.
    """
    for tag in map(check_tag, tags):
        if IMMUTABLE.fullmatch(tag) or is_fallback_tag(tag):
            raise UsageError(f"{tag}: immutable tags cannot be moved")
        if tag.endswith(PREVIOUS):
            raise UsageError(
                f"{tag}: spark-build sets this tag itself when {tag.removesuffix(PREVIOUS)} moves"
            )
        if len(tag + PREVIOUS) > 128:
            raise UsageError(f"{tag}: the name is too long for {PREVIOUS} after it")
    return tuple(dict.fromkeys(tags))


def mirror_tag(digest: str) -> str:
    """The tag of a base's copy."""
    return f"base-{digest.removeprefix('sha256:')[:12]}"

"""The parts of an immutable tag: release, profile and plan."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.applier.digests import canonical_json, sha256_hex
from builder.engines.metadata import LABEL_PREFIX, PLAN_LABEL
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NOT_IN_A_TAG = re.compile(r"[^A-Za-z0-9_.-]+")
_TAG_LIMIT = 128
#: Hexadecimal digits of the plan digest, as in the names of built images.
_SHORT = 12
UNVERIFIED = "-unverified"


@dataclass(frozen=True, kw_only=True)
class Name:
    """The parts of an immutable tag.

    ``plan_digest`` is the plan's; for images of several plans the sha256 of their sorted digests as
    canonical JSON.
    """

    version: str
    profile: str
    plan_digest: str

    def tag(self, *, verified: bool) -> str:
        """``<vllm>-<profile>-<plan12>``, with a mark for unverified images.

        Raises:
            UsageError: the name is too long for a tag.
        """
        short = self.plan_digest.removeprefix("sha256:")[:_SHORT]
        words = f"{self.version}-{self.profile}-{short}{'' if verified else UNVERIFIED}"
        tag = _NOT_IN_A_TAG.sub("-", words).lstrip(".-")
        if len(tag) > _TAG_LIMIT:
            raise UsageError(
                f"{tag} is {len(tag)} characters long, a tag may have {_TAG_LIMIT}",
                hint="create a profile for this selection of layers",
            )
        return tag


def name_of(labels: Sequence[Mapping[str, str]], subject: str) -> Name:
    """The name for images with these labels under one tag.

    Raises:
        UsageError: a label is missing, or the images disagree.
    """
    plans = sorted({one[PLAN_LABEL] for one in labels})
    if not plans:
        raise UsageError(
            f"{subject} was not made by spark-build; it lacks the label {PLAN_LABEL}",
            hint="spark-build image --layers b12x-full",
        )

    def agreed(label: str, default: str) -> str:
        values = {one.get(label) or default for one in labels}
        if len(values) > 1:
            raise UsageError(
                f"the images of {subject} disagree on {label}: {', '.join(sorted(values))}",
                hint="publish them one by one",
            )
        return values.pop()

    profiles = agreed(f"{LABEL_PREFIX}.profiles", "").replace(",", "-")
    title = agreed("org.opencontainers.image.title", "custom").removeprefix("spark-build ")
    return Name(
        version=agreed("org.opencontainers.image.version", "unknown"),
        profile=profiles or title,
        plan_digest=plans[0] if len(plans) == 1 else f"sha256:{sha256_hex(canonical_json(plans))}",
    )

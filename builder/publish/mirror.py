"""Copies the base image next to the published image, because nightly bases disappear.

The base's layers are in the image anyway, so a mirror in the same repository costs a manifest and a
configuration.  The base in the plan may be an index; the patched entry is kept,
and the index's bytes are kept in the note, so that the digest in the plan still leads
to the image.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from builder.engines.metadata import LABEL_PREFIX
from builder.errors import UsageError
from builder.model.base import base_kind
from builder.publish.push import Mirror
from builder.publish.referrers import Attachment
from builder.publish.subject import read_subject
from builder.registry.reference import is_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from builder.documents.plan import PlannedBase
    from builder.publish.protocols import PublishTarget
    from builder.publish.sources import StoredImage
    from builder.publish.subject import Image, Subject
    from builder.registry.locations import Locations

MEDIA_TYPE = "application/vnd.spark-build.base.v1+json"
#: Annotation of the note: the digest of the mirrored manifest.
MIRROR = f"{LABEL_PREFIX}.base-mirror"


def mirror_tag(digest: str) -> str:
    """The tag of a base's copy."""
    return f"base-{digest.removeprefix('sha256:')[:12]}"


def mirrors_of(
    stored: StoredImage, places: Locations
) -> tuple[tuple[Mirror, ...], Mapping[str, list[Attachment]]]:
    """The images' bases to copy, and the note that is attached to each image.

    Raises:
        UsageError: an image has no base image, or its base is for another platform.
        RemoteError: a base is no longer available.
    """
    mirrors: dict[str, Mirror] = {}
    notes: dict[str, list[Attachment]] = {}
    for image in stored.subject.ours:
        base = stored.baked[image.digest].plan.base
        if not base_kind(base.kind).is_image:
            raise UsageError(
                f"{image.digest} is an overlay of {base.ref}: there is no base image to mirror",
                hint="leave --mirror-base out",
            )
        location = places.open(f"{_name(base.ref)}@{base.digest}")
        whole = read_subject(location.image, base.digest)
        chosen = _entry(whole, image)
        tag = mirror_tag(chosen.digest)
        one = read_subject(location.image, chosen.digest)
        mirrors[tag] = Mirror(subject=one, source=location.image, tag=tag)
        notes[image.digest] = [_note(base, whole, chosen, tag)]
    return tuple(mirrors.values()), notes


def _name(ref: str) -> str:
    return ref.removeprefix("docker://").partition("@")[0]


def _entry(whole: Subject, image: Image) -> Image:
    """The base's image with the same first layers as ours."""
    for candidate in whole.images:
        count = len(candidate.layers)
        if [d.digest for d in candidate.layers] == [d.digest for d in image.layers[:count]]:
            return candidate
    found = [candidate for candidate in whole.images if candidate.platform == image.platform]
    if len(found) != 1:
        raise UsageError(f"{whole.digest} has no single image for {image.platform}")
    return found[0]


def _note(base: PlannedBase, whole: Subject, chosen: Image, tag: str) -> Attachment:
    document = {
        "schema": 1,
        "name": base.ref,
        "digest": base.digest,
        "manifest": chosen.digest,
        "tag": tag,
    }
    if whole.digest != chosen.digest:
        document["index"] = whole.root.data.decode()
    data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return Attachment(artifact_type=MEDIA_TYPE, data=data, annotations={MIRROR: chosen.digest})


def mirrored_base(repository: PublishTarget, image: Image) -> str | None:
    """The noted copy of the image's base, as a base reference, or None.

    The note need not be trusted: a rebuild on a wrong base has another digest.
    """
    for entry in repository.referrers(image.digest):
        if entry.artifact_type == MEDIA_TYPE and is_digest(entry.annotations.get(MIRROR, "")):
            digest = entry.annotations[MIRROR]
            if repository.digest_of(digest) is not None:
                return f"docker://{repository.name}@{digest}"
    return None

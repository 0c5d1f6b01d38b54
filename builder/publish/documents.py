"""The documents that are attached to a published image: evidence, provenance, bill of materials."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from builder import settings
from builder.publish import evidence, provenance, sbom
from builder.publish.referrers import Attachment
from builder.util.documents import moment

if TYPE_CHECKING:
    from builder.publish.baked import Baked
    from builder.publish.evidence import Claim
    from builder.publish.proof import Proof
    from builder.publish.subject import Image

#: How BuildKit and cosign say which predicate an in-toto statement holds.
PREDICATE_ANNOTATION = "in-toto.io/predicate-type"
CREATED = "org.opencontainers.image.created"


def published_at() -> str:
    """Now, or ``SOURCE_DATE_EPOCH``: the one time in what is published (RFC 3339, UTC).

    It stands on the evidence only, so image, provenance and bill stay the same from run to run.
    """
    named = settings.EPOCH.value
    seconds = int(named) if named.isdigit() else int(time.time())
    return moment(seconds)


def documents(image: Image, baked: Baked, claim: Claim, proof: Proof) -> list[Attachment]:
    """Everything that is attached to one image."""
    levels = ",".join(proof.evidence.levels())
    return [
        Attachment(
            artifact_type=evidence.MEDIA_TYPE,
            data=proof.evidence.about(claim),
            annotations={
                CREATED: published_at(),
                evidence.PASSED: "true" if proof.verified else "false",
                evidence.PASSED_LEVELS: levels,
            },
        ),
        Attachment(
            artifact_type=provenance.MEDIA_TYPE,
            data=provenance.provenance(image, baked),
            annotations={PREDICATE_ANNOTATION: provenance.PREDICATE_TYPE},
        ),
        Attachment(artifact_type=sbom.MEDIA_TYPE, data=sbom.bill_of_materials(image, baked)),
    ]

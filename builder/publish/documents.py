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

#: The annotation of BuildKit and cosign for the predicate type of an in-toto statement.
PREDICATE_ANNOTATION = "in-toto.io/predicate-type"
CREATED = "org.opencontainers.image.created"


def published_at() -> str:
    """The time now, or ``SOURCE_DATE_EPOCH``: the only timestamp of a publication (RFC 3339, UTC).

    Only the evidence has it, so image, provenance and bill of materials are reproducible.
    """
    named = settings.EPOCH.value
    seconds = int(named) if named.isdigit() else int(time.time())
    return moment(seconds)


def documents(image: Image, baked: Baked, claim: Claim, proof: Proof) -> list[Attachment]:
    """The documents that are attached to one image."""
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

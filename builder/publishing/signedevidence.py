"""Evidence that somebody else attached, and that the user's key has signed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.common.console import console
from builder.errors import Exit, RemoteError, SparkBuildError
from builder.images.registry.reference import Reference
from builder.publishing.cosign import Trust, verify_signature
from builder.publishing.evidence import attached_evidence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.images.registry.client import Repository
    from builder.publishing.evidence import Evidence

#: Pieces of evidence whose signatures are checked; each takes a call of cosign.
_MOST_CHECKED = 8


def signed_evidence(repository: Repository, digest: str, key: str) -> Iterator[Evidence]:
    """The evidence attached to an image whose own manifest has a signature of this key.

    A signature of the image does not count: it says who made the image, and anybody may have
    attached the evidence.

    Raises:
        UsageError: there is no such key.
        EngineError: cosign is not installed.
        RemoteError: cosign failed.
    """
    checked: dict[str, bool] = {}
    try:
        for evidence in attached_evidence(repository, digest):
            if evidence.manifest not in checked and len(checked) < _MOST_CHECKED:
                reference = Reference(
                    host=repository.registry.host,
                    repository=repository.path,
                    digest=evidence.manifest,
                )
                checked[evidence.manifest] = _is_signed(reference, key)
            if checked.get(evidence.manifest):
                yield evidence
    except RemoteError as error:
        console.warn(f"{repository.name}: its evidence cannot be read: {error}")


def _is_signed(reference: Reference, key: str) -> bool:
    try:
        verify_signature(reference, Trust(key=key))
    except SparkBuildError as error:
        if error.code != Exit.VERIFY_FAILED:
            raise
        console.warn(f"this evidence is not believed: {error}")
        return False
    return True

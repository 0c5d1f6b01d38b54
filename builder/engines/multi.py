"""Images for several platforms: the patched entries of the base's index, in a new index.

The other entries are kept byte for byte, or left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.engines.deliver import Delivery, deliver
from builder.engines.oci import opened_of
from builder.engines.patched import merged_annotations, write_patched
from builder.errors import UsageError
from builder.registry.manifests import entries
from builder.registry.model import OCI_INDEX, RawManifest

if TYPE_CHECKING:
    from pathlib import Path

    from builder.engines.model import BuildRequest, BuiltImage
    from builder.engines.scratch import Scratch

#: BuildKit's annotation for the subject of an attestation.
_ABOUT = "vnd.docker.reference.digest"


@dataclass(frozen=True, kw_only=True)
class IndexRequest:
    """A new index: one request for each patched entry."""

    requests: tuple[BuildRequest, ...]
    tag: str
    keep: bool = False
    output: Path | None = None
    push: bool = False
    thin: bool = False


@dataclass(frozen=True)
class BuiltIndex:
    """The index, and the digests of patched manifests by the digests that they replace."""

    image: BuiltImage
    digests: dict[str, str]


def build_index(request: IndexRequest) -> BuiltIndex:
    """Build every entry and the index, and deliver it.

    Raises:
        UsageError, BuildFailed, RemoteError: see ``deliver``.
    """
    digests: dict[str, str] = {}

    def write(scratch: Scratch) -> tuple[RawManifest, int]:
        return _write(scratch, request, digests)

    image = opened_of(request.requests[0]).image
    built = deliver(
        Delivery(
            write=write,
            tag=request.tag,
            output=request.output,
            push=request.push,
            base=image.source,
            locations=image.locations,
            thin=request.thin,
        )
    )
    return BuiltIndex(built, digests)


def _write(
    scratch: Scratch, request: IndexRequest, digests: dict[str, str]
) -> tuple[RawManifest, int]:
    new: dict[str, RawManifest] = {}
    added = 0
    for single in request.requests:
        opened = opened_of(single)
        manifest, size = write_patched(scratch, single, opened)
        new[opened.image.manifest.digest] = manifest
        added += size
    digests.update({was: manifest.digest for was, manifest in new.items()})
    top = opened_of(request.requests[0]).image.top
    listed = {entry.digest for entry in entries(top)}
    if not listed >= new.keys():
        raise UsageError(f"{request.requests[0].plan.base.ref} has indexes in its index")
    value: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": top.media_type,
        "manifests": _entries(top, new, keep=request.keep),
    }
    if top.media_type == OCI_INDEX:
        value["annotations"] = merged_annotations(top, request.requests[0].plan)
    return scratch.add_manifest(value, top.media_type), added


def _entries(top: RawManifest, new: dict[str, RawManifest], *, keep: bool) -> list[Any]:
    """The base's entries in their order: patched ones replaced, others kept or left out."""
    found = []
    for entry, raw in zip(entries(top), top.json()["manifests"], strict=True):
        if entry.digest in new:
            replaced = new[entry.digest].descriptor.as_json()
            found.append({**replaced, "platform": dict(entry.platform)})
        elif keep and entry.annotations.get(_ABOUT) not in new:
            found.append(raw)
    return found

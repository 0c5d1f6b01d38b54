"""The embedded engine: writes images itself; needs no daemon, no root and no GPU.

For a ``pypi:`` base it makes an overlay (``engines/overlay.py``); for an image in a registry or a
layout, the patched image (``engines/patched.py``).  Either goes into an OCI layout, a registry or a
Docker Engine, and its bytes depend on the plan alone.  For several platforms it patches entries of
the base's index, in a new index; the others are kept byte for byte, or left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.common.diskspace import Need
from builder.common.model.reference import Ref
from builder.errors import EngineError, UsageError
from builder.images.engines import docker, metadata
from builder.images.engines.deliver import Delivery, deliver
from builder.images.engines.docker import engine_needs
from builder.images.engines.metadata import added_bytes, image_layers
from builder.images.engines.model import refuses_base
from builder.images.engines.overlay import overlay_recipe, write_overlay
from builder.images.engines.patched import merged_annotations, write_patched
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import OCI_INDEX, RawManifest, entries

if TYPE_CHECKING:
    from pathlib import Path

    from builder.common.model.plan import BuildPlan
    from builder.images.engines.layers import Scratch
    from builder.images.engines.model import BuildRequest, BuiltImage
    from builder.images.rootfs.base import InLayers


class OciEngine:
    """Writes layers, configuration and manifest, and brings them where they should be."""

    name = "oci"

    def missing(self) -> str | None:
        return None

    def refuses(self, plan: BuildPlan) -> str | None:
        return refuses_base(plan)

    def render(self, plan: BuildPlan) -> str:
        """The Dockerfile lines with which the overlay goes onto an image, or its equivalent."""
        if plan.base.is_wheels:
            return overlay_recipe(plan, Ref("oci:OVERLAY"))
        lines = [f"FROM {plan.base.ref.partition('@')[0]}@{plan.base.digest}"]
        for name, files in image_layers(plan):
            lines.append(f"# layer {name}: {sum(f is not None for f in files.values())} files")
        lines += [
            f"ENV {name}={metadata.quoted(value)}" for name, value in sorted(plan.env.items())
        ]
        lines += [
            f"LABEL {metadata.quoted(name)}={metadata.quoted(value)}"
            for name, value in metadata.labels(plan).items()
        ]
        return "\n".join(lines) + "\n"

    def needs(self, request: BuildRequest) -> list[Need]:
        added, base = added_bytes(request.plan), base_bytes(request)
        if request.output is not None:
            found = [Need.output(request.output, added, "the new layers, uncompressed")]
            if base and not request.thin:
                found.append(Need.output(request.output, base, "the base's layers"))
            return found
        found = [Need.temporary(added, "the new layers, uncompressed")]
        return found if request.push else found + load_needs(added)

    def build(self, request: BuildRequest) -> BuiltImage:
        plan = request.plan
        if plan.base.is_wheels:
            return deliver(
                Delivery(
                    write=lambda scratch: write_overlay(scratch, plan),
                    tag=request.tag,
                    output=request.output,
                    push=request.push,
                    platform={"architecture": plan.base.platform.architecture, "os": "linux"},
                )
            )
        opened = opened_of(request)
        return deliver(
            Delivery(
                write=lambda scratch: write_patched(scratch, request, opened),
                tag=request.tag,
                output=request.output,
                push=request.push,
                base=opened.image.source,
                locations=opened.image.locations,
                thin=request.thin,
                platform=opened.image.config.platform,
            )
        )


def opened_of(request: BuildRequest) -> InLayers:
    """The base's image.

    Raises:
        UsageError: a Docker Engine has read it, so that its layers are not at hand.
    """
    if request.base is None or request.base.opened is None:
        raise UsageError(
            f"{request.plan.base.ref} was read through a Docker Engine, but the oci engine reads "
            f"only registries and layouts",
            hint=f"--base docker://{request.plan.base.ref}",
        )
    return request.base.opened


def base_bytes(request: BuildRequest) -> int:
    """Packed bytes of the base's layers, where they are at hand and not in the output already."""
    opened = None if request.base is None else request.base.opened
    if opened is None:
        return 0
    there = None if request.output is None else LayoutDirectory(request.output)
    absent = (d for d in opened.image.layers if there is None or not there.has(d.digest))
    return sum(layer.size for layer in absent)


def load_needs(size: int) -> list[Need]:
    """What the Docker Engine needs for new files of so many bytes: as layers, and unpacked."""
    try:
        client = docker.connect()
    except EngineError:  # which the build will say
        return []
    try:
        return engine_needs(client, 2 * size, "the new layers, and unpacked")
    finally:
        client.close()


# -------------------------------------------------------------------------------- several platforms


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

"""The embedded engine: writes images itself; needs no daemon, no root and no GPU.

For a ``pypi:`` base it makes an overlay (``engines/overlay.py``); for an image in a registry or a
layout, the patched image (``engines/patched.py``).  Either goes into an OCI layout, a registry or a
Docker Engine, and its bytes depend on the plan alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.engines import docker, metadata
from builder.engines.contents import added_bytes, image_layers
from builder.engines.deliver import Delivery, deliver
from builder.engines.model import refuses_base
from builder.engines.overlay import overlay_recipe, write_overlay
from builder.engines.patched import write_patched
from builder.engines.space import engine_needs
from builder.errors import EngineError, UsageError
from builder.registry.layout import LayoutDirectory
from builder.util.diskspace import Need

if TYPE_CHECKING:
    from builder.engines.model import BuildRequest, BuiltImage
    from builder.model.plan import BuildPlan
    from builder.rootfs.base import OpenedImage


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
            return overlay_recipe(plan, "oci:OVERLAY")
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


def opened_of(request: BuildRequest) -> OpenedImage:
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

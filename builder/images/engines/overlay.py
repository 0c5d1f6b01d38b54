"""Overlays: images with only the changed and added files, for a base of released wheels.

They lie at the paths that they have in the image they are meant for.  Removed files stand in the
receipts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.console import console
from builder.common.hints import reason
from builder.common.pypi import write_atomically
from builder.errors import RemoteError, UsageError
from builder.images.engines import metadata
from builder.images.engines.layers import LayerInputs, say_layer
from builder.images.engines.metadata import image_layers
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.locations import layout_place
from builder.images.registry.model import (
    OCI_CONFIG,
    OCI_MANIFEST,
    ImageConfig,
    RawManifest,
    blobs,
    check_manifest,
    is_index,
    parse_config,
)
from builder.images.rootfs.image import find_image
from builder.images.rootfs.layers import LayerCache
from builder.images.rootfs.tar import DIR, FILE
from builder.images.rootfs.view import Rootfs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from builder.common.documents.plan import PlanDocument
    from builder.common.model.plan import BuildPlan, RecordedPlan
    from builder.common.model.reference import Ref
    from builder.images.engines.layers import Scratch
    from builder.images.engines.model import BuiltImage


def write_overlay(scratch: Scratch, plan: BuildPlan) -> tuple[RawManifest, int]:
    """Write layers, configuration and manifest; returns the manifest and the layers' size."""
    epoch, created = plan.epoch, metadata.created(plan)
    made, history = [], []
    for name, files in image_layers(plan):
        blob = scratch.add_layer(files, epoch, LayerInputs.of(plan, [name]))
        say_layer(name, len(files), blob)
        made.append(blob)
        history.append({"created": created, "created_by": f"spark-build layer {name}"})
    config = scratch.add_json(
        {
            "architecture": plan.base.platform.architecture,
            "os": "linux",
            "created": created,
            "config": {
                "Env": [f"{k}={v}" for k, v in sorted(plan.env.items())],
                "Labels": metadata.labels(plan),
            },
            "rootfs": {"type": "layers", "diff_ids": [b.diff_id for b in made]},
            "history": history,
        },
        OCI_CONFIG,
    )
    manifest = scratch.add_manifest(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": metadata.OVERLAY_TYPE,
            "config": config.descriptor(),
            "layers": [b.descriptor() for b in made],
            "annotations": metadata.labels(plan),
        },
        OCI_MANIFEST,
    )
    return manifest, sum(b.size for b in made)


def layout_digest(layout: Path, reference: str = "") -> str:
    """The manifest digest of the image of that name in a layout; ``""`` is the only one.

    Raises:
        UsageError: no single image is meant, or the directory is no layout.
    """
    try:
        return LayoutDirectory(layout).resolve(reference)
    except RemoteError as error:
        raise UsageError(f"{layout} is not an OCI layout: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """How an overlay goes onto the image that it is meant for."""

    base: str
    #: name of the image made from base and overlay
    image: str
    dockerfile: str
    #: the build command without the Dockerfile's path
    build: str

    def named(self, image: str) -> Overlay:
        """The same, for an image of another name."""
        old, new = (f" -t {shlex.quote(name)}" for name in (self.image, image))
        return replace(self, image=image, build=self.build.replace(old, new, 1))

    def command(self, dockerfile: Path | None = None) -> str:
        """The build command for a Dockerfile with that path."""
        return f"{self.build} - <{shlex.quote(str(dockerfile or 'Dockerfile'))}"


def overlay_of(plan: BuildPlan, built: BuiltImage) -> Overlay:
    """How an overlay that was built goes onto its image."""
    return overlay_onto(plan.document, metadata.labels(plan), built.subject)


def overlay_recipe(plan: BuildPlan, overlay: Ref) -> str:
    """The Dockerfile for an overlay: ``oci:DIR@DIGEST`` or an image name."""
    return overlay_onto(plan.document, metadata.labels(plan), overlay).dockerfile


def name_of_both(plan: PlanDocument) -> str:
    """Name of the image made from a plan's overlay and its base."""
    return f"spark-build/{plan.name}:{plan.base.packages['vllm'].replace('+', '-')}"


def overlay_onto(plan: PlanDocument, labels: Mapping[str, str], overlay: Ref) -> Overlay:
    """How to put an overlay (``oci:DIR@DIGEST`` or an image name) on its base image.

    A Dockerfile that copies files, then removes replaced files in one step and checks the others
    against their receipts.  Its labels mark it as built by spark-build, so it can be published.
    """
    base, image = f"vllm/vllm-openai:v{plan.base.packages['vllm']}", name_of_both(plan)
    finish = metadata.finish_command(plan.base.interpreter, plan.base.site_packages)
    source, words = overlay.place, ["docker", "buildx", "build", "--platform", plan.base.platform]
    if overlay.in_layout:
        folder, reference = layout_place(overlay)
        # some releases of buildx need a tag before a digest; the tag is ignored
        pinned = f":overlay@{reference}" if reference else ""
        source = "overlay"
        words += ["--build-context", f"overlay=oci-layout://{folder.absolute()}{pinned}"]
    build = shlex.join([*words, "-t", image])
    ours = {**labels, metadata.BASE_LABEL: base, f"{metadata.LABEL_PREFIX}.base-digest": ""}
    lines = [
        f"# {build} - <this file",
        f"FROM {base}",
        f"COPY --from={source} / /",
        f"RUN --network=none {json.dumps(finish)}",
        *(f"ENV {name}={metadata.quoted(value)}" for name, value in sorted(plan.env.items())),
        *(
            f"LABEL {metadata.quoted(name)}={metadata.quoted(value)}"
            for name, value in sorted(ours.items())
        ),
    ]
    dockerfile = "\n".join(lines) + "\n"
    return Overlay(base=base, image=image, dockerfile=dockerfile, build=build)


def write_dockerfile(plan: BuildPlan, built: BuiltImage) -> Path | None:
    """Write the Dockerfile beside the overlay's layout; returns its path, None on failure."""
    if not plan.base.is_wheels or not built.ref.in_layout:
        return None
    layout = Path(built.ref.place).absolute()
    text = f"{_MADE_FOR} {built.name}\n{overlay_of(plan, built).dockerfile}"
    path, other = _dockerfiles(layout, built.digest)
    if path.exists() and not _begins(path, f"{_MADE_FOR} {built.name}\n"):
        path = other  # that one is of another overlay, or the user's
    try:
        write_atomically(path, text.encode())
    except UsageError as error:  # the image is there, and its Dockerfile is printed
        console.warn(str(error))
        return None
    return path


def find_dockerfile(layout: Path, digest: str) -> Path | None:
    """The Dockerfile of an overlay in a layout, if it still exists."""
    ours = (path for path in _dockerfiles(layout.absolute(), digest) if _begins(path, _MADE_FOR))
    return next((path for path in ours if f"@{digest}" in path.read_text("utf-8")), None)


#: First line of a Dockerfile written by spark-build.
_MADE_FOR = "# spark-build: the image of the overlay"


def _dockerfiles(layout: Path, digest: str) -> tuple[Path, Path]:
    short = digest.removeprefix("sha256:")[:12]
    first, second = f"{layout.name}.Dockerfile", f"{layout.name}-{short}.Dockerfile"
    return layout.with_name(first), layout.with_name(second)


def _begins(path: Path, words: str) -> bool:
    try:
        return path.read_text("utf-8").startswith(words)
    except (OSError, ValueError):
        return False


def _blob(layout: Path, digest: str) -> bytes:
    try:
        data = (layout / "blobs" / "sha256" / digest.removeprefix("sha256:")).read_bytes()
    except OSError as error:
        raise UsageError(f"{layout}: blob {digest} cannot be read: {reason(error)}") from None
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise UsageError(f"{layout}: blob {digest} is damaged")
    return data


def _refuse_damaged(layout: Path, digest: str) -> None:
    """Read a blob of any size, and compare its bytes with its name."""
    try:
        with (layout / "blobs" / "sha256" / digest.removeprefix("sha256:")).open("rb") as blob:
            seen = hashlib.file_digest(blob, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{layout}: blob {digest} cannot be read: {reason(error)}") from None
    if f"sha256:{seen}" != digest:
        raise UsageError(f"{layout}: blob {digest} is damaged")


def _manifest_and_config(layout: Path, reference: str) -> tuple[RawManifest, ImageConfig]:
    digest = layout_digest(layout, reference)
    data = _blob(layout, digest)
    raw = check_manifest(data, content_type="", digest=digest, where=f"{layout}: {digest}")
    if is_index(raw):  # which no overlay is
        return raw, ImageConfig()
    return raw, parse_config(_blob(layout, blobs(raw)[0].digest), str(layout))


def labels_of_layout(layout: Path, reference: str = "") -> dict[str, str]:
    """The labels of an image in a layout.

    Raises:
        UsageError: the name does not identify a single image, or a blob is damaged.
    """
    return _manifest_and_config(layout, reference)[1].labels


def read_layout(
    layout: Path, reference: str = ""
) -> tuple[RecordedPlan, dict[str, bytes], dict[str, str]]:
    """An overlay layout as ``(plan, absolute path -> bytes, env)``.

    It is read like every other image, so what a runtime does not unpack is refused.

    Raises:
        UsageError: spark-build did not write the layout.
        RemoteError: it is malformed, or a blob is damaged.
    """
    image = find_image(LayoutDirectory(layout), reference, None)
    for layer in image.layers:  # an index of the same layer, damaged since, may be in the cache
        _refuse_damaged(layout, layer.digest)
    cache = LayerCache(image.source, diff_ids=image.diff_ids)
    with contextlib.closing(Rootfs(image.layers, cache)) as view:
        files = overlay_files(view, str(layout))
    plan = files.get(f"{metadata.SHARE}/plan.json")
    if plan is None:
        raise UsageError(f"{layout} was not made by spark-build: it has no plan")
    return metadata.read_plan(plan, str(layout)), files, image.config.env


def overlay_files(view: Rootfs, where: str) -> dict[str, bytes]:
    """Absolute path -> bytes of every file of an overlay.

    Raises:
        UsageError: it has something other than files and folders, which no overlay has.
        RemoteError: a layer is malformed.
    """
    entries = {f"/{path}": entry.kind for path, entry in view.below("/").items()}
    odd = next((path for path, kind in entries.items() if kind not in (FILE, DIR)), None)
    if odd is not None:
        raise UsageError(
            f"{where} is not an overlay of spark-build: {odd} is a {entries[odd]}, and overlays "
            "have only files and folders",
            hint="build it again with spark-build image",
        )
    paths = [path for path, kind in entries.items() if kind == FILE]
    view.fetch(paths)
    return {path: view.read(path) or b"" for path in paths}

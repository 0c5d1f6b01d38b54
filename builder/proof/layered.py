"""Verifies an image in a registry or an OCI layout, without a Docker Engine.

Its files are read from its layers; its vLLM runs in the sandbox.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING

from builder.common.model.base import base_kind
from builder.images.bases.remote import identify_opened, with_files
from builder.images.engines import metadata
from builder.images.engines.metadata import BIN, SHARE
from builder.images.engines.overlay import overlay_files
from builder.images.registry.copy import refuse_missing
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import blobs
from builder.images.rootfs.image import open_image
from builder.images.rootfs.tar import DIR
from builder.proof.insandbox import in_sandbox
from builder.proof.targets import EmbeddedMetadata, ImageProbes, open_overlay, target_of_image
from builder.proof.unrecorded import find_unrecorded, layers_above

if TYPE_CHECKING:
    from builder.common.documents.plan import BakedPlan
    from builder.common.model.reference import Ref
    from builder.images.registry.model import Descriptor
    from builder.images.rootfs.base import OpenedImage
    from builder.images.rootfs.image import Image
    from builder.images.rootfs.view import Rootfs
    from builder.proof.target import VerifyTarget
    from builder.proof.targets import Opening


def open_layered(ref: Ref, opening: Opening) -> VerifyTarget:
    """Open ``docker://NAME``, ``NAME`` or ``oci:DIR[:NAME]``.

    Raises:
        RemoteError: it does not exist, or is damaged.
        UsageError: its expected state is unknown, or it has no vLLM.
    """
    image = open_image(ref, opening.platform)
    target = target_of_layers(image, ref, opening)
    if not isinstance(image.source, LayoutDirectory) or target.runs_as:
        return target
    return dataclasses.replace(target, runs_as=image.source.name_of(image.top.digest))


def target_of_layers(image: Image, ref: Ref, opening: Opening) -> VerifyTarget:
    """The target for an open image, with the name ``ref``; closing the target closes it.

    Raises:
        RemoteError: it is damaged.
        UsageError: its expected state is unknown, or it has no vLLM.
    """
    try:  # what is known of a layer from an earlier run does not say that it is still there
        refuse_missing(image.source, _needed(image), "push or copy the image again")
    except BaseException:
        image.close()
        raise
    opened = with_files(image, opening.facts_of)
    try:
        target = _open(ref, opened, opening)
        digests = (image.manifest.digest, blobs(image.manifest)[0].digest)
        return dataclasses.replace(target, digests=digests)
    except BaseException:
        opened.close()
        raise


def _needed(image: Image) -> list[Descriptor]:
    """The blobs that must exist: a thin layout (``image --thin``) lacks the base's layers."""
    config, *layers = blobs(image.manifest)
    layout = image.source
    if isinstance(layout, LayoutDirectory):
        base = list(itertools.takewhile(lambda layer: not layout.has(layer.digest), layers[:-1]))
        layers = layers[len(base) :]
    return [config, *layers]


def _open(ref: Ref, opened: OpenedImage, opening: Opening) -> VerifyTarget:
    image, view, text = opened.image, opened.view, ref.text
    data = view.read(f"{metadata.SHARE}/plan.json")
    baked = EmbeddedMetadata(
        plan=metadata.read_plan(data, text) if data else None,
        layers=metadata.read_layers(view.read(f"{metadata.SHARE}/layers.json"), text),
        label=image.config.labels.get(metadata.PLAN_LABEL, ""),
    )
    if baked.plan is not None and _stands_alone(baked.plan.document, view):
        files = overlay_files(view, text)
        target = open_overlay(text, baked.plan, files, image.config.env, opening, baked.label)
        opened.close()
        return target
    request = opening.request(ref, baked.layers)
    base = identify_opened(request, opened, ref.place if ref.has_name else text)
    asking = in_sandbox(base, opening.trusting(base.identity))
    now = asking(base.tree, base.identity.env)
    held = ImageProbes(kind="layers", now=now, otherwise=asking, engine="oci")
    target = target_of_image(base, text, baked, opening, held)
    site = base.identity.site_packages
    search = cache(lambda: find_unrecorded(opened, site, base.tree))
    return dataclasses.replace(target, unrecorded=search, outside=partial(_files_at, opened))


def _files_at(opened: OpenedImage, path: str) -> dict[str, bytes]:
    """A file, or the files below a folder, by the path that was asked for.

    Of an image on a locked base, only the layers above it are read.
    """
    view, folder = opened.view, path.rpartition("/")[0]
    with (
        contextlib.closing(layers_above(opened))
        if view.above is not None
        else nullcontext(view) as files
    ):
        known = folder if view.above is None or folder not in _KNOWN else view.realpath(folder)
        real = f"{known or folder}/{path.rpartition('/')[2]}"
        entry = files.stat(real)
        if entry is None:
            return {}
        if entry.kind != DIR:
            return {path: files.read(real) or b""}
        real = files.realpath(real) or real
        below = {f"{path}/{name}": f"{real}/{name}" for name, one in files.below(real).items()
                 if one.kind != DIR}  # fmt: skip
        files.fetch(below.values())
        return {name: files.read(place) or b"" for name, place in below.items()}


#: Folders of spark-build's files, whose links identification looks up.
_KNOWN = (BIN, SHARE.rpartition("/")[0])


def _stands_alone(plan: BakedPlan, view: Rootfs) -> bool:
    """Whether an image is only an overlay, without a base image with vLLM."""
    base = plan.base
    metadata = f"vllm-{base.packages['vllm']}.dist-info/METADATA"
    return base_kind(base.kind).is_wheels and view.stat(f"{base.site_packages}/{metadata}") is None

"""The metadata in an image, read from its layers: the plan and the rendered layers."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.engines.metadata import SHARE, read_layers, read_plan
from builder.errors import UsageError
from builder.rootfs.tar import FILE, LayerTar
from builder.rootfs.unpack import Unpacked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from builder.applier.layers import Layer
    from builder.documents.plan import BakedPlan
    from builder.model.plan import RecordedPlan
    from builder.publish.subject import Image
    from builder.registry.model import Descriptor, ImageSource

_PLAN, _LAYERS = (f"{SHARE}/{name}".lstrip("/") for name in ("plan.json", "layers.json"))
_METADATA = "workspace/build-metadata.yaml"
_KEPT = (_PLAN, _LAYERS, _METADATA)
#: The version of spark-build, as ``build_metadata`` writes it.
_VERSION = re.compile(rb'^spark_build:\n  version: "([^"\n]*)"$', re.MULTILINE)
#: Limit of a plan's size; a plan lists every file that it changes, about 100 kB today.
_FILE_LIMIT = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Baked:
    """The plan and the rendered layers of an image, and the other files of the same image layer.

    ``files`` maps absolute paths to the sha256 of every regular file; ``version`` is that of
    the spark-build that made it.
    """

    version: str
    recorded: RecordedPlan
    layers: tuple[Layer, ...]
    files: Mapping[str, str]

    @property
    def plan(self) -> BakedPlan:
        """The plan."""
        return self.recorded.document


def read_baked(source: ImageSource, image: Image) -> Baked:
    """Read plan and layers, newest image layer first, as far as needed.

    Raises:
        UsageError: the image has no plan, or not the one that its label names.
        RemoteError: a layer cannot be read.
    """
    for blob in reversed(image.layers):
        kept, files = _look(source, blob)
        if _PLAN in kept:
            plan = read_plan(kept[_PLAN], f"{source.name}: {image.digest}")
            layers = read_layers(kept.get(_LAYERS, b""), image.digest)
            stated = plan.document.plan_digest
            if stated != image.plan_digest:
                raise UsageError(
                    f"{source.name}: {image.digest} has the label of plan {image.plan_digest} and "
                    f"carries plan {stated}: the image was modified after the build"
                )
            return Baked(
                version=version_in(kept.get(_METADATA, b"")),
                recorded=plan,
                layers=tuple(layers),
                files=files,
            )
    raise UsageError(
        f"{source.name}: {image.digest} has no plan, so it was not made by spark-build"
    )


def version_in(metadata: bytes) -> str:
    """The version of spark-build that ``build-metadata.yaml`` names."""
    found = _VERSION.search(metadata)
    return found[1].decode("utf-8", "replace") if found else ""


def _look(source: ImageSource, blob: Descriptor) -> tuple[dict[str, bytes], dict[str, str]]:
    """The wanted files of this layer, and the sha256 of every file in it."""
    kept: dict[str, bytes] = {}
    files: dict[str, str] = {}
    with source.open(blob) as stream:
        unpacked = Unpacked(stream, f"{source.name}: {blob.digest}")
        tar = LayerTar(unpacked, f"{source.name}: {blob.digest}")
        for member in tar:
            if member.kind != FILE:
                continue
            keep = member.path in _KEPT and member.size <= _FILE_LIMIT
            pieces, digest = [], hashlib.sha256()
            for piece in tar.chunks():
                digest.update(piece)
                if keep:
                    pieces.append(piece)
            files[f"/{member.path}"] = digest.hexdigest()
            if keep:
                kept[member.path] = b"".join(pieces)
        unpacked.finish()
    return kept, files

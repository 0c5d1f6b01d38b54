"""Bases for the registry benchmark: the same small vLLM on ever more bytes that nobody changes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from typing import TYPE_CHECKING, Any

from builder.images.registry.model import (
    OCI_CONFIG,
    OCI_LAYER_GZIP,
    OCI_MANIFEST,
    Descriptor,
    RawManifest,
    sha256_digest,
)
from tests.engine import base, support
from tests.unit.fakes import REPLACE, layer_text, vllm_files

if TYPE_CHECKING:
    from pathlib import Path

    from builder.images.registry.client import Repository

_PIECE = 64 << 20
#: The file that every way of patching changes, and its new content.
PATCHED = f"{base.SITE}/vllm/core.py"
NEW_CONTENT = vllm_files()["vllm/core.py"].replace(b"'cutlass'", b"'b12x'")
#: A layer of ours that makes the same change.
LAYER = layer_text(REPLACE, summary="changes one line")

#: Compressed bytes that no patch of a benchmark has, and the base's large layers have.
_SMALL = 1_000_000


def push_base(repository: Repository, layout: Path, tag: str, size: int) -> int:
    """Push a base of about ``size`` compressed bytes; gives the bytes of its layers.

    Debian with Python comes from the tests' base image in ``layout``, vLLM is a few small files,
    and the rest cannot be compressed, like weights and device code.  Every layer is new to every
    cache, Debian's too: a file that nobody has stands in front of it.
    """
    _, manifest = support.layout_manifest(layout)
    config = support.layout_json(layout, manifest["config"])
    debian, diff_id = _put_debian(repository, layout, manifest["layers"][0]["digest"])
    layers = [debian]
    diff_ids = [diff_id]
    left, number = size - debian.size, 0
    while left > 0:
        name = f"opt/filler/{number:02}.bin"
        layers.append(_put_layer(repository, {name: os.urandom(min(left, _PIECE))}))
        diff_ids.append(layers[-1].digest)
        left, number = left - _PIECE, number + 1
    site = base.SITE.strip("/")
    files = {f"{site}/{path}": data for path, data in vllm_files().items()}
    layers.append(_put_layer(repository, files))
    diff_ids.append(layers[-1].digest)
    held = {"architecture": "amd64", "os": "linux", "config": config["config"]}
    held |= {"created": config["created"], "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    value = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": _put(repository, json.dumps(held).encode(), OCI_CONFIG).as_json(),
        "layers": [layer.as_json() for layer in layers],
    }
    raw = RawManifest(data=json.dumps(value).encode(), media_type=OCI_MANIFEST)
    repository.put_manifest(raw, tag)
    return sum(layer.size for layer in layers)


def _put_debian(repository: Repository, layout: Path, digest: str) -> tuple[Descriptor, str]:
    """The layer of the tests' base image with one more file, and its diff_id."""
    head = io.BytesIO()
    with tarfile.open(fileobj=head, mode="w") as tar:
        info = tarfile.TarInfo("salt")
        info.size = tarfile.BLOCKSIZE
        tar.addfile(info, io.BytesIO(os.urandom(info.size)))
        end = tar.offset
    whole, out = hashlib.sha256(), io.BytesIO()
    with (
        gzip.open(support.layout_blob(layout, digest)) as stream,
        gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1, mtime=0) as packed,
    ):
        data = head.getvalue()[:end]
        while data:
            whole.update(data)
            packed.write(data)
            data = stream.read(1 << 20)
    return _put(repository, out.getvalue(), OCI_LAYER_GZIP), f"sha256:{whole.hexdigest()}"


def _put_layer(repository: Repository, files: dict[str, bytes]) -> Descriptor:
    """A layer that is not compressed, so that its digest is its diff_id."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        folders: set[str] = set()
        for name, data in sorted(files.items()):
            parts = name.split("/")
            for depth in range(1, len(parts)):
                above = "/".join(parts[:depth])
                if above not in folders:
                    folders.add(above)
                    entry = tarfile.TarInfo(above)
                    entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                    tar.addfile(entry)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return _put(repository, out.getvalue(), OCI_LAYER_GZIP.removesuffix("+gzip"))


def _put(repository: Repository, data: bytes, media_type: str) -> Descriptor:
    blob = Descriptor(media_type=media_type, digest=sha256_digest(data), size=len(data))
    repository.put_blob(blob, io.BytesIO(data))
    return blob


def patched_tar(path: Path) -> Path:
    """A layer tar with the patched file, as ``crane append`` wants to be given."""
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo(PATCHED.strip("/"))
        info.size = len(NEW_CONTENT)
        tar.addfile(info, io.BytesIO(NEW_CONTENT))
    return path


def is_patched(repository: Repository, tag: str, platform: Any = None) -> bool:
    """Whether the image under a tag has the new file: a way that changes nothing would be fast.

    Large layers are of the base, and are not read: that would go on during the next measurement.
    """
    from builder.images.rootfs.image import LayerCache, find_image
    from builder.images.rootfs.view import Rootfs

    image = find_image(repository, tag, platform)
    small = [layer for layer in image.layers if layer.size < _SMALL]
    top = Rootfs(small, LayerCache(repository))
    data = top.read(PATCHED)
    wanted = hashlib.sha256(NEW_CONTENT).digest()
    return data is not None and hashlib.sha256(data).digest() == wanted

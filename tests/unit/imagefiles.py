"""Images made of almost nothing: layer tars as hostile as a test likes, and layouts of them."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backports import zstd

from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import (
    OCI_CONFIG,
    OCI_INDEX,
    OCI_LAYER_GZIP,
    OCI_MANIFEST,
    Descriptor,
    RawManifest,
    sha256_digest,
)
from builder.images.rootfs.image import LayerCache
from builder.images.rootfs.view import Rootfs
from tests.unit.fakes import vllm_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SITE = "opt/app/lib/python3.12/site-packages"


@dataclass(frozen=True)
class Item:
    """One tar entry."""

    name: str
    data: bytes = b""
    type: bytes = tarfile.REGTYPE
    link: str = ""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    pax: Mapping[str, str] = field(default_factory=dict)


def folder(name: str, mode: int = 0o755, **more: Any) -> Item:
    """A directory."""
    return Item(name, type=tarfile.DIRTYPE, mode=mode, **more)


def symlink(name: str, link: str) -> Item:
    """A symbolic link."""
    return Item(name, type=tarfile.SYMTYPE, link=link, mode=0o777)


def hardlink(name: str, link: str) -> Item:
    """A hard link."""
    return Item(name, type=tarfile.LNKTYPE, link=link)


def tar_of(*items: Item) -> bytes:
    """A layer's tar, entries in the order given."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for item in items:
            info = tarfile.TarInfo(item.name)
            info.type, info.linkname, info.mode = item.type, item.link, item.mode
            info.uid, info.gid, info.size = item.uid, item.gid, len(item.data)
            info.pax_headers = dict(item.pax)
            tar.addfile(info, io.BytesIO(item.data))
    return out.getvalue()


def packed(tar: bytes) -> bytes:
    """The tar as a gzip layer blob."""
    return gzip.compress(tar, 1, mtime=0)


def put(layout: LayoutDirectory, data: bytes, media_type: str) -> Descriptor:
    """A blob of a layout."""
    blob = Descriptor(media_type=media_type, digest=sha256_digest(data), size=len(data))
    layout.put_blob(blob, io.BytesIO(data))
    return blob


def put_json(layout: LayoutDirectory, value: object, media_type: str) -> Descriptor:
    """A JSON blob of a layout."""
    return put(layout, json.dumps(value, sort_keys=True).encode(), media_type)


def diff_id(blob: bytes) -> str:
    """The digest of a layer's tar; of a blob that is damaged, its own."""
    try:
        if blob.startswith(b"\x1f\x8b"):
            blob = gzip.decompress(blob)
        elif blob.startswith(b"\x28\xb5\x2f\xfd"):
            blob = zstd.decompress(blob)
    except (OSError, EOFError, zlib.error, zstd.ZstdError):
        pass
    return sha256_digest(blob)


def put_image(
    root: Path,
    *layers: bytes,
    name: str = "",
    architecture: str = "arm64",
    media_types: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    layer_type: str = OCI_LAYER_GZIP,
) -> RawManifest:
    """An image of layer blobs (bottom first) in a layout; ``config`` is its ``config`` part."""
    layout = LayoutDirectory(root)
    types = {"manifest": OCI_MANIFEST, "config": OCI_CONFIG, **(media_types or {})}
    document = {
        "architecture": architecture,
        "os": "linux",
        "created": "2026-05-06T07:08:09Z",
        "config": dict(config or {}),
        "rootfs": {"type": "layers", "diff_ids": [diff_id(layer) for layer in layers]},
        "history": [{"created_by": f"step {number}"} for number in range(len(layers))],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": types["manifest"],
        "config": put_json(layout, document, types["config"]).as_json(),
        "layers": [put(layout, layer, layer_type).as_json() for layer in layers],
    }
    raw = RawManifest(data=json.dumps(manifest).encode(), media_type=types["manifest"])
    layout.put_manifest(raw, name)
    return raw


def put_index(root: Path, manifests: Mapping[str, RawManifest], name: str = "") -> RawManifest:
    """An index by architecture over images of the same layout."""
    entries = [
        {
            **manifest.descriptor.as_json(),
            "platform": {"os": "linux", "architecture": architecture},
        }
        for architecture, manifest in manifests.items()
    ]
    value = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}
    raw = RawManifest(data=json.dumps(value).encode(), media_type=OCI_INDEX)
    LayoutDirectory(root).put_manifest(raw, name)
    return raw


def view_of(root: Path, *layers: bytes) -> Rootfs:
    """The files of layer blobs, bottom first."""
    layout = LayoutDirectory(root)
    blobs = [put(layout, layer, OCI_LAYER_GZIP) for layer in layers]
    return Rootfs(blobs, LayerCache(layout))


# ------------------------------------------------------------------------ images that vLLM runs in


def python_items(prefix: str = "opt/app", version: str = "3.12") -> list[Item]:
    """As much of an interpreter as its files tell of it."""
    lib = f"{prefix}/lib/python{version}"
    return [
        Item(f"{prefix}/bin/python{version}", b"\x7fELF", mode=0o755),
        symlink(f"{prefix}/bin/python3", f"python{version}"),
        Item(f"{lib}/os.py", b"# os\n"),
        Item(f"{lib}/site.py", b"# site\n"),
    ]


def site_items(files: Mapping[str, bytes] | None = None, site: str = SITE) -> list[Item]:
    """An installed vLLM."""
    held = vllm_files() if files is None else files
    return [Item(f"{site}/{path}", data) for path, data in sorted(held.items())]


#: With the PATH of an image whose Python is in /opt/app.
CONFIG = {"Env": ["PATH=/opt/app/bin:/usr/bin"], "Entrypoint": ["vllm", "serve"]}


def put_vllm(root: Path, *more: bytes, items: Sequence[Item] = (), **options: Any) -> RawManifest:
    """An image with an interpreter layer and a vLLM layer, and more layers on top."""
    bottom = packed(tar_of(folder("opt/"), *python_items()))
    top = packed(tar_of(*site_items(), *items))
    return put_image(root, bottom, top, *more, **{"config": CONFIG, **options})

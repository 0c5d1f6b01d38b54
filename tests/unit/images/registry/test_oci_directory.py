"""OCI layouts as others write them, well-formed and not, and as we write them."""

from __future__ import annotations

import io
import json
import os
import resource
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.reference import Ref
from builder.errors import RemoteError, UsageError
from builder.images.registry.copy import Locations
from builder.images.registry.layout import REF_NAME, LayoutDirectory
from builder.images.registry.model import (
    MANIFEST_LIMIT,
    OCI_INDEX,
    OCI_MANIFEST,
    Descriptor,
    RawManifest,
    sha256_digest,
)
from tests.unit.fakeregistry import manifest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DATA = b"some bytes"
BLOB = Descriptor(media_type="", digest=sha256_digest(DATA), size=len(DATA))
MADE = RawManifest(data=manifest(), media_type=OCI_MANIFEST)


@pytest.fixture
def layout(tmp_path: Path) -> LayoutDirectory:
    return LayoutDirectory(tmp_path / "layout")


def index(layout: LayoutDirectory) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((layout.path / "index.json").read_bytes())
    return value


def files(layout: LayoutDirectory) -> list[str]:
    return sorted(
        str(path.relative_to(layout.path)) for path in layout.path.rglob("*") if path.is_file()
    )


def blob_path(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


# --- writing --------------------------------------------------------------------------------


def test_an_image_with_a_name(layout: LayoutDirectory) -> None:
    assert not layout.has(BLOB.digest)
    layout.put_blob(BLOB, io.BytesIO(DATA))
    assert layout.has(BLOB.digest)
    assert files(layout) == [blob_path(BLOB.digest)]  # not an image yet
    layout.put_manifest(MADE, MADE.digest)
    assert not (layout.path / "index.json").exists()
    layout.put_manifest(MADE, "v1")
    assert json.loads((layout.path / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    assert index(layout)["manifests"] == [
        {**MADE.descriptor.as_json(), "annotations": {REF_NAME: "v1"}}
    ]
    assert layout.manifest("v1") == layout.manifest(MADE.digest) == layout.manifest("") == MADE
    with layout.open(BLOB) as stream:
        assert stream.read() == DATA
    assert (layout.path / blob_path(BLOB.digest)).stat().st_mode & 0o777 == 0o644


def test_a_name_moves_and_others_are_kept(layout: LayoutDirectory) -> None:
    other = RawManifest(data=manifest(annotations={"a": "b"}), media_type=OCI_MANIFEST)
    for made, name in ((MADE, "v1"), (MADE, "v2"), (other, "v1"), (other, ""), (other, "")):
        layout.put_manifest(made, name)
    assert layout.references() == ("v2", "v1")
    assert layout.manifest("v1") == other
    assert layout.manifest("v2") == MADE
    assert len(index(layout)["manifests"]) == 3
    with pytest.raises(UsageError, match="has 2 images; its names: v2, v1"):
        layout.manifest("")
    with pytest.raises(UsageError, match="no single image 'v3'"):
        layout.manifest("v3")


@pytest.mark.parametrize("data", [DATA[:-1], DATA + b"!", DATA[:-1] + b"!", b""])
def test_wrong_bytes_leave_nothing(layout: LayoutDirectory, data: bytes) -> None:
    with pytest.raises(RemoteError, match="was expected, but the data is"):
        layout.put_blob(BLOB, io.BytesIO(data))
    assert files(layout) == []


def test_a_stream_that_breaks_leaves_nothing(layout: LayoutDirectory) -> None:
    class Breaks(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise RemoteError("cut")

    with pytest.raises(RemoteError, match="cut"):
        layout.put_blob(BLOB, Breaks())
    assert files(layout) == []


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file may grow larger than this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(layout: LayoutDirectory) -> None:
    data = bytes(200_000)
    blob = Descriptor(media_type="", digest=sha256_digest(data), size=len(data))
    match = r"cannot write .*: File too large"
    with room_for(100_000), pytest.raises(UsageError, match=match) as caught:
        layout.put_blob(blob, io.BytesIO(data))
    assert "'ulimit -f' allows" in caught.value.hint
    assert files(layout) == []
    layout.put_manifest(MADE, "v1")
    before = files(layout)
    # small files fail when they are closed; a name must not be lost by that
    other = RawManifest(data=manifest(annotations={"a": "b"}), media_type=OCI_MANIFEST)
    for size in (100, len(other.data)):
        with room_for(size), pytest.raises(UsageError, match=match):
            layout.put_manifest(other, "v1")
    assert layout.manifest("v1") == MADE
    assert set(files(layout)) - set(before) <= {blob_path(other.digest)}
    layout.put_manifest(other, "v1")
    assert layout.manifest("v1") == other


def test_a_target_that_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*Not a directory"):
        LayoutDirectory(tmp_path / "file").put_blob(BLOB, io.BytesIO(DATA))


# --- reading --------------------------------------------------------------------------------


def write(layout: LayoutDirectory, value: object) -> None:
    layout.path.mkdir(parents=True, exist_ok=True)
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    (layout.path / "index.json").write_bytes(data)
    (layout.path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"manifests": [5]}, "a descriptor is int"),
        ({"manifests": [{"digest": "sha256:../../etc", "size": 1}]}, "is not a sha256 digest"),
        ({"manifests": [{"digest": BLOB.digest, "size": -1}]}, "has no size"),
        ({"manifests": [{"digest": BLOB.digest, "size": 5}]}, "No such file"),
    ],
)
def test_malformed_indexes(layout: LayoutDirectory, value: object, match: str) -> None:
    write(layout, value)
    with pytest.raises(RemoteError, match=match) as caught:
        layout.manifest("")
    assert caught.value.code == 8


@pytest.mark.parametrize(
    "value", [b"{", b"[" * 99_999, [], {"manifests": 5}, b" " * (MANIFEST_LIMIT + 1)]
)
def test_a_folder_that_is_not_a_layout(layout: LayoutDirectory, value: object) -> None:
    write(layout, value)
    with pytest.raises(UsageError, match="has no list of manifests") as caught:
        layout.manifest("")
    assert caught.value.code == 2


def test_a_layout_without_an_image(layout: LayoutDirectory) -> None:
    write(layout, {"manifests": []})
    with pytest.raises(UsageError, match="has 0 images; its names: none"):
        layout.manifest("")


def test_a_missing_layout(layout: LayoutDirectory) -> None:
    with pytest.raises(UsageError, match=r"is not an OCI layout: .*index\.json cannot be read"):
        layout.manifest("")


@pytest.mark.parametrize("stated", [OCI_MANIFEST, None], ids=["stated", "unstated"])
def test_media_types_come_from_the_manifest(layout: LayoutDirectory, stated: str | None) -> None:
    data = manifest(mediaType=stated)
    made = RawManifest(data=data, media_type=OCI_MANIFEST)
    layout.put_manifest(made, "v1")
    assert layout.manifest("v1").media_type == OCI_MANIFEST
    value = {"schemaVersion": 2, "manifests": []}
    listed = RawManifest(data=json.dumps(value).encode(), media_type=OCI_INDEX)
    layout.put_manifest(listed, "v2")
    assert layout.manifest("v2").media_type == OCI_INDEX


@pytest.mark.parametrize("damage", [b"other byte", b"short", b"some bytes and more"])
def test_damaged_blobs(layout: LayoutDirectory, damage: bytes) -> None:
    layout.put_blob(BLOB, io.BytesIO(DATA))
    (layout.path / blob_path(BLOB.digest)).write_bytes(damage)
    with pytest.raises(RemoteError, match=BLOB.digest), layout.open(BLOB) as stream:
        stream.read()


def test_a_damaged_manifest(layout: LayoutDirectory) -> None:
    layout.put_manifest(MADE, "v1")
    (layout.path / blob_path(MADE.digest)).write_bytes(manifest(annotations={}))
    with pytest.raises(RemoteError, match="the data received for"):
        layout.manifest("v1")


def test_a_blob_that_is_not_a_file_does_not_block(layout: LayoutDirectory) -> None:
    layout.put_blob(BLOB, io.BytesIO(DATA))
    path = layout.path / blob_path(BLOB.digest)
    path.unlink()
    os.mkfifo(path)
    assert not layout.has(BLOB.digest)
    with pytest.raises(RemoteError, match="not a regular file"), layout.open(BLOB) as stream:
        stream.read()


# --- locations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path", "reference"),
    [
        ("oci:a", "a", ""),
        ("oci:a:v1", "a", "v1"),
        ("oci:/x/y:v1", "/x/y", "v1"),
        (f"oci:a@{BLOB.digest}", "a", BLOB.digest),
    ],
)
def test_references_to_a_layout(text: str, path: str, reference: str) -> None:
    with Locations() as locations:
        found = locations.open(Ref(text))
    assert (found.image.name, found.reference) == (f"oci:{path}", reference)


def test_an_existing_directory_is_not_split_at_a_colon(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    with Locations() as locations:
        assert locations.open(Ref(f"oci:{tmp_path}/a:b")).image.name == f"oci:{tmp_path}/a:b"


@pytest.mark.parametrize("text", ["oci:", "oci::v1", "oci:a@v1", "oci:@sha256:1", "Not An Image"])
def test_references_without_a_directory(text: str) -> None:
    with Locations() as locations, pytest.raises(UsageError):
        locations.open(Ref(text))


def test_one_registry_is_opened_once() -> None:
    with Locations() as locations:
        first, second = (
            locations.open(Ref("ghcr.io/a/b:c")),
            locations.open(Ref("docker://ghcr.io/d@" + BLOB.digest)),
        )
    assert first.image.registry is second.image.registry  # type: ignore[union-attr]
    assert (first.reference, second.reference) == ("c", BLOB.digest)

"""A registry that has lost a blob, or lies about one: nothing is said to be there that is not."""

from __future__ import annotations

import collections
import threading
from typing import TYPE_CHECKING

import pytest

from builder.common.paths import cache_dir
from builder.errors import RemoteError
from builder.images.registry.copy import Location, ask_tag, copy_image
from builder.images.registry.layout import FallbackSource, LayoutDirectory
from builder.images.registry.model import blobs
from builder.images.rootfs.image import read_config
from tests.memoryregistry import MemoryRegistry
from tests.unit.fakeregistry import Reply
from tests.unit.imagefiles import put_image, put_index

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from builder.images.registry.model import RawManifest
    from tests.unit.fakeregistry import Request


@pytest.fixture
def registry() -> Iterator[MemoryRegistry]:
    with MemoryRegistry() as running:
        yield running


@pytest.fixture
def image(tmp_path: Path) -> RawManifest:
    return put_image(tmp_path / "layout", b"below", b"above", name="v1")


def push(registry: MemoryRegistry, tmp_path: Path) -> None:
    source = LayoutDirectory(tmp_path / "layout")
    copy_image(source, "v1", registry.repository(), "v1")


def whole(registry: MemoryRegistry, manifest: RawManifest) -> bool:
    return all(registry.repository().gives(blob) for blob in blobs(manifest))


def test_a_second_run_repairs(registry: MemoryRegistry, image: RawManifest, tmp_path: Path) -> None:
    push(registry, tmp_path)
    for blob in blobs(image):
        registry.lose(blob.digest)
        assert not whole(registry, image)
        push(registry, tmp_path)
        assert whole(registry, image)


def test_nothing_is_sent_if_all_blobs_exist(
    registry: MemoryRegistry, image: RawManifest, tmp_path: Path
) -> None:
    push(registry, tmp_path)
    registry.log.clear()
    push(registry, tmp_path)
    assert {request.method for request in registry.log} <= {"HEAD", "GET"}
    assert registry.tag("a/b", "v1") == image.digest


def appended(registry: MemoryRegistry, folder: Path) -> tuple[RawManifest, FallbackSource]:
    """An image of five layers that the registry has, and one layer more that is here."""
    below = [b"%d" % number for number in range(5)]
    base = registry.repository("base")
    put_image(folder / "base", *below, name="v1")
    copy_image(LayoutDirectory(folder / "base"), "v1", base, "v1")
    image = put_image(folder / "own", *below, b"ours")
    for layer in blobs(image)[1:-1]:
        (folder / "own" / LayoutDirectory.blob_path(layer.digest)).unlink()
    return image, FallbackSource(LayoutDirectory(folder / "own"), base)


def test_the_requests_of_an_append(registry: MemoryRegistry, tmp_path: Path) -> None:
    """A mount and a look for each blob of the base, two requests for each new one, no more."""
    image, source = appended(registry, tmp_path)
    registry.log.clear()
    copied = copy_image(source, image.digest, registry.repository(), "v1")
    assert (copied.mounted, copied.streamed, registry.tag("a/b", "v1")) == (5, 2, image.digest)
    methods = collections.Counter(request.method for request in registry.log)
    assert methods == {"HEAD": 1, "POST": 5 + 2, "GET": 5, "PUT": 2 + 2}


def test_an_append_takes_four_rounds(registry: MemoryRegistry, tmp_path: Path) -> None:
    """Mounts and uploads begin together, then looks and bytes; two rounds are for the manifest.

    The tag was asked before.  The registry answers a round when all of it has arrived, so requests
    one after the other would never be answered.
    """
    image, source = appended(registry, tmp_path)
    target = registry.repository()
    tagged = ask_tag(Location(image=target, reference="v1"))
    assert tagged.result() is None
    first, second = threading.Barrier(5 + 2), threading.Barrier(5 + 2)
    answer = registry.answer

    def together(request: Request) -> Reply:
        if "/manifests/" not in request.path:
            (first if request.method == "POST" else second).wait(timeout=60)
        return answer(request)

    registry.answer = together
    registry.log.clear()
    copy_image(source, image.digest, target, "v1", tagged=tagged)
    last = [request.method for request in registry.log if "/manifests/" in request.path]
    assert (last, len(registry.log)) == (["PUT", "PUT"], 7 + 7 + 2)
    assert registry.tag("a/b", "v1") == image.digest


def test_a_tag_that_cannot_be_asked(
    registry: MemoryRegistry, image: RawManifest, tmp_path: Path
) -> None:
    """It is an error when the answer is needed, and nothing is sent."""
    target = registry.repository()
    answer = registry.answer
    registry.answer = lambda _: Reply(403)
    tagged = ask_tag(Location(image=target, reference="v1"))
    with pytest.raises(RemoteError, match="403"):
        tagged.result()
    registry.answer = answer
    registry.log.clear()
    with pytest.raises(RemoteError, match="403"):
        copy_image(LayoutDirectory(tmp_path / "layout"), "v1", target, "v1", tagged=tagged)
    assert registry.log == []


def test_a_configuration_is_asked_for_once(
    registry: MemoryRegistry, image: RawManifest, tmp_path: Path
) -> None:
    """It is kept by its digest; a damaged copy is not believed."""
    push(registry, tmp_path)
    place = registry.repository()
    config = read_config(place, image)
    registry.log.clear()
    assert read_config(place, image) == config
    assert registry.log == []
    (kept,) = (cache_dir() / "layers").glob("*.config")
    kept.write_bytes(kept.read_bytes().replace(b"arm64", b"amd64"))
    assert read_config(place, image) == config
    assert [request.method for request in registry.log] == ["GET"]


def test_a_registry_that_mounts_nothing_is_asked_first(
    registry: MemoryRegistry, tmp_path: Path
) -> None:
    """What it has is not sent again, and no upload is left open."""
    put_image(tmp_path / "layout", bytes(300_000), name="v1")
    base = registry.repository("base")
    for target in (base, registry.repository()):
        copy_image(LayoutDirectory(tmp_path / "layout"), "v1", target, "v1")
    registry.mounts = False
    registry.log.clear()
    copied = copy_image(base, "v1", registry.repository(), "v2")
    assert copied.streamed_bytes == 0
    opened = [request for request in registry.log if request.method == "POST"]
    ended = [request for request in registry.log if request.method == "DELETE"]
    assert opened
    assert len(opened) == len(ended)


def test_an_image_of_an_index_that_was_deleted(registry: MemoryRegistry, tmp_path: Path) -> None:
    image = put_image(tmp_path / "layout", b"below")
    put_index(tmp_path / "layout", {"arm64": image}, "v1")
    push(registry, tmp_path)
    del registry.manifests["a/b", image.digest]
    push(registry, tmp_path)
    assert registry.tag("a/b", image.digest) == image.digest


def test_a_wrong_answer_about_a_blob_is_detected(
    registry: MemoryRegistry, image: RawManifest, tmp_path: Path
) -> None:
    layer = blobs(image)[1].digest
    registry.lying.add(layer)
    with pytest.raises(RemoteError) as caught:
        push(registry, tmp_path)
    assert f"claims to have {layer}" in str(caught.value)
    assert registry.tag("a/b", "v1") is None


def test_a_blob_of_another_length_is_sent_again(
    registry: MemoryRegistry, image: RawManifest, tmp_path: Path
) -> None:
    push(registry, tmp_path)
    for broken in (b"", b"above and more"):
        registry.blobs["a/b", blobs(image)[2].digest] = broken
        push(registry, tmp_path)
        assert registry.blobs["a/b", blobs(image)[2].digest] == b"above"


def test_a_mount_that_has_no_effect(registry: MemoryRegistry, tmp_path: Path) -> None:
    """The registry says 201, and has not what it was to mount."""
    image = put_image(tmp_path / "layout", b"below", name="v1")
    copy_image(LayoutDirectory(tmp_path / "layout"), "v1", registry.repository("base"), "v1")
    layer = blobs(image)[1].digest
    registry.blobs["base", layer] = b""
    with pytest.raises(RemoteError, match=layer):
        copy_image(registry.repository("base"), "v1", registry.repository(), "v1")
    assert registry.tag("a/b", "v1") is None


def test_missing_blobs_of_the_base_are_named(registry: MemoryRegistry, tmp_path: Path) -> None:
    """All of it at once: our own layer is sent again, those of the base cannot be."""
    below = put_image(tmp_path / "base", b"one", b"two", name="v1")
    base = registry.repository("base")
    copy_image(LayoutDirectory(tmp_path / "base"), "v1", base, "v1")
    image = put_image(tmp_path / "own", b"one", b"two", b"ours")
    for layer in blobs(below)[1:]:
        (tmp_path / "own" / LayoutDirectory.blob_path(layer.digest)).unlink()
        registry.lose(layer.digest)
    source = FallbackSource(LayoutDirectory(tmp_path / "own"), base)
    with pytest.raises(RemoteError) as caught:
        copy_image(source, image.digest, registry.repository(), "v1")
    for layer in blobs(below)[1:]:
        assert layer.digest in str(caught.value)
    assert base.name in str(caught.value)
    assert caught.value.hint
    assert registry.tag("a/b", "v1") is None

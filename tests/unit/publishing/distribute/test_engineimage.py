"""An image that Docker saved becomes a layout, without the layers that the nodes have."""

from __future__ import annotations

import io
import json
import tarfile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from docker.errors import APIError
from requests import ConnectionError, ReadTimeout  # noqa: A004 - the library's own name

from builder.common.reference import Ref
from builder.errors import RemoteError, UsageError
from builder.images.bases.image import InEngine
from builder.images.engines import docker
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import (
    OCI_INDEX,
    OCI_MANIFEST,
    Descriptor,
    ImageConfig,
    RawManifest,
    sha256_digest,
)
from builder.publishing.distribute import (
    Distribution,
    NodeFacts,
    layers_of_all,
    name_on_nodes,
    saved,
    store,
)
from builder.publishing.sources import EngineImage
from builder.publishing.subject import Image as PublishedImage
from builder.publishing.subject import ImageSet, read_subject
from tests.unit.imagefiles import Item, put_image, put_index, tar_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from builder.publishing.distribute import Node
    from builder.publishing.sources import StoredImage

LAYER = "application/vnd.oci.image.layer.v1.tar"
BASE, PATCH = tar_of(Item("base", b"b" * 5000)), tar_of(Item("patch", b"p" * 700))


def files(folder: Path) -> list[tuple[str, bytes]]:
    """The files of a layout, as Docker saves them: by name."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(path.relative_to(folder).as_posix(), path.read_bytes()) for path in found]


def streamed(named: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, int, io.BytesIO]]:
    return ((name, len(data), io.BytesIO(data)) for name, data in named)


class FakeApi:
    """An engine that saves one image."""

    def __init__(self, named: list[tuple[str, bytes]], *, cut: int = 0) -> None:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            for name, data in named:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        self.data = out.getvalue()[: -cut or None]

    def get_image(self, _image: str, chunk_size: int) -> Iterator[bytes]:
        small = min(chunk_size, 1000)
        return (self.data[at : at + small] for at in range(0, len(self.data), small))


class FakeClient:
    """A Docker client with that API."""

    def __init__(self, api: FakeApi) -> None:
        self.api = api


class FakeImage:
    """An image of it."""

    def __init__(self, image: str) -> None:
        self.id, self.attrs = image, {"Size": 6000}


def engine_image(named: list[tuple[str, bytes]], image: str, **changed: Any) -> EngineImage:
    client: Any = FakeClient(FakeApi(named, **changed))
    held: Any = FakeImage(image)
    opened = InEngine(client, held)
    return EngineImage(ref=Ref("me/mine:1"), image=opened, baked=cast("Any", None))


def config_digest(raw: Any) -> str:
    return str(raw.json()["config"]["digest"])


def test_only_layers_that_a_node_lacks_are_stored(tmp_path: Path) -> None:
    raw = put_image(tmp_path / "made", BASE, PATCH, layer_type=LAYER, name="x")
    opened = engine_image(files(tmp_path / "made"), config_digest(raw))
    for present in (frozenset[str](), frozenset({sha256_digest(BASE)})):
        with saved(opened, present) as image:
            (one,) = image.subject.images
            assert one.digest == raw.digest
            source = image.source
            assert isinstance(source, LayoutDirectory)
            have = [source.has(layer.digest) for layer in one.layers]
            assert have == [not present, True]
            assert config_digest(raw) in one.digests, "the node's ID is one that is accepted"
            folder = source.path
        assert not folder.exists()


@pytest.mark.parametrize("by_manifest", [True, False])
def test_the_image_of_an_index_is_found(tmp_path: Path, by_manifest: bool) -> None:
    """containerd's store saves an index, and not the images of other platforms."""
    ours = put_image(tmp_path / "made", BASE, layer_type=LAYER)
    other = put_image(tmp_path / "made", PATCH, layer_type=LAYER, architecture="amd64")
    index = put_index(tmp_path / "made", {"arm64": ours, "amd64": other}, name="x")
    gone = {other.digest, config_digest(other), sha256_digest(PATCH)}
    left = [
        (name, data) for name, data in files(tmp_path / "made") if sha256_digest(data) not in gone
    ]
    top = {"schemaVersion": 2, "manifests": [index.descriptor.as_json()]}
    left = [(n, json.dumps(top).encode() if n == "index.json" else data) for n, data in left]
    layout = LayoutDirectory(tmp_path / "out")
    image = ours.digest if by_manifest else index.digest
    assert store(layout, streamed(left), image, ()).digest == ours.digest
    assert read_subject(layout, ours.digest).images[0].digest == ours.digest


def test_an_old_engine_saves_no_layout(tmp_path: Path) -> None:
    old = [("1234/layer.tar", BASE), ("manifest.json", b"[]"), ("repositories", b"{}")]
    with pytest.raises(UsageError, match="Docker 25 and later do") as refused:
        store(LayoutDirectory(tmp_path / "out"), streamed(old), "sha256:1", ())
    assert "oci:DIR" in refused.value.hint


@pytest.mark.parametrize("index", [b"[]", b"{}", b"x", b'{"manifests": 3}', b'{"manifests": []}'])
def test_a_malformed_index_is_an_error(tmp_path: Path, index: bytes) -> None:
    put_image(tmp_path / "made", BASE, layer_type=LAYER, name="x")
    bad = [(n, index if n == "index.json" else d) for n, d in files(tmp_path / "made")]
    with pytest.raises(RemoteError):
        store(LayoutDirectory(tmp_path / "out"), streamed(bad), "sha256:1", ())


def test_a_blob_with_other_bytes_is_not_stored(tmp_path: Path) -> None:
    put_image(tmp_path / "made", BASE, layer_type=LAYER, name="x")
    name = "blobs/sha256/" + sha256_digest(BASE).removeprefix("sha256:")
    bad = [(n, b"x" + d[1:] if n == name else d) for n, d in files(tmp_path / "made")]
    with pytest.raises(RemoteError):
        store(LayoutDirectory(tmp_path / "out"), streamed(bad), "sha256:1", ())


def test_a_stream_that_ends_anywhere_is_an_error(tmp_path: Path) -> None:
    raw = put_image(tmp_path / "made", BASE, PATCH, layer_type=LAYER, name="x")
    named = files(tmp_path / "made")
    data = FakeApi(named).data
    for kept in range(0, data.index(b"index.json"), 700):
        opened = engine_image(named, config_digest(raw), cut=len(data) - kept)
        with pytest.raises((RemoteError, UsageError)), saved(opened, ()):
            pass


def test_an_engine_that_fails_is_an_error() -> None:
    for failure in (APIError("no room"), ConnectionError("gone"), ReadTimeout("slow")):
        with pytest.raises(RemoteError, match="me/mine:1"), docker.saving("me/mine:1"):
            raise failure


class Surveyed:
    """A node with these layers; none: it does not answer."""

    def __init__(self, *layers: str) -> None:
        self._layers = layers

    def survey(self) -> NodeFacts:
        if not self._layers:
            raise RemoteError("no answer")
        return NodeFacts(architecture="arm64", layers=frozenset(self._layers), free=0)


def test_the_layers_of_all_nodes_that_answer() -> None:
    nodes: list[Any] = [Surveyed("a", "b"), Surveyed(), Surveyed("b", "c")]
    assert layers_of_all(cast("list[Node]", nodes), 2) == {"b"}
    assert layers_of_all(cast("list[Node]", nodes[1:2]), 2) == frozenset()


@pytest.mark.parametrize(
    ("text", "name"),
    [("vllm-spark", "vllm-spark:latest"), ("me/x:1", "me/x:1"), ("h:5000/x", "h:5000/x:latest")],
)
def test_the_name_on_the_nodes_is_the_tag(text: str, name: str) -> None:
    assert name_on_nodes(engine_image([], "sha256:1"), text, None) == name
    assert name_on_nodes(engine_image([], "sha256:1"), text, "other:2") == "other:2"


def test_an_image_id_needs_a_name() -> None:
    for text in ("sha256:" + "a" * 64, "0123456789ab"):
        with pytest.raises(UsageError, match="the hosts need a name"):
            name_on_nodes(engine_image([], "sha256:1"), text, None)


def index_of(*platforms: str) -> Distribution:
    """A copy of an index of images for these platforms."""
    blob = Descriptor(media_type="", digest="sha256:" + "0" * 64, size=0)
    images = tuple(
        PublishedImage(
            manifest=RawManifest(data=platform.encode(), media_type=OCI_MANIFEST),
            platform=platform,
            config=blob,
            layers=(),
            labels={},
            settings=ImageConfig(),
        )
        for platform in platforms
    )
    root = RawManifest(data=b"{}", media_type=OCI_INDEX)
    stored = SimpleNamespace(subject=ImageSet(root=root, images=images))
    return Distribution(cast("StoredImage", stored), "x", dry_run=True)


def facts(architecture: str) -> NodeFacts:
    return NodeFacts(architecture=architecture, layers=frozenset(), free=0)


@pytest.mark.parametrize("listed", ["linux/arm64", "linux/arm64/v8", "linux/aarch64"])
def test_the_image_of_a_node_is_the_one_for_its_platform(listed: str) -> None:
    made = index_of("linux/amd64", "linux/arm64/v9", listed)
    assert made.image_for(facts("arm64")).platform == listed
    assert index_of("linux/amd64", "linux/arm64/v9").image_for(facts("arm64")).platform == (
        "linux/arm64/v9"
    )
    with pytest.raises(RemoteError, match="no image for linux/s390x"):
        made.image_for(facts("s390x"))


def test_two_images_for_the_platform_of_a_node() -> None:
    with pytest.raises(RemoteError, match="has 2 images for linux/arm64"):
        index_of("linux/arm64", "linux/arm64/v8").image_for(facts("arm64"))

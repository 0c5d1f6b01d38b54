"""Copies of images that are put together wrongly, and of those that are large."""

from __future__ import annotations

import io
import json
import threading
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import pytest

from builder.common import console as bars
from builder.errors import RemoteError, UsageError
from builder.images.registry import copy
from builder.images.registry.client import UploadFailed
from builder.images.registry.copy import copy_image
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import (
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

    from builder.images.registry.model import ImageSource

DIGESTS = [f"sha256:{number:064x}" for number in range(2000)]


class Fake:
    """A source or target that says what it is told to say, digests included."""

    name = "fake"

    def __init__(self, manifests: dict[str, RawManifest] | None = None) -> None:
        self.manifests = manifests or {}
        self.blobs: dict[str, bytes] = {}
        self.calls: list[tuple[str, str]] = []

    def manifest(self, reference: str) -> RawManifest:
        return self.manifests[reference]

    @contextmanager
    def open(self, blob: Descriptor) -> Iterator[IO[bytes]]:
        self.calls.append(("open", blob.digest))
        yield io.BytesIO(self.blobs.get(blob.digest, b"{}"))

    def has(self, digest: str) -> bool:
        return False

    def gives(self, blob: Descriptor) -> bool:
        return False

    def mount(self, blob: Descriptor, source: ImageSource) -> bool:
        return False

    def put_blob(self, blob: Descriptor, content: IO[bytes]) -> None:
        content.read()
        self.calls.append(("blob", blob.digest))

    def put_manifest(self, manifest: RawManifest, reference: str) -> None:
        self.calls.append(("manifest", reference))


def raw(value: Any, media_type: str) -> RawManifest:
    return RawManifest(data=json.dumps(value).encode(), media_type=media_type)


def listing(*entries: dict[str, Any]) -> RawManifest:
    return raw({"mediaType": OCI_INDEX, "manifests": list(entries)}, OCI_INDEX)


def entry(digest: str, made: RawManifest, **more: Any) -> dict[str, Any]:
    row = {"mediaType": made.media_type, "digest": digest, "size": len(made.data)}
    return {**row, **more}


def layers(*rows: tuple[str, int, str]) -> RawManifest:
    parts = [{"digest": digest, "size": size, "mediaType": kind} for digest, size, kind in rows]
    return RawManifest(data=manifest(layers=parts), media_type=OCI_MANIFEST)


def refused(source: Fake, match: str) -> Fake:
    target = Fake()
    with pytest.raises(RemoteError, match=match) as caught:
        copy_image(source, "v1", target, "v1")
    assert caught.value.code == 8
    assert not [call for call in target.calls if call[0] == "manifest"]
    return target


def test_a_loop_of_indexes() -> None:
    """One that lists itself, under a digest that is a lie, with its true size."""
    row = {"mediaType": OCI_INDEX, "digest": DIGESTS[1], "size": 100}
    row["size"] = len(listing(row).data)  # which also has three digits
    loop = listing(row)
    assert row["size"] == len(loop.data)
    refused(Fake({"v1": loop, DIGESTS[1]: loop}), "indexes are nested too deeply")


def test_indexes_too_deep() -> None:
    made = {"v1": RawManifest(data=manifest(), media_type=OCI_MANIFEST)}
    current = made["v1"]
    for depth in range(6):
        made[DIGESTS[depth]] = current
        current = listing(entry(DIGESTS[depth], current))
    made["v1"] = current
    refused(Fake(made), "too deep")


def test_too_many_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "_MANIFEST_LIMIT", 3)
    made = {
        digest: RawManifest(data=manifest(annotations={"n": digest}), media_type=OCI_MANIFEST)
        for digest in DIGESTS[:5]
    }
    top = listing(*(entry(digest, one) for digest, one in made.items()))
    refused(Fake({"v1": top, **made}), "has more than 3 manifests")


def test_too_many_parts() -> None:
    many = [(digest, 1, "") for digest in DIGESTS[:1001]]
    refused(Fake({"v1": layers(*many)}), "has 1001 parts; the limit is 1000")


@pytest.mark.parametrize("change", [{"size": 1}, {"mediaType": OCI_INDEX}])
def test_an_index_with_wrong_entries(change: dict[str, Any]) -> None:
    one = RawManifest(data=manifest(), media_type=OCI_MANIFEST)
    top = listing(entry(DIGESTS[1], one, **change))
    refused(Fake({"v1": top, DIGESTS[1]: one}), "is listed as")


def test_a_blob_of_two_sizes() -> None:
    made = layers((DIGESTS[1], 5, "x"), (DIGESTS[1], 6, "x"))
    refused(Fake({"v1": made}), "is listed with 5 bytes and with 6 bytes")


@pytest.mark.parametrize(
    "changes",
    [
        {"config": 5},
        {"layers": "abc"},
        {"layers": [{"digest": "md5:1", "size": 1}]},
        {"layers": [{"digest": DIGESTS[0], "size": True}]},
        {"layers": [{"digest": DIGESTS[0], "size": "1"}]},
    ],
)
def test_malformed_manifests(changes: dict[str, Any]) -> None:
    made = RawManifest(data=manifest(**changes), media_type=OCI_MANIFEST)
    refused(Fake({"v1": made}), "descriptor|digest|size|list of parts")


def test_the_order_of_things() -> None:
    one = layers((DIGESTS[1], 1, "x"), (DIGESTS[2], 3, "x"), (DIGESTS[1], 1, "x"))
    top = listing(entry(one.digest, one))
    target = Fake()
    copied = copy_image(Fake({"v1": top, one.digest: one}), "v1", target, "v2", jobs=1)
    config = one.json()["config"]["digest"]
    assert target.calls == [
        ("blob", DIGESTS[2]),
        ("blob", config),
        ("blob", DIGESTS[1]),
        ("manifest", one.digest),
        ("manifest", top.digest),
        ("manifest", "v2"),
    ]
    assert (copied.streamed, copied.manifest) == (3, top)


def test_layers_that_may_not_be_distributed_stay() -> None:
    kind = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
    target = Fake()
    copy_image(Fake({"v1": layers((DIGESTS[1], 9, kind))}), "v1", target, "v1")
    assert ("blob", DIGESTS[1]) not in target.calls


def test_a_digest_reference_must_match() -> None:
    made = RawManifest(data=manifest(), media_type=OCI_MANIFEST)
    target = Fake()
    copy_image(Fake({"v1": made}), "v1", target, made.digest)
    assert [call for call in target.calls if call[0] == "manifest"] == [("manifest", made.digest)]
    with pytest.raises(UsageError, match="cannot be copied to fake@"):
        copy_image(Fake({"v1": made}), "v1", target, DIGESTS[1])


def test_a_lost_upload_is_read_again() -> None:
    made = layers((DIGESTS[1], 9, "x"))

    class Forgets(Fake):
        def put_blob(self, blob: Descriptor, content: IO[bytes]) -> None:
            super().put_blob(blob, content)
            if self.calls.count(("blob", blob.digest)) < self.patience:
                raise UploadFailed("lost")

        patience = 3

    source, target = Fake({"v1": made}), Forgets()
    copied = copy_image(source, "v1", target, "v1")
    assert source.calls.count(("open", DIGESTS[1])) == 3
    assert (copied.streamed, copied.streamed_bytes) == (2, 4)
    target = Forgets()
    target.patience = 99
    with pytest.raises(UploadFailed):
        copy_image(source, "v1", target, "v1")
    assert not [call for call in target.calls if call[0] == "manifest"]


def test_one_failure_ends_the_others() -> None:
    made = layers(*((digest, 10, "x") for digest in DIGESTS[1:50]))
    begun = threading.Barrier(3, timeout=600)

    class Fails(Fake):
        def put_blob(self, blob: Descriptor, content: IO[bytes]) -> None:
            first = len(self.calls) < 3
            super().put_blob(blob, content)
            if first:
                begun.wait()
                raise RemoteError("broken")

    target = Fails()
    with pytest.raises(RemoteError, match="broken"):
        copy_image(Fake({"v1": made}), "v1", target, "v1", jobs=3)
    assert len(target.calls) < 10


def test_progress_is_reported_at_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bars, "_EVERY", 0.0)
    monkeypatch.setattr(bars, "_LOOK", 0.001)
    data = b"x" * 3_000_000
    source = Fake({"v1": layers((sha256_digest(data), len(data), "x"))})
    source.blobs[sha256_digest(data)] = data
    target = LayoutDirectory(tmp_path / "to")
    put, say, reported = LayoutDirectory.put_blob, bars.Bars.say, threading.Event()

    def slow(self: LayoutDirectory, blob: Descriptor, content: IO[bytes]) -> None:
        put(self, blob, content)
        for _ in range(2):  # the first may have been under way already
            reported.clear()
            assert reported.wait(600)

    def seen(self: bars.Bars, line: str) -> None:
        say(self, line)
        reported.set()

    monkeypatch.setattr(LayoutDirectory, "put_blob", slow)
    monkeypatch.setattr(bars.Bars, "say", seen)
    copy_image(source, "v1", target, "v1", jobs=1)
    said = capsys.readouterr()
    assert said.out == ""
    assert f"copying to {target.name}: 3.0 of 3.0 MB, 0 s" in said.err

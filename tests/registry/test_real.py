"""Push, pull, list and delete on a real registry, and what skopeo makes of the result."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pytest

from builder.common.reference import Ref
from builder.errors import RemoteError, UsageError
from builder.images.registry.client import Repository
from builder.images.registry.copy import copy_image
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import (
    OCI_EMPTY,
    OCI_MANIFEST,
    Descriptor,
    RawManifest,
    sha256_digest,
)

from . import images, servers

if TYPE_CHECKING:
    from pathlib import Path

    from builder.images.registry.copy import Locations
    from tests.engine.machine import Programs

    from .servers import Crane, DockerRegistry


@pytest.mark.parametrize("docker", [False, True], ids=["oci", "docker"])
def test_push_and_pull_an_image(
    locations: Locations, registry: DockerRegistry, programs: Programs, tmp_path: Path, docker: bool
) -> None:
    made = images.image(tmp_path / "from", f"push-{docker}", docker=docker)
    there = locations.open(Ref(f"{registry.address}/push/{docker}:v1".lower()))
    copied = copy_image(LayoutDirectory(tmp_path / "from"), "v1", there.image, there.reference)
    assert (copied.manifest.digest, copied.streamed) == (made.digest, 3)

    name = f"docker://{registry.address}/push/{docker}:v1".lower()
    shown = servers.skopeo(programs, "inspect", "--tls-verify=false", name)
    assert shown["Digest"] == made.digest
    servers.skopeo(programs, "copy", "--src-tls-verify=false", name, f"dir:{tmp_path}/dir")

    back = LayoutDirectory(tmp_path / "to")
    copy_image(there.image, there.reference, back, "v1")
    assert images.check(tmp_path / "to") == made.digest
    assert back.references() == ("v1",)


@pytest.mark.parametrize("docker", [False, True], ids=["oci", "docker"])
def test_an_index_with_all_or_some_platforms(
    locations: Locations, registry: DockerRegistry, programs: Programs, tmp_path: Path, docker: bool
) -> None:
    made = images.index(tmp_path / "from", f"index-{docker}", docker=docker)
    source = LayoutDirectory(tmp_path / "from")
    there = locations.open(Ref(f"{registry.address}/index/{docker}:all".lower()))
    copy_image(source, "v1", there.image, "all")
    assert there.image.manifest("all").data == made.data

    part = copy_image(source, "v1", there.image, "arm", platforms=["linux/arm64"]).manifest
    kept = part.json()["manifests"]
    assert [e["platform"]["architecture"] for e in kept] == ["arm64"] + ["unknown"] * (not docker)
    name = f"docker://{registry.address}/index/{docker}".lower()
    raw = servers.skopeo(programs, "inspect", "--raw", "--tls-verify=false", f"{name}:arm")
    assert raw == part.json()
    servers.skopeo(
        programs, "copy", "--all", "--src-tls-verify=false", f"{name}:all", f"oci:{tmp_path}/oci:v1"
    )
    # what skopeo has written, we read; of Docker's types it makes OCI's
    again = copy_image(LayoutDirectory(tmp_path / "oci"), "v1", there.image, "again")
    assert docker or again.manifest.digest == made.digest


def test_missing_platforms(locations: Locations, tmp_path: Path) -> None:
    images.index(tmp_path / "many")
    images.image(tmp_path / "one")
    target = LayoutDirectory(tmp_path / "to")
    for name, known in (("many", "linux/arm64, linux/amd64"), ("one", "linux/arm64")):
        source = LayoutDirectory(tmp_path / name)
        with pytest.raises(UsageError, match=f"not for linux/riscv64, but for {known}"):
            copy_image(source, "v1", target, "v1", platforms=["linux/riscv64"])
    assert not (tmp_path / "to").exists()


def test_existing_blobs_are_not_sent_again(
    locations: Locations, registry: DockerRegistry, tmp_path: Path
) -> None:
    images.image(tmp_path / "from", "again")
    source = LayoutDirectory(tmp_path / "from")
    there = locations.open(Ref(f"{registry.address}/again/a:v1"))
    copy_image(source, "v1", there.image, "v1")

    before = locations.traffic.sent
    assert copy_image(source, "v1", there.image, "v1").streamed == 0
    assert locations.traffic.sent - before < 2_500  # each blob is asked for, and for one byte
    beside = copy_image(source, "v1", there.image, "v2")
    assert (beside.present, beside.streamed) == (3, 0)

    neighbour = locations.open(Ref(f"{registry.address}/again/b:v1"))
    mounted = copy_image(there.image, "v1", neighbour.image, "v1")
    assert (mounted.mounted, mounted.streamed_bytes) == (3, 0)
    assert locations.traffic.sent - before < 12_000


def test_from_one_registry_to_another(
    locations: Locations, registry: DockerRegistry, programs: Programs, tmp_path: Path
) -> None:
    made = images.index(tmp_path / "from", "across")
    here = locations.open(Ref(f"{registry.address}/across:v1"))
    copy_image(LayoutDirectory(tmp_path / "from"), "v1", here.image, "v1")
    with servers.DockerRegistry(programs) as other:
        there = locations.open(Ref(f"{other.address}/across:v1"))
        copied = copy_image(here.image, "v1", there.image, "v1")
        assert copied.streamed == 8
        shown = servers.skopeo(
            programs, "inspect", "--raw", "--tls-verify=false",
            f"docker://{other.address}/across:v1",
        )  # fmt: skip
        assert shown == made.json()


def test_a_second_implementation(
    locations: Locations, second: Crane, programs: Programs, tmp_path: Path
) -> None:
    made = images.index(tmp_path / "from", "second")
    there = locations.open(Ref(f"{second.address}/some/where:v1"))
    copy_image(LayoutDirectory(tmp_path / "from"), "v1", there.image, "v1")
    neighbour = locations.open(Ref(f"{second.address}/else/where:v1"))
    copy_image(there.image, "v1", neighbour.image, "v1")
    copy_image(neighbour.image, "v1", LayoutDirectory(tmp_path / "to"), "v1")
    assert images.check(tmp_path / "to") == made.digest
    name = f"docker://{second.address}/else/where:v1"
    assert servers.skopeo(programs, "inspect", "--tls-verify=false", name)["Digest"] == made.digest


def test_tags_are_listed_and_deleted(
    locations: Locations, registry: DockerRegistry, tmp_path: Path
) -> None:
    images.image(tmp_path / "from", "tags")
    repository = Repository(locations.registry(registry.address), "tags")
    assert repository.tags() == []
    names = [f"t{number}" for number in range(7)]
    for name in names:
        copy_image(LayoutDirectory(tmp_path / "from"), "v1", repository, name)
    assert sorted(repository.tags()) == names
    digest = repository.digest_of("t1")
    assert digest is not None
    assert repository.remove(digest)
    assert repository.digest_of("t1") is None
    assert repository.remove(digest)  # it is gone, whoever did it


@pytest.mark.parametrize("which", ["registry", "second"])
def test_referrers_with_and_without_the_registry_api(
    locations: Locations, which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue(which)
    subject = images.image(tmp_path / "from", "refer")
    repository = locations.registry(server.address).repository("refer")
    copy_image(LayoutDirectory(tmp_path / "from"), "v1", repository, "v1")
    assert repository.referrers(subject.digest) == ()
    empty = Descriptor(media_type=OCI_EMPTY, digest=sha256_digest(b"{}"), size=2)
    repository.put_blob(empty, io.BytesIO(b"{}"))
    kinds = ["application/x.one", "application/x.two"]
    for kind in (*kinds, kinds[0]):  # attaching twice changes nothing
        value = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": kind,
            "config": empty.as_json(),
            "layers": [empty.as_json()],
            "subject": subject.descriptor.as_json(),
            "annotations": {"a": kind},
        }
        repository.attach(RawManifest(data=json.dumps(value).encode(), media_type=OCI_MANIFEST))
    assert sorted(e.artifact_type for e in repository.referrers(subject.digest)) == kinds
    (only,) = repository.referrers(subject.digest, kinds[1])
    assert only.annotations == {"a": kinds[1]}
    assert repository.manifest(only.digest).json()["subject"]["digest"] == subject.digest


def test_wrong_bytes_are_not_stored(locations: Locations, registry: DockerRegistry) -> None:
    repository = locations.registry(registry.address).repository("wrong")
    for data in (b"other", b"longer than said", b"s", b"x" * 200_000):
        blob = Descriptor(media_type="", digest=sha256_digest(b"right"), size=5)
        with pytest.raises(RemoteError, match="nothing was stored"):
            repository.put_blob(blob, io.BytesIO(data))
        assert not repository.has(blob.digest)


def test_missing_images(locations: Locations, registry: DockerRegistry) -> None:
    repository = locations.registry(registry.address).repository("not/there")
    with pytest.raises(RemoteError, match=r"not/there:v1: answered 404 \((MANIFEST|NAME)_UNKNOWN"):
        repository.manifest("v1")
    blob = Descriptor(media_type="", digest=sha256_digest(b"no"), size=2)
    with (
        pytest.raises(RemoteError, match="answered 404"),
        repository.open(blob) as stream,
    ):
        stream.read()

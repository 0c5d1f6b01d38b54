"""What ``tags --prune`` must never take away, and that it says exactly what it does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from builder.__main__ import run
from builder.images.registry.client import Repository
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import (
    OCI_CONFIG,
    OCI_INDEX,
    OCI_MANIFEST,
    Descriptor,
    RawManifest,
    sha256_digest,
)
from builder.publishing import tags as command
from builder.publishing.tags import judge
from tests.documents import validated

from . import images, overlays, servers
from .test_publish import any_registry, attached, name_of, publish, repository, tags  # noqa: F401
from .test_tags import _quick, fill  # noqa: F401

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.engine.machine import Registry

SIGNATURE = "application/vnd.dev.cosign.simplesigning.v1+json"


def prune(capsys: pytest.CaptureFixture[str], where: str, keep: int, *words: str) -> dict[str, Any]:
    """The document of a run that succeeds."""
    capsys.readouterr()
    assert run(["tags", where, "--prune", "--keep", str(keep), "--json", *words]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def retag(opened: Repository, digest: str, tag: str) -> None:
    opened.put_manifest(opened.manifest(digest), tag)


def put_signature(
    opened: Repository, folder: Path, subject: str, media_type: str = SIGNATURE
) -> str:
    """What cosign attaches under a tag; gives the tag."""
    layout = LayoutDirectory(folder)
    blobs = [
        images.put(layout, images.document({"signs": subject}), media_type),
        images.put(layout, images.document({"architecture": "", "os": ""}), OCI_CONFIG),
    ]
    for blob in blobs:
        with layout.open(blob) as stream:
            opened.put_blob(blob, stream)
    value = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": blobs[1].as_json(),
        "layers": [blobs[0].as_json()],
    }
    tag = f"{subject.replace(':', '-')}.sig"
    opened.put_manifest(RawManifest(data=images.document(value), media_type=OCI_MANIFEST), tag)
    return tag


def put_index(opened: Repository, tag: str, *listed: Descriptor) -> RawManifest:
    value = {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": [entry.as_json() for entry in listed],
    }
    made = RawManifest(data=images.document(value), media_type=OCI_INDEX)
    opened.put_manifest(made, tag or made.digest)
    return made


def test_a_foreign_tag_that_looks_like_ours(
    registry: servers.DockerRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Twelve hexadecimal digits at the end make no tag ours."""
    where = f"{registry.address}/keep/lookalike"
    digests = fill(tmp_path, where, "ab", monkeypatch)
    retag(repository(registry.address, "keep/lookalike"), digests["a"], "prod-deadbeef0123")
    before = tags(registry.address, "keep/lookalike")
    document = prune(capsys, where, 1)
    assert tags(registry.address, "keep/lookalike") == before
    assert document["deleted"] == []
    (row,) = [row for row in document["images"] if row["digest"] == digests["a"]]
    assert row["keep"]
    assert "prod-deadbeef0123" in row["reason"]


def test_signatures_of_images_elsewhere_are_kept(
    registry: servers.DockerRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``COSIGN_REPOSITORY`` keeps signatures of other repositories here; ours go with the image."""
    name = "keep/signatures"
    where = f"{registry.address}/{name}"
    digests = fill(tmp_path, where, "ab", monkeypatch)
    opened = repository(registry.address, name)
    foreign = put_signature(opened, tmp_path / "foreign", sha256_digest(b"elsewhere"))
    mine = put_signature(opened, tmp_path / "mine", digests["a"])
    signature = opened.digest_of(mine)
    wish = prune(capsys, where, 1, "--dry-run")
    document = prune(capsys, where, 1)
    assert foreign in opened.tags()
    assert mine not in opened.tags()
    assert signature in document["deleted"]
    validated("tags", wish)
    validated("tags", document)
    assert [row["digest"] for row in wish["removals"]] == document["deleted"]


def test_a_tag_that_looks_like_a_signature_and_is_an_image(
    registry: servers.DockerRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "keep/disguised"
    where = f"{registry.address}/{name}"
    digests = fill(tmp_path, where, "ab", monkeypatch)
    opened = repository(registry.address, name)
    images.image(tmp_path / "other", "other")
    servers.skopeo(
        servers.programs(), "copy", "--dest-tls-verify=false", f"oci:{tmp_path}/other:v1",
        f"docker://{where}:{digests['a'].replace(':', '-')}.sig",
    )  # fmt: skip
    document = prune(capsys, where, 1)
    assert digests["a"] in document["deleted"]
    assert f"{digests['a'].replace(':', '-')}.sig" in opened.tags()


def test_unverified_images_do_not_displace_verified_ones(
    registry: servers.DockerRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "keep/verified"
    where = f"{registry.address}/{name}"
    fill(tmp_path, where, "ab", monkeypatch)
    for seed in "cd":
        overlays.build(tmp_path / seed, seed)
        overlays.evidence(tmp_path / seed, passed=False, checks=[])
        monkeypatch.setenv("SOURCE_DATE_EPOCH", str(1_700_000_000 + 3600 * ord(seed)))
        assert publish(tmp_path / seed, "--to", where, "--force") == 0
        monkeypatch.delenv("SOURCE_DATE_EPOCH")
    prune(capsys, where, 1)
    left = {name_of("b"), name_of("d", verified=False)}
    assert set(tags(registry.address, name)) == left
    fill(tmp_path, where, "ef", monkeypatch)
    prune(capsys, where, 2)
    assert set(tags(registry.address, name)) == {name_of("e"), name_of("f")}


def test_a_tag_moved_to_the_image_after_the_inventory(
    registry: servers.DockerRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One moves before the first delete, one between two deletes; neither image goes."""
    name = "keep/moved"
    where = f"{registry.address}/{name}"
    digests = fill(tmp_path, where, "abcd", monkeypatch)
    opened = repository(registry.address, name)
    remove = Repository.remove

    def judge_and_move(*words: Any) -> Any:
        verdicts = judge(*words)
        retag(opened, digests["c"], "latest")
        return verdicts

    def remove_and_list(self: Repository, digest: str) -> bool:
        gone = remove(self, digest)
        if digest == digests["b"]:
            put_index(opened, "both", opened.manifest(digests["a"]).descriptor)
        return gone

    monkeypatch.setattr(command, "judge", judge_and_move)
    monkeypatch.setattr(Repository, "remove", remove_and_list)
    document = prune(capsys, where, 1)
    now = tags(registry.address, name)
    assert set(now) == {name_of("a"), "both", name_of("c"), "latest", name_of("d")}
    for seed in "ac":
        assert len(attached(registry.address, name, digests[seed])) == 3
        assert digests[seed] not in document["deleted"]
    spared = {row["digest"]: row["reason"] for row in document["spared"]}
    assert "latest" in spared[digests["c"]]
    assert "both" in spared[digests["a"]]
    assert digests["b"] in document["deleted"]


def test_a_foreign_index_keeps_its_images(
    registry: servers.DockerRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also an index in an index, which we do not publish."""
    name = "keep/index"
    where = f"{registry.address}/{name}"
    digests = fill(tmp_path, where, "ab", monkeypatch)
    opened = repository(registry.address, name)
    inner = put_index(opened, "", opened.manifest(digests["a"]).descriptor)
    put_index(opened, "outer", inner.descriptor)
    before = tags(registry.address, name)
    document = prune(capsys, where, 1)
    assert document["deleted"] == []
    assert tags(registry.address, name) == before


def test_a_refusal_half_way_lists_the_deleted_images(
    registry: servers.DockerRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "keep/refused"
    where = f"{registry.address}/{name}"
    digests = fill(tmp_path, where, "abc", monkeypatch)
    remove = Repository.remove

    def refuse(self: Repository, digest: str) -> bool:
        return digest != digests["a"] and remove(self, digest)

    monkeypatch.setattr(Repository, "remove", refuse)
    capsys.readouterr()
    assert run(["tags", where, "--prune", "--keep", "1", "--json"]) == 8
    document = json.loads(capsys.readouterr().out)
    said = document["error"]["message"]
    assert digests["b"] in document["deleted"]
    assert digests["a"] not in document["deleted"]
    assert "nothing was deleted" not in said
    assert f"{len(document['deleted'])} manifests" in said
    assert name_of("a") in said
    assert name_of("b") not in said


def test_a_dry_run_lists_every_deletion(
    registry: servers.DockerRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Images, the images of an index, proofs and signatures; what an interrupted run has left."""
    name = "keep/listed"
    where = f"{registry.address}/{name}"
    overlays.build_index(tmp_path / "a", "a")
    overlays.evidence(tmp_path / "a")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert publish(tmp_path / "a", "--to", where) == 0
    digests = fill(tmp_path, where, "bcd", monkeypatch)
    opened = repository(registry.address, name)
    put_signature(opened, tmp_path / "sig", digests["b"])
    assert opened.remove(digests["c"])
    before = opened.tags()
    wish = prune(capsys, where, 1, "--dry-run")
    assert opened.tags() == before
    assert wish["deleted"] == []
    document = prune(capsys, where, 1)
    assert [row["digest"] for row in wish["removals"]] == document["deleted"]
    assert {row["what"] for row in wish["removals"]} == {
        "image", "part", "proof", "signature", "list"
    }  # fmt: skip
    assert set(tags(registry.address, name)) == {name_of("d")}
    assert len(opened.tags()) == 2
    assert document["spared"] == []
    assert run(["tags", where, "--prune", "--keep", "1", "--dry-run"]) == 0
    assert "would delete" not in capsys.readouterr().out


def test_tags_are_deleted_too(
    any_registry: Registry,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """go-containerregistry's registry deletes a digest, and its tags name it still."""
    name = "keep/tags"
    where = f"{any_registry.address}/{name}"
    digests = fill(tmp_path, where, "ab", monkeypatch)
    document = prune(capsys, where, 1)
    assert set(tags(any_registry.address, name)) == {name_of("b")}
    assert digests["a"] in document["deleted"]
    assert document["spared"] == []


def test_a_tag_that_the_registry_keeps_is_reported(
    second: servers.Crane,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = f"{second.address}/keep/left"
    digests = fill(tmp_path, where, "ab", monkeypatch)
    remove = Repository.remove

    def digests_only(self: Repository, reference: str) -> bool:
        return reference.startswith("sha256:") and remove(self, reference)

    monkeypatch.setattr(Repository, "remove", digests_only)
    document = prune(capsys, where, 1)
    assert digests["a"] not in document["deleted"]
    reasons = {row["digest"]: row["reason"] for row in document["spared"]}
    assert f"{name_of('a')} still names it" in reasons[digests["a"]]
